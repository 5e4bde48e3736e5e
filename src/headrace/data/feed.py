"""One pass over a loader: batches on the device, each with the loader's position after it.

    loader → (Aligned) → Source → PrefetchIterator → Feed → Fetched

`Fetched` is what the engine receives. Its cursor is the loader's position after that batch: a
checkpoint stores the position after the last batch *trained on*, however many were fetched since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from headrace.data.prefetch_pass import PrefetchIterator
from headrace.data.prefetcher import Prefetcher
from headrace.device import Device, Stream


class Cursor(NamedTuple):
    """The position of a loader after a batch.

    `own` counts the epoch's batches that this rank's loader yielded. `ended`: it has no more, while
    other ranks' loaders may. `loader` is the loader's own state, if it keeps one. `rng_before` has
    the states of the host's random generators before the batch, if the loader may have drawn from
    them.
    """

    own: int
    ended: bool = False
    loader: Any = None
    rng_before: dict[str, Any] | None = None


class Fetched(NamedTuple):
    """A batch on the device. `number` counts from 0 in its epoch. A `zero_weight` batch repeats the
    one before with weight 0, to keep ranks in step. `ends_epoch`: no rank has a batch after it."""

    number: int
    batch: Any
    nbytes: int
    samples: int
    cursor: Cursor
    zero_weight: bool = False
    ends_epoch: bool = False


class Batches(Protocol):
    """The batches of a pass, in order."""

    def __iter__(self) -> Iterator[Fetched]: ...

    def __next__(self) -> Fetched: ...

    def has_more(self, must_know: Callable[[], bool]) -> bool:
        """Whether another batch, or an error, follows. If nothing was fetched ahead, only the
        loader knows: it is asked if `must_know()` is true, and otherwise the answer is True."""
        ...


class Feed:
    """The batches of one pass. `first` is the number in the epoch of the loader's first batch, and
    `start` the loader's position before it. The loader is asked for `limit` batches at most."""

    def __init__(
        self, prefetcher: Prefetcher, *, first: int, start: Cursor, limit: int | None
    ) -> None:
        self._prefetcher, self._first, self._start = prefetcher, first, start
        self._limit = limit
        #: The loader's own state after its end, once it has ended.
        self.end_state: Any = None
        self._next = first
        self._iterator: PrefetchIterator | None = None
        self._last: Cursor | None = None  # of the batch handed out last

    @property
    def has_begun(self) -> bool:
        return self._iterator is not None

    def begin(self) -> Cursor:
        """Begin the loader. Returns its position."""
        self._iterator = iter(self._prefetcher).begin()
        start = self._start
        return Cursor(start.own, start.ended, self._iterator.loader_state, start.rng_before)

    def __iter__(self) -> Iterator[Fetched]:
        return self

    def __next__(self) -> Fetched:
        assert self._iterator is not None
        index = self._next
        try:
            prefetched = self._iterator.take()
        except StopIteration:
            if index - self._first != self._limit:  # at the limit, the loader may have more
                self.end_state = self._iterator.loader_state
            raise
        self._next = index + 1
        alignment, before = prefetched.alignment, self._start.own
        zero_weight = ends_epoch = ended = False
        if alignment is None:
            own = before + index + 1 - self._first
        else:
            own, ended = before + alignment.own, alignment.ended
            zero_weight, ends_epoch = alignment.zero_weight, alignment.ends_epoch
        cursor = Cursor(own, ended, prefetched.loader_state, prefetched.rng_before)
        self._last = cursor
        arriving = prefetched.arriving
        samples = 0 if zero_weight else arriving.samples
        return Fetched(
            index, arriving.batch, arriving.nbytes, samples, cursor, zero_weight, ends_epoch
        )

    def has_more(self, must_know: Callable[[], bool]) -> bool:
        assert self._iterator is not None
        return self._iterator.has_more(must_know)

    def is_ahead_of(self, trained: Cursor) -> bool:
        """Whether a batch was handed out after the last one trained on, whose cursor is
        `trained`."""
        return self._last is not None and self._last is not trained

    def drawn_ahead(self, trained: Cursor) -> list[dict[str, Any]]:
        """The states of the host's generators before each batch that was fetched and not trained
        on, and before the loader's end. `trained` is the cursor of the last batch trained on."""
        assert self._iterator is not None
        handed_out = [self._last.rng_before] if self._last and self.is_ahead_of(trained) else []
        return [
            *(states for states in handed_out if states is not None),
            *self._iterator.drawn_ahead(),
            *self._prefetcher.states_to_replay(),
        ]

    @property
    def rng_before_failed(self) -> dict[str, Any] | None:
        """The states of the host's generators before a batch that drew from them and failed."""
        return None if self._iterator is None else self._iterator.rng_before_failed

    def close(self) -> None:
        if self._iterator is not None:
            self._iterator.close()


class BlockingCopies:
    """Batches whose copy is done when they are handed out: the host waits for each."""

    def __init__(self, batches: Batches, device: Device, transfers: tuple[Stream, ...]) -> None:
        self._batches, self._device, self._transfers = batches, device, transfers
        self._count = 0

    def __iter__(self) -> Iterator[Fetched]:
        return self

    def __next__(self) -> Fetched:
        fetched = next(self._batches)
        self._device.synchronize("copy", self._transfers[self._count % len(self._transfers)])
        self._count += 1
        return fetched

    def has_more(self, must_know: Callable[[], bool]) -> bool:
        return self._batches.has_more(must_know)
