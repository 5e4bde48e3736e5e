"""What `headrace run` is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.plan import graphs_are_asked_for

#: The kinds of parts that can be sped up.
KINDS = ("model", "optimizer", "data")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """`only` are the kinds of parts to speed up: model, optimizer, data. `after` calls of each part
    run as they are before one is captured. `plan` "auto" keeps graphs if steps are faster with
    them, and "graph" without asking. The first `check` replays of each are compared with what
    the part does without graphs."""

    only: frozenset[str] = frozenset(KINDS)
    compile: bool = False
    check: int = 0
    after: int = 10
    plan: Literal["auto", "graph"] = "auto"

    @property
    def chooses(self) -> bool:
        """Whether graphs must show that they are faster. Compiled models have other results than
        the script's own, and a check needs its replays."""
        is_settled = self.plan == "graph" or self.compile or self.check or graphs_are_asked_for()
        return not is_settled
