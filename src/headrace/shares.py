"""Each rank's loader, made to agree with the others' on where an epoch ends.

Ranks that average gradients must run the same number of batches. Where a loader has fewer than
another rank's, its last batch is given again to be run with weight 0:

    rank 0   [0][1][2][3]
    rank 1   [0][1][2][2, weight 0]

Loaders that know their length agree on it once, when the epoch begins; others before each batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from headrace.errors import StepError
from headrace.ledger import Ledger
from headrace.ranks import Ranks


class Shares:
    """A loader's batches, as many on each rank, and what the loop has to know of them."""

    def __init__(self, loader: Iterable[Any], ranks: Ranks, ledger: Ledger) -> None:
        self._loader, self._ranks, self._ledger = loader, ranks, ledger
        self._own: int | None = None  # how many the loader gave, once it has ended
        self._last: int | None = None  # the epoch's last batch, as soon as it is known

    def is_stand_in(self, index: int) -> bool:
        """Whether batch `index` only keeps the other ranks company."""
        return self._own is not None and index >= self._own

    def is_last(self, index: int) -> bool:
        """Whether no batch comes after `index`, on any rank."""
        return index == self._last

    def __iter__(self) -> Iterator[Any]:
        lengths = self._ranks.gathered(_length(self._loader), self._ledger)
        known = [length for length in lengths if length is not None]
        own = self._counted(iter(self._loader))
        if len(known) < len(lengths):
            return self._by_batch(own)
        self._require_some(min(known), max(known))
        return self._by_length(own, known[self._ranks.rank], max(known))

    def _by_length(self, own: Iterator[Any], promised: int, count: int) -> Iterator[Any]:
        self._last = count - 1
        batch = None
        for _ in range(count):
            batch = next(own, batch) if self._own is None else batch
            if batch is None:
                raise StepError(f"the loader has a length of {promised}, and gave no batch")
            yield batch
        if self._own is None and count == promised and next(own, None) is not None:
            raise StepError(
                f"the loader gave more batches than its length of {promised}: the other ranks have "
                "ended. Expected a length that is true, or none"
            )

    def _by_batch(self, own: Iterator[Any]) -> Iterator[Any]:
        batch, some = self._next(own, None)
        self._require_some(int(batch is not None), int(some))
        index = 0
        while some:
            here = batch
            batch, some = self._next(own, here)  # one ahead: `here` may be the last
            if not some:
                self._last = index
            yield here
            index += 1

    def _next(self, own: Iterator[Any], before: Any) -> tuple[Any, bool]:
        """The next batch, or the one before in its stead; and whether any rank has a new one."""
        batch = next(own, None) if self._own is None else None
        (some,) = self._ranks.maximum([int(batch is not None)], self._ledger)
        return (before if batch is None else batch), bool(some)

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        count = 0
        for batch in batches:
            yield batch
            count += 1
        self._own = count

    def _require_some(self, fewest: int, most: int) -> None:
        fewest, most = self._ranks.maximum([-fewest, most], self._ledger)
        if most > 0 and fewest == 0:
            raise StepError(
                "a rank's loader has no batch in an epoch in which others have some: expected one "
                "at least on each, which counts for nothing if its weight is 0"
            )


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None
