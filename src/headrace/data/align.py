"""Each rank's loader, made to agree with the others' on where an epoch ends.

Ranks that average gradients must run the same number of batches. Where a loader has fewer than
another rank's, its last batch is given again to be run with weight 0:

    rank 0   [0][1][2][3]
    rank 1   [0][1][2][2, weight 0]

Loaders that know their length agree on it once, when the epoch begins; others before each batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.data.loader_state import first_state
from headrace.device import Ledger
from headrace.errors import StepError
from headrace.parallel import Ranks


@dataclass(frozen=True, slots=True)
class Share:
    """What a batch is to the other ranks. `own` of the pass's batches up to this one are the
    loader's own, and `ended` says that it has no more. A `weightless` batch only keeps the other
    ranks company. `ends_epoch`: no rank has a batch after it."""

    own: int
    ended: bool
    weightless: bool
    ends_epoch: bool


class Aligned:
    """A loader's batches, as many on each rank. `share` says what the one given last is to the
    others. No more than `most` are asked for. `ended` says that this rank's own came to their end
    before the pass began, which was resumed: the loader gives the last of them, to stand in. The
    state of a loader that keeps one is asked for here."""

    def __init__(
        self,
        loader: Iterable[Any],
        ranks: Ranks,
        ledger: Ledger,
        *,
        most: int | None = None,
        ended: bool = False,
    ) -> None:
        self._loader, self._ranks, self._ledger = loader, ranks, ledger
        self._most, self._ended = most, ended
        self._own: int | None = 0 if ended else None  # how many the loader gave, once it has ended
        self._promised: int | None = None  # how many it says that it has
        self._last: int | None = None  # the epoch's last batch, as soon as it is known
        self.share = Share(0, ended, False, False)
        # The loader's own, after the batch that was given last, and after the one asked for last.
        self._keeper, self._state = first_state(loader)
        self._asked_state = self._state
        if self._keeper is not None:
            self.state_dict = lambda: self._state
            self.load_state_dict = self._keeper.load_state_dict

    def _share_of(self, index: int) -> Share:
        own, given = self._own, index + 1
        found = None if own == self._most else own
        return Share(
            own=given if own is None else min(own, given),
            ended=any(end is not None and given >= end for end in (found, self._promised)),
            weightless=own is not None and index >= own,
            ends_epoch=index == self._last,
        )

    def __iter__(self) -> Iterator[Any]:
        self._promised = 0 if self._ended else _length(self._loader)
        lengths = self._ranks.all_gather(self._at_most(self._promised), self._ledger)
        known = [length for length in lengths if length is not None]
        batches = iter(()) if self._ended else itertools.islice(iter(self._loader), self._most)
        own = self._counted(batches)
        by_batch = len(known) < len(lengths)
        is_needed = by_batch or max(known) > 0 or self._keeper is not None
        before = self._stand_in() if self._ended and is_needed else None
        if by_batch:
            return self._by_batch(own, before)
        promised = known[self._ranks.rank]
        self._require_some(1 if self._ended else promised, max(known))
        return self._by_length(own, before, promised, max(known))

    def _at_most(self, length: int | None) -> int | None:
        return length if length is None or self._most is None else min(length, self._most)

    def _stand_in(self) -> Any:
        """The batch to be run with weight 0. A loader that keeps a state has that after its own
        epoch then, as if it had not been asked."""
        batch = next(iter(self._loader), None)
        if self._keeper is not None and batch is None:  # it had yet to find that it has ended
            self._state = self._asked_state = self._keeper.state_dict()
            batch = next(iter(self._loader), None)
        if self._keeper is not None:
            self._keeper.load_state_dict(self._state)
        if batch is None:
            raise StepError("the loader has no batch, and had some in this epoch before")
        return batch

    def _by_length(
        self, own: Iterator[Any], batch: Any, promised: int, count: int
    ) -> Iterator[Any]:
        self._last = count - 1
        for index in range(count):
            batch = next(own, batch) if self._own is None else batch
            if batch is None:
                raise StepError(f"the loader has a length of {promised}, and gave no batch")
            self._state, self.share = self._asked_state, self._share_of(index)
            yield batch
        more = next(own, None) if self._own is None else None
        self._state = self._asked_state
        if count == promised and more is not None:
            raise StepError(
                f"the loader gave more batches than its length of {promised}: the other ranks have "
                "ended. Expected a length that is true, or none"
            )

    def _by_batch(self, own: Iterator[Any], before: Any) -> Iterator[Any]:
        batch, some = self._next(own, before)
        self._require_some(int(batch is not None), int(some))
        index = 0
        while some:
            here, state = batch, self._asked_state
            batch, some = self._next(own, here)  # one ahead: `here` may be the last
            if not some:
                self._last = index
            self._state, self.share = state, self._share_of(index)
            yield here
            index += 1
        self._state = self._asked_state

    def _next(self, own: Iterator[Any], before: Any) -> tuple[Any, bool]:
        """The next batch, or the one before in its stead; and whether any rank has a new one."""
        batch = next(own, None) if self._own is None else None
        (some,) = self._ranks.all_reduce_max([int(batch is not None)], self._ledger)
        return (before if batch is None else batch), bool(some)

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        count = 0
        for batch in batches:
            self._note_state()
            yield batch
            count += 1
        self._note_state()
        self._own = count

    def _note_state(self) -> None:
        if self._keeper is not None:
            self._asked_state = self._keeper.state_dict()

    def _require_some(self, fewest: int, most: int) -> None:
        fewest, most = self._ranks.all_reduce_max([-fewest, most], self._ledger)
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
