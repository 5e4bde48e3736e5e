"""Batches on the device before they are needed.

    batch          N-1        N         N+1
    transfer  ..[copy N+1][copy N+2][copy N+3]..      one stream
    compute   ..[ step N-1 ][  step N  ][ step N+1 ]..    the caller's

A slot is memory allocated on the stream that will read it, so that it is freed and reused in that
stream's order, and a batch may be kept for as long as its user likes. Three edges make it safe: the
copy waits for what the reading stream had queued when the memory was got (that work may still use
those bytes), the reading stream waits for the copy, and pinned staging is lent again only after the
copy's event. All of it is done by the calling thread: a thread of its own would fight the training
loop for Python's lock, and loading in parallel is what DataLoader workers are for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch

from headrace.data.align import Share
from headrace.data.cache import BatchCache
from headrace.data.loader_state import state_keeper
from headrace.data.source import Draws, Source
from headrace.data.transfer import Sender
from headrace.data.tree import batch_tensors, flatten_batch, measure_leaves, rebuild_batch
from headrace.device import Device, Event, Stream, open_device
from headrace.errors import PlanError

# A loop without a run-ahead bound of its own may have this many copies waiting for the device;
# then the host waits, or pinned memory would grow for as long as the host is faster.
_MOST_COPIES = 32


def prefetch(
    loader: Iterable[Any],
    device: Device | str | torch.device = "auto",
    depth: int = 2,
    *,
    pin: bool = True,
    loader_timeout: float = 0,
) -> Prefetcher:
    """Wrap a loader so that its batches arrive on `device` ahead of use.

        for batch in prefetch(loader, "cuda"):
            loss = model(batch)

    `depth` batches are under way while one is in use; 0 copies each when it is asked for. Any
    iterable of nested batches will do; each `for` loop starts the loader anew. With `pin=False`
    memory that is not pinned is copied as it is, for which the host must wait. A loader that gives
    nothing for `loader_timeout` seconds is a `LoaderError`; 0 waits for ever.

    The result has the loader's length and its public attributes (`dataset`, `sampler`,
    `batch_size`, `set_epoch` and so on), so that a library that looks at them takes it for the
    loader. If the loader has a `state_dict`, so has the result: it is the state after the batch
    that the loop was given last, however many were fetched since.
    """
    kind = Prefetcher if state_keeper(loader) is None else StatefulPrefetcher
    return kind(loader, open_device(device), depth, pin=pin, loader_timeout=loader_timeout)


def unprefetched(loader: Iterable[Any]) -> Iterable[Any]:
    """The loader inside a `Prefetcher`, for an engine, which fetches ahead itself: twice ahead, the
    random states before each batch would not be known. One that has a timeout keeps it."""
    while isinstance(loader, Prefetcher) and not loader.loader_timeout:
        loader = loader.loader
    return loader


class Prefetcher:
    """What `prefetch` returns: an iterable over device batches, as often as the loader allows.

    `transfers` are the streams that copy, batch by batch in turn. `owner` is the stream that
    reads; without one, the stream that is current when the loop begins. `runs_on_owner` promises
    that each batch is asked for with the owner as the current stream. `draws` are those of a pass
    that may be resumed: then there is one.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: Device | str | torch.device,
        depth: int = 2,
        *,
        pin: bool = True,
        transfers: tuple[Stream, ...] = (),
        owner: Stream | None = None,
        runs_on_owner: bool = False,
        cache: BatchCache | None = None,
        loader_timeout: float = 0,
        draws: Draws | None = None,
    ) -> None:
        if not loader_timeout >= 0:
            raise PlanError(f"loader_timeout = {loader_timeout!r}: expected seconds, 0 or more")
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise PlanError(f"depth = {depth!r}: expected a whole number, 0 or more")
        self.loader = loader
        self.device = open_device(device)
        self.depth = depth
        self.pin = pin
        self.transfers = transfers or (self.device.stream("transfer"),)
        self.owner = owner
        self.runs_on_owner = runs_on_owner
        self.cache = cache
        self.loader_timeout = loader_timeout
        self.draws = draws

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> PrefetchIterator:
        return PrefetchIterator(self)

    def draws_to_repeat(self) -> list[dict[str, Any]]:
        """Of a resumed pass: the generators' states before batches that are still to be drawn as
        they were drawn before."""
        return [] if self.draws is None else [*self.draws.again]

    def __getattr__(self, name: str) -> Any:
        """The loader's public attributes, where this class has none of that name."""
        # Not by `self.loader`: a copy that is being made has none yet.
        if "loader" not in self.__dict__ or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        loader = self.__dict__["loader"]
        try:
            return getattr(loader, name)
        except AttributeError as problem:
            raise AttributeError(
                f"neither {type(self).__name__!r} nor its loader, a {type(loader).__name__!r}, "
                f"has an attribute {name!r}"
            ) from problem


class StatefulPrefetcher(Prefetcher):
    """A `Prefetcher` whose loader has a `state_dict`, and so has this: the state from which the
    loader goes on after the batch handed out last, not after those fetched ahead."""

    def __init__(
        self, loader: Iterable[Any], device: Device, depth: int = 2, **options: Any
    ) -> None:
        super().__init__(loader, device, depth, **options)
        self._keeper: Any = loader
        self._handed_out: tuple[Any] | None = None  # the state, once a pass has begun

    def state_dict(self) -> Any:
        """The loader's state after the batch handed out last; before any pass, its state now."""
        return self._keeper.state_dict() if self._handed_out is None else self._handed_out[0]

    def load_state_dict(self, state_dict: Any) -> None:
        self._keeper.load_state_dict(state_dict)
        self._handed_out = None

    def __iter__(self) -> PrefetchIterator:
        return _NotingIterator(self)

    def note(self, state: Any) -> None:
        self._handed_out = (state,)


@dataclass(slots=True)
class Slot:
    """A batch under way: `ready` passes when its copy is done; None if nothing was copied. The
    loader's own state is that after the batch, the generators' that before it was asked for."""

    batch: Any
    ready: Event | None
    nbytes: int
    samples: int
    loader_state: Any = None
    drawn_from: dict[str, Any] | None = None
    share: Share | None = None


class PrefetchIterator:
    """One pass over the loader, which begins when the first batch is asked for: libraries call
    `iter` just to see whether it works. `close` (or dropping it) lets go of everything at once.

    `loader_state` is the loader's own after the batch that was handed out last, or after the end.
    """

    def __init__(self, settings: Prefetcher) -> None:
        self._settings = settings
        self._device = settings.device
        self._owner = settings.owner or settings.device.current_stream()
        self._under_way: deque[Slot] = deque()
        self._source: Source | None = None
        self._error: BaseException | None = None
        self._pulled = 0
        self._copies: deque[tuple[Event, bool]] = deque()
        self._spare: list[Event] = []
        self._sender = Sender(
            self._device, self._owner, pin=settings.pin, runs_on_owner=settings.runs_on_owner
        )
        self._unsent_drawn_from: dict[str, Any] | None = None
        self._end_drawn_from: dict[str, Any] | None = None
        #: Where the host's generators stood before a batch that drew and then could not be had.
        self.failed_drawn_from: dict[str, Any] | None = None
        self._has_begun = self.keeps_state = False
        self.loader_state: Any = None
        self._end_state: Any = None

    def begun(self) -> Self:
        """Begin the loader, if that has not been done."""
        if not self._has_begun:
            self._has_begun = True
            options = self._settings
            self._source = Source(
                options.loader, self._device, options.loader_timeout, options.draws
            )
            self.loader_state = self._end_state = self._source.state
            self.keeps_state = self._source.keeps_state
        return self

    def __iter__(self) -> PrefetchIterator:
        return self

    def __next__(self) -> Any:
        return self.take().batch

    def take(self) -> Slot:
        """The next batch, with what is known of it. Raises `StopIteration` at the end."""
        if not self._has_begun:
            self.begun()
        while self._source is not None and len(self._under_way) <= self._settings.depth:
            if self._source.gave_last and self._under_way:
                break  # as in a plain loop, the loader ends when the loop has had its last batch
            self._pull()
        if not self._under_way:
            self.close()
            if self._error is not None:
                # Batches that came before the error were delivered first, as in a plain loop.
                error, self._error = self._error, None
                try:
                    raise error
                finally:
                    del error  # whose traceback has this frame, and so the loader
            self.loader_state = self._end_state
            raise StopIteration
        slot = self._under_way.popleft()
        if slot.ready is not None:
            self._hand_over(slot)
        if self._source is not None and not self._under_way:
            self._source.tell_last()
        self.loader_state = slot.loader_state
        return slot

    def has_more(self, ask: Callable[[], bool]) -> bool:
        """Whether another batch, or an error, comes after the one handed out last. With a depth of
        0 nothing was fetched ahead: then the loader is only asked if `ask()`, else it may have."""
        if not self._under_way and self._source is not None and ask():
            self._pull()
        return bool(self._under_way) or self._source is not None or self._error is not None

    def drawn_ahead(self) -> list[dict[str, Any]]:
        """Where the host's generators stood before each batch that was fetched and not handed out
        yet, and before the end."""
        under_way = (slot.drawn_from for slot in self._under_way)
        found = [*under_way, self._unsent_drawn_from, self._end_drawn_from]
        return [states for states in found if states is not None]

    def close(self) -> None:
        """Drop the batches under way and the loader's iterator."""
        while self._under_way:
            slot = self._under_way.popleft()
            if slot.ready is not None:
                # Its memory goes back to the owner, which must not reuse it under the copy.
                self._owner.wait_event(slot.ready)
        self._has_begun = True  # and is not to begin any more
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def __del__(self) -> None:
        self.close()  # a loop that was left early, or dropped

    def _pull(self) -> None:
        """Take one batch from the loader and start its copy. An error waits for its turn."""
        assert self._source is not None
        self._source.look_at_generators()  # no part of what the loader takes
        source = self._source
        try:
            with self._device.ledger.waiting("data"):
                batch = next(source)
        except StopIteration:
            self._end_state, self._end_drawn_from = source.state, source.drawn_from
            self._source = None
            return
        except BaseException as problem:
            self.failed_drawn_from = source.partly_drawn_from(problem)
            self._end_with(problem)
            return
        try:
            slot = self._send(batch)
        except BaseException as problem:
            self._unsent_drawn_from = source.drawn_from
            self._end_with(problem)
            return
        slot.loader_state, slot.drawn_from = source.state, source.drawn_from
        slot.share = source.share
        self._under_way.append(slot)
        self._pulled += 1

    def _end_with(self, problem: BaseException) -> None:
        """The loader's own error, or no memory: raised later as itself. Ctrl-C at once."""
        if not isinstance(problem, Exception):
            raise problem
        source, self._source, self._error = self._source, None, problem
        if source is not None:
            source.close()

    def _send(self, batch: Any) -> Slot:
        leaves, cache = flatten_batch(batch), self._settings.cache
        nbytes, samples = measure_leaves(leaves)
        kept = None if cache is None else cache.find(batch)
        if kept is not None:
            return Slot(kept, None, nbytes, samples)
        if not self._device.asynchronous:
            return Slot(self._moved(batch, leaves), None, nbytes, samples)
        mark = self._free_mark()
        transfer = self._settings.transfers[self._pulled % len(self._settings.transfers)]
        arriving, was_copied = self._sender.send(leaves, transfer, mark)
        if was_copied:
            self._copies.append((mark, self._may_be_used_again()))
        else:
            self._spare.append(mark)
        try:
            on_device = rebuild_batch(batch, arriving)
        except BaseException:  # of the batch's own class; its memory is not to be reused yet
            if was_copied:
                self._owner.wait_event(mark)
            raise
        if cache is not None:
            cache.keep(batch, on_device)
        return Slot(on_device, mark if was_copied else None, nbytes, samples)

    def _moved(self, batch: Any, leaves: list[Any]) -> Any:
        """On a device that copies nothing: the batch itself, if all of it is there already."""
        if all(type(leaf) is torch.Tensor and self._device.holds(leaf) for leaf in leaves):
            return batch
        target = self._device.torch_device
        return rebuild_batch(batch, [leaf.to(target) for leaf in leaves])

    def _free_mark(self) -> Event:
        """An event to record behind a copy: new, or one whose copy is done. If too many copies are
        under way, the host waits for the oldest."""
        if self._spare:
            return self._spare.pop()
        if len(self._copies) < _MOST_COPIES:
            return self._device.event()
        oldest, may_be_used_again = self._copies.popleft()
        if not oldest.query():
            self._device.wait(oldest, "copies_behind")
        return oldest if may_be_used_again else self._device.event()

    def _may_be_used_again(self) -> bool:
        """Whether nobody looks at this copy's mark any more when it is the oldest: its batch has
        been handed out by then, and it keeps no staging memory from being lent."""
        return self._settings.depth < _MOST_COPIES and not self._sender.staged

    def _hand_over(self, slot: Slot) -> None:
        assert slot.ready is not None
        reader = self._settings.owner or self._device.current_stream()
        reader.wait_event(slot.ready)
        if reader is not self._owner:
            # The loop moved to another stream than the one that owns the memory.
            for tensor in batch_tensors(slot.batch):
                self._device.record_stream(tensor, reader)


class _NotingIterator(PrefetchIterator):
    """A pass that tells its prefetcher the loader's state after each batch handed out."""

    def __init__(self, settings: StatefulPrefetcher) -> None:
        super().__init__(settings)
        self._noted_by = settings

    def begun(self) -> Self:
        if not self._has_begun:
            super().begun()
            self._note()
        return self

    def take(self) -> Slot:
        try:
            return super().take()
        finally:
            self._note()

    def _note(self) -> None:
        if self.keeps_state:
            self._noted_by.note(self.loader_state)
