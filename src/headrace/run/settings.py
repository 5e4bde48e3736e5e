"""What `headrace run` is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

#: The kinds of parts that can be sped up.
KINDS = ("model", "optimizer", "data")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """`only` are the kinds of parts to speed up: model, optimizer, data. `after` calls of each part
    run as they are before one is captured. The first `check` replays of each are compared with what
    the part does without graphs."""

    only: frozenset[str] = frozenset(KINDS)
    compile: bool = False
    check: int = 0
    after: int = 10
