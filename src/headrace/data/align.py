"""The same number of batches on every rank.

Ranks that average gradients must run the same number of batches. A rank whose loader ends before
another's repeats its last batch, with weight 0:

    rank 0   [0][1][2][3]
    rank 1   [0][1][2][2, weight 0]

If all loaders have a length, the ranks exchange it once, when the epoch begins; else they agree
before each batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.data.loader_state import first_state
from headrace.data.tree import batch_tensors
from headrace.device import Ledger
from headrace.errors import StepError
from headrace.parallel import Ranks


@dataclass(frozen=True, slots=True)
class Alignment:
    """How a rank's batch relates to those of the other ranks.

    `own` counts the batches of this pass, up to this one, that this rank's loader yielded; `ended`:
    it has no more. `zero_weight`: the batch is repeated, with weight 0, to keep the ranks in step.
    `ends_epoch`: no rank has a batch after it.
    """

    own: int
    ended: bool
    zero_weight: bool
    ends_epoch: bool


class Aligned:
    """A loader with as many batches as those of the other ranks.

    `alignment` belongs to the batch yielded last. The loader is asked for `limit` batches at most.
    `ended`: in a resumed pass, this rank's loader had ended before; it yields its last batch, to be
    repeated. `state_dict` is the loader's, after the batch yielded last.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        ranks: Ranks,
        ledger: Ledger,
        *,
        limit: int | None = None,
        ended: bool = False,
    ) -> None:
        self._loader, self._ranks, self._ledger = loader, ranks, ledger
        self._limit, self._ended = limit, ended
        # How many batches this rank's loader has yielded; None until it has ended.
        self._own_count: int | None = 0 if ended else None
        self._length: int | None = None  # the loader's, if it has one
        self._last: int | None = None  # the index of the epoch's last batch, once it is known
        self.alignment = Alignment(0, ended, False, False)
        # The loader's state after the batch that was yielded last, and after the one fetched last.
        self._stateful, self._state = first_state(loader)
        self._fetched_state = self._state
        if self._stateful is not None:
            self.state_dict = lambda: self._state
            self.load_state_dict = self._stateful.load_state_dict

    def _alignment_of(self, index: int) -> Alignment:
        own, count = self._own_count, index + 1
        found_end = None if own == self._limit else own  # at the limit, the loader may have more
        return Alignment(
            own=count if own is None else min(own, count),
            ended=any(end is not None and count >= end for end in (found_end, self._length)),
            zero_weight=own is not None and index >= own,
            ends_epoch=index == self._last,
        )

    def __iter__(self) -> Iterator[Any]:
        self._length = 0 if self._ended else _length(self._loader)
        lengths = self._ranks.all_gather(self._limited(self._length), self._ledger)
        known = [length for length in lengths if length is not None]
        source = iter(()) if self._ended else itertools.islice(iter(self._loader), self._limit)
        batches = self._counted(source)
        by_batch = len(known) < len(lengths)
        is_needed = by_batch or max(known) > 0 or self._stateful is not None
        repeated = self._load_repeated() if self._ended and is_needed else None
        if by_batch:
            return self._by_batch(batches, repeated)
        length = known[self._ranks.rank]
        self._require_batches(1 if self._ended else length, max(known))
        return self._by_length(batches, repeated, length, max(known))

    def _limited(self, length: int | None) -> int | None:
        return length if length is None or self._limit is None else min(length, self._limit)

    def _load_repeated(self) -> Any:
        """The batch to repeat, from a loader that had ended before this pass. Afterwards the loader
        has the state from the end of its epoch again, as if it had not been asked."""
        batch = next(iter(self._loader), None)
        if self._stateful is not None and batch is None:  # it has reached its end only now
            self._state = self._fetched_state = self._stateful.state_dict()
            batch = next(iter(self._loader), None)
        if self._stateful is not None:
            self._stateful.load_state_dict(self._state)
        if batch is None:
            raise StepError(
                "the loader yields no batch, and did so earlier in this epoch: expected the same "
                "loader"
            )
        return batch

    def _by_length(
        self, batches: Iterator[Any], batch: Any, length: int, count: int
    ) -> Iterator[Any]:
        self._last = count - 1
        for index in range(count):
            batch = next(batches, batch) if self._own_count is None else batch
            if batch is None:
                raise StepError(
                    f"the loader has a length of {length} and yielded no batch: expected a true "
                    "length, or none"
                )
            self._state, self.alignment = self._fetched_state, self._alignment_of(index)
            yield batch
        more = next(batches, None) if self._own_count is None else None
        self._state = self._fetched_state
        if count == length and more is not None:
            raise StepError(
                f"the loader yielded more batches than its length of {length}, and the other ranks "
                "have ended: expected a true length, or none"
            )

    def _by_batch(self, batches: Iterator[Any], repeated: Any) -> Iterator[Any]:
        following, any_rank = self._next(batches, repeated)
        self._require_batches(int(following is not None), int(any_rank))
        index = 0
        while any_rank:
            batch, state = following, self._fetched_state
            versions = _versions(batch)
            following, any_rank = self._next(batches, batch)  # one ahead: `batch` may be the last
            if _versions(batch) != versions:
                raise StepError(
                    f"the loader wrote to batch {index} when it was asked for the next one: with "
                    "several ranks and no length, expected new tensors for each batch"
                )
            if not any_rank:
                self._last = index
            self._state, self.alignment = state, self._alignment_of(index)
            yield batch
            index += 1
        self._state = self._fetched_state

    def _next(self, batches: Iterator[Any], before: Any) -> tuple[Any, bool]:
        """The next batch, or `before` if the loader has ended; and whether any rank's has not."""
        batch = next(batches, None) if self._own_count is None else None
        (any_rank,) = self._ranks.all_reduce_max([int(batch is not None)], self._ledger)
        return (before if batch is None else batch), bool(any_rank)

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        count = 0
        for batch in batches:
            self._note_state()
            yield batch
            count += 1
        self._note_state()
        self._own_count = count

    def _note_state(self) -> None:
        if self._stateful is not None:
            self._fetched_state = self._stateful.state_dict()

    def _require_batches(self, here: int, anywhere: int) -> None:
        """Raise on all ranks if one has no batch while another has some."""
        fewest, anywhere = self._ranks.all_reduce_max([-here, anywhere], self._ledger)
        if anywhere > 0 and fewest == 0:
            raise StepError(
                "a rank's loader has no batch in an epoch in which others have some: expected at "
                "least one on each rank; its weight may be 0"
            )


def _versions(batch: Any) -> list[int]:
    """How often each tensor of a batch was written to, as far as PyTorch counts it."""
    return [one._version for one in batch_tensors(batch) if not one.is_inference()]


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None
