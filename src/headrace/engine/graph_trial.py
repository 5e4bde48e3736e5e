"""`graphs="auto"`: are graphs worth it here? The same shape's steps, timed both ways."""

from __future__ import annotations

import statistics
from collections.abc import Hashable
from dataclasses import dataclass, field

# A graph that saves less than this share of a step is not worth the memory it holds.
_WORTH_IT = 0.05
TRIAL_STEPS = 3


@dataclass(slots=True)
class Trial:
    """`graphs="auto"`: the same shape's steps timed both ways, each from an idle device."""

    key: Hashable = None
    one_by_one_ms: list[float] = field(default_factory=list)
    launch_ms: list[float] = field(default_factory=list)
    replay_ms: list[float] = field(default_factory=list)
    pays: bool | None = None
    decision: str | None = None

    def takes(self, key: Hashable, replay: bool) -> bool:
        if self.pays is not None or (self.key is not None and key != self.key):
            return False
        return len(self.replay_ms if replay else self.one_by_one_ms) < TRIAL_STEPS

    def add(self, key: Hashable, replay: bool, launch_ns: int, step_ns: int) -> None:
        self.key = key
        if replay:
            self.replay_ms.append(step_ns / 1e6)
        else:
            self.launch_ms.append(launch_ns / 1e6)
            self.one_by_one_ms.append(step_ns / 1e6)

    def is_over(self) -> bool:
        return self.pays is None and len(self.replay_ms) == TRIAL_STEPS

    def decide(self) -> str:
        eager, launch = statistics.median(self.one_by_one_ms), statistics.median(self.launch_ms)
        replay = statistics.median(self.replay_ms)
        self.pays = replay < eager * (1 - _WORTH_IT)
        self.decision = (
            f"a step takes {eager:.2f} ms launched kernel by kernel ({launch:.2f} ms of it on the "
            f"host) and {replay:.2f} ms as a graph: {'' if self.pays else 'no '}graphs are used"
        )
        return self.decision
