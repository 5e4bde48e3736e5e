"""When a graph is checked again, and what that has found.

What a captured function reads in places that no comparison before a replay can see (a file, the
clock, an extension) is found by training one real batch eagerly, now and then, and comparing what
it did with what the graph repeats.
"""

from __future__ import annotations

import weakref
from typing import Any

_EARLY = (10, 30, 100, 300)
# After this many checks that found a difference, nothing is captured any more.
_MAX_DIFFERENCES = 3


class Recheck:
    """Counts the uses of each graph. A graph is checked at its uses 10, 30, 100 and 300, and then
    at every `every`-th; 0 stands for never."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._uses: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._equal_at: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._calls = self._differences = 0
        #: How many checks were made, and what the last one that differed has found.
        self.checks = 0
        self.differed: str | None = None

    def is_due(self, graph: Any) -> bool:
        """Whether to check a graph now, instead of using it. Counts a use."""
        self._calls += 1
        if not self._every:
            return False
        uses = self._uses[graph] = self._uses.get(graph, 0) + 1
        if uses == 1:
            self._equal_at[graph] = self._calls - 1
        return uses in _EARLY or uses % self._every == 0

    def learn(self, graph: Any, difference: str | None) -> bool:
        """A graph was checked. Returns whether it must be dropped."""
        self.checks += 1
        if difference is None:
            self._equal_at[graph] = self._calls
            return False
        self._differences += 1
        first, last = self._equal_at[graph] + 1, self._calls - 1
        self.differed = (
            f"graphs: a step that was checked differs from its graph: {difference}. Replays "
            f"{first} to {last} may have repeated the old value. The graphs are dropped; "
            "keep what changes where a comparison sees it: in an attribute, a closure, a global or "
            "an argument"
        )
        return True

    @property
    def is_hopeless(self) -> bool:
        """Whether checks have differed so often that nothing is worth capturing."""
        return self._differences >= _MAX_DIFFERENCES
