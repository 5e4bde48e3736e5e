"""One pass over a loader, as batches on the device that know where the loader stood.

    loader → (Aligned) → Source → PrefetchIterator → Feed → Fetched

`Fetched` is what travels from here on. Its cursor says where the loader stood after that batch: a
checkpoint is taken after the last batch *trained on*, however many were fetched since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.data.prefetcher import Prefetcher, PrefetchIterator
from headrace.device import Device, Stream


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position of a loader after a batch.

    `own` counts the epoch's batches that this rank's loader gave; `ended` says that it has no more,
    while other ranks' loaders may. `loader` is the loader's own state, if it keeps one.
    `drawn_from` is where the host's random generators stood before the batch was asked for, if it
    may have drawn from them.
    """

    own: int
    ended: bool = False
    loader: Any = None
    drawn_from: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """A batch on the device. `index` is its number in the epoch. A `weightless` batch counts for
    nothing: it is the one before once more, to keep ranks in step. `ends_epoch`: no rank has a
    batch after it."""

    index: int
    batch: Any
    nbytes: int
    samples: int
    cursor: Cursor
    weightless: bool = False
    ends_epoch: bool = False


class Batches(Protocol):
    """What a pass takes its batches from."""

    def __iter__(self) -> Iterator[Fetched]: ...

    def __next__(self) -> Fetched: ...

    def has_more(self, ask: Callable[[], bool]) -> bool:
        """Whether another batch, or an error, comes after the last one. Where nothing is fetched
        ahead, the loader is asked only if `ask()`; else it may have more."""
        ...


class Feed:
    """The batches of one pass. `first` is the number of the loader's first batch in the epoch,
    `start` where the loader stood before it; `limit` batches are asked for at most."""

    def __init__(
        self, prefetcher: Prefetcher, *, first: int, start: Cursor, limit: int | None
    ) -> None:
        self._prefetcher, self._first, self._start = prefetcher, first, start
        self._limit = limit
        #: The loader's own state after its end, once it has come to it.
        self.end_state: Any = None
        self._next = first
        self._under_way: PrefetchIterator | None = None
        self._last: Cursor | None = None  # of the batch handed out last

    @property
    def has_begun(self) -> bool:
        return self._under_way is not None

    def begin(self) -> Cursor:
        """Begin the loader. Returns where it stands."""
        self._under_way = iter(self._prefetcher).begun()
        start = self._start
        return Cursor(start.own, start.ended, self._under_way.loader_state, start.drawn_from)

    def __iter__(self) -> Iterator[Fetched]:
        return self

    def __next__(self) -> Fetched:
        assert self._under_way is not None
        index = self._next
        try:
            slot = self._under_way.take()
        except StopIteration:
            if index - self._first != self._limit:  # else it was not asked for all of its epoch
                self.end_state = self._under_way.loader_state
            raise
        self._next = index + 1
        share, before = slot.share, self._start.own
        weightless = ends_epoch = ended = False
        if share is None:
            own = before + index + 1 - self._first
        else:
            own, ended = before + share.own, share.ended
            weightless, ends_epoch = share.weightless, share.ends_epoch
        cursor = Cursor(own, ended, slot.loader_state, slot.drawn_from)
        self._last = cursor
        samples = 0 if weightless else slot.samples
        return Fetched(index, slot.batch, slot.nbytes, samples, cursor, weightless, ends_epoch)

    def has_more(self, ask: Callable[[], bool]) -> bool:
        assert self._under_way is not None
        return self._under_way.has_more(ask)

    def is_ahead_of(self, trained: Cursor) -> bool:
        """Whether a batch was handed out after the last one `trained` on."""
        return self._last is not None and self._last is not trained

    def drawn_ahead(self, trained: Cursor) -> list[dict[str, Any]]:
        """Where the host's random generators stood before each batch that was fetched, of those
        after the last one `trained` on, and before the loader's end."""
        assert self._under_way is not None
        handed_out = [self._last.drawn_from] if self._last and self.is_ahead_of(trained) else []
        return [
            *(states for states in handed_out if states is not None),
            *self._under_way.drawn_ahead(),
            *self._prefetcher.draws_to_repeat(),
        ]

    @property
    def failed_drawn_from(self) -> dict[str, Any] | None:
        """Where they stood before a batch that drew, and then could not be had."""
        return None if self._under_way is None else self._under_way.failed_drawn_from

    def close(self) -> None:
        if self._under_way is not None:
            self._under_way.close()


class BlockingCopies:
    """Batches that are handed out only when their copy has ended: the host waits for each."""

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

    def has_more(self, ask: Callable[[], bool]) -> bool:
        return self._batches.has_more(ask)
