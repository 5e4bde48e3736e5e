"""`graphs="auto"`: times steps with and without a graph, and decides whether graphs are used."""

from __future__ import annotations

import statistics
from collections.abc import Hashable
from dataclasses import dataclass, field

# A graph must save at least this share of a step's time to be worth its memory.
_MIN_SAVING = 0.05
TIMED_STEPS = 3


@dataclass(slots=True)
class GraphTiming:
    """Times of eager steps and of replays for one shape (`key`), each begun on an idle device.

    `launch_ms` is the host's part of an eager step. `pays` is None until there are `TIMED_STEPS`
    of both kinds; then `decision` says in words what was measured.
    """

    key: Hashable = None
    eager_ms: list[float] = field(default_factory=list)
    launch_ms: list[float] = field(default_factory=list)
    replay_ms: list[float] = field(default_factory=list)
    pays: bool | None = None
    decision: str | None = None

    def wants(self, key: Hashable, replay: bool) -> bool:
        """Whether the next step of shape `key` should be timed."""
        if self.pays is not None or (self.key is not None and key != self.key):
            return False
        return len(self.replay_ms if replay else self.eager_ms) < TIMED_STEPS

    def add(self, key: Hashable, replay: bool, launch_ns: int, step_ns: int) -> None:
        self.key = key
        if replay:
            self.replay_ms.append(step_ns / 1e6)
        else:
            self.launch_ms.append(launch_ns / 1e6)
            self.eager_ms.append(step_ns / 1e6)

    def restore(self, *, pays: bool, decision: str | None) -> None:
        """Take a decision from an earlier run."""
        self.pays, self.decision = pays, decision

    def is_complete(self) -> bool:
        """Whether all steps are timed and `decide` can be called."""
        return self.pays is None and len(self.replay_ms) == TIMED_STEPS

    def decide(self) -> str:
        """Set `pays` and `decision`, and return the latter."""
        eager, launch = statistics.median(self.eager_ms), statistics.median(self.launch_ms)
        replay = statistics.median(self.replay_ms)
        self.pays = replay < eager * (1 - _MIN_SAVING)
        self.decision = (
            f"a step takes {eager:.2f} ms launched kernel by kernel ({launch:.2f} ms of it on the "
            f"host) and {replay:.2f} ms as a graph: {'' if self.pays else 'no '}graphs are used"
        )
        return self.decision
