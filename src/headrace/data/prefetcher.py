"""Prefetching: batches are copied to the device before they are needed.

    batch          N-1        N         N+1
    transfer  ..[copy N+1][copy N+2][copy N+3]..      one stream
    compute   ..[ step N-1 ][  step N  ][ step N+1 ]..    the caller's

A slot is the device memory of one batch, allocated on the stream that will read it. It is freed
and reused in that stream's order, so the caller may keep a batch as long as it likes. Three edges
prevent races:

- The copy waits for the work that the reading stream had queued when the memory was allocated: that
  work may still use those bytes.
- The reading stream waits for the copy.
- A pinned staging buffer is reused only after the copy's event.

A batch that needs no copy, on the CPU or on the device already, is handed out before the loader is
asked for another: the loader may use its memory again.

The calling thread does all of this. A separate thread would compete with the training loop for the
GIL; to load in parallel, use DataLoader workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch

from headrace.data.align import Alignment
from headrace.data.cache import BatchCache, CachedBatch
from headrace.data.loader_state import as_stateful
from headrace.data.source import LoaderRng, Source
from headrace.data.transfer import Sender
from headrace.data.tree import batch_tensors, flatten_batch, measure_leaves, rebuild_batch
from headrace.device import Device, Event, Stream, open_device
from headrace.errors import PlanError
from headrace.schema import require_whole

# How many copies may be queued before the host waits for the oldest. In a loop without a run-ahead
# bound, pinned memory would grow for as long as the host is faster than the device.
_MAX_COPIES = 32


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

    `depth` is how many batches are copied ahead of the one in use; with 0 each is copied when the
    loop asks for it. The loader may be any iterable, and its batches may be nested; each `for` loop
    begins a new pass. With `pin=False` batches are not staged in pinned memory: the host waits for
    each copy from pageable memory. If the loader produces no batch for `loader_timeout` seconds, a
    `LoaderError` is raised; 0 waits forever.

    The result has the loader's length and its public attributes (`dataset`, `sampler`,
    `batch_size`, `set_epoch` and so on), so libraries can use it in the loader's place. If the
    loader has a `state_dict`, so has the result: the state after the batch that the loop received
    last, however many were fetched since.
    """
    kind = Prefetcher if as_stateful(loader) is None else StatefulPrefetcher
    return kind(loader, open_device(device), depth, pin=pin, loader_timeout=loader_timeout)


def unwrap_prefetcher(loader: Iterable[Any]) -> Iterable[Any]:
    """The loader inside a `Prefetcher`, unless that has a timeout.

    For the engine, which prefetches itself. With two prefetchers it would not know the random
    states before each batch.
    """
    while isinstance(loader, Prefetcher) and not loader.loader_timeout:
        loader = loader.loader
    return loader


class Prefetcher:
    """What `prefetch` returns: an iterable over batches on the device.

    `transfers` are the streams that copy, in turn. `owner` is the stream that reads the batches; by
    default, the current stream when the loop begins. With `runs_on_owner` the caller promises that
    the owner is the current stream whenever it asks for a batch. `loader_rng` is for an engine's
    pass, which can be resumed; such a `Prefetcher` is iterated over once.
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
        loader_rng: LoaderRng | None = None,
    ) -> None:
        if not loader_timeout >= 0:
            raise PlanError(f"loader_timeout = {loader_timeout!r}: expected seconds, 0 or more")
        require_whole("depth", depth, 0, PlanError)
        self.loader = loader
        self.device = open_device(device)
        self.depth = depth
        self.pin = pin
        self.transfers = transfers or (self.device.stream("transfer"),)
        self.owner = owner
        self.runs_on_owner = runs_on_owner
        self.cache = cache
        self.loader_timeout = loader_timeout
        self.loader_rng = loader_rng

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> PrefetchIterator:
        return PrefetchIterator(self)

    def states_to_replay(self) -> list[dict[str, Any]]:
        """In a resumed pass: the random states from which batches are still to be drawn again."""
        return [] if self.loader_rng is None else [*self.loader_rng.to_replay]

    def __getattr__(self, name: str) -> Any:
        """The loader's public attributes, unless this class has one of that name."""
        # Not `self.loader`: while `copy` or `pickle` make an object it has none, and this would
        # recurse.
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
    """A `Prefetcher` of a loader with a `state_dict`. Its own `state_dict` is the loader's state
    after the batch handed out last, not after those fetched ahead."""

    def __init__(
        self, loader: Iterable[Any], device: Device, depth: int = 2, **options: Any
    ) -> None:
        super().__init__(loader, device, depth, **options)
        self._stateful: Any = loader
        self._handed_out: tuple[Any] | None = None  # the state, once a pass has begun

    def state_dict(self) -> Any:
        """The loader's state after the batch handed out last; before any pass, its state now."""
        return self._stateful.state_dict() if self._handed_out is None else self._handed_out[0]

    def load_state_dict(self, state_dict: Any) -> None:
        self._stateful.load_state_dict(state_dict)
        self._handed_out = None

    def __iter__(self) -> PrefetchIterator:
        return _StatefulIterator(self)

    def note(self, state: Any) -> None:
        self._handed_out = (state,)


@dataclass(slots=True)
class Prefetched:
    """A batch that was fetched. The event `ready` passes when its copy is done; None if nothing was
    copied. `loader_state` is the loader's own state after the batch, `rng_before` has the random
    states before it. `to_keep` is what the cache gets when the batch is handed out. `is_shared`: it
    has tensors of the loader's own, not copies."""

    batch: Any
    ready: Event | None
    nbytes: int
    samples: int
    loader_state: Any = None
    rng_before: dict[str, Any] | None = None
    alignment: Alignment | None = None
    to_keep: CachedBatch | None = None
    is_shared: bool = False


class PrefetchIterator:
    """One pass over the loader.

    It begins with the first batch, not with `iter()`, which some libraries call only to see whether
    it works. `close`, or dropping the iterator, releases the loader and all batches at once.
    `loader_state` is the loader's own state after the batch handed out last, or after the end.
    """

    def __init__(self, settings: Prefetcher) -> None:
        self._settings = settings
        self._device = settings.device
        self._owner = settings.owner or settings.device.current_stream()
        self._ahead: deque[Prefetched] = deque()  # fetched and not yet handed out
        self._source: Source | None = None
        self._error: BaseException | None = None
        self._pulled = 0
        self._shared_last = False  # whether the batch fetched last has tensors of the loader's own
        self._copies: deque[tuple[Event, bool]] = deque()
        self._spare: list[Event] = []
        self._sender = Sender(
            self._device, self._owner, pin=settings.pin, runs_on_owner=settings.runs_on_owner
        )
        self._rng_before_uncopied: dict[str, Any] | None = None
        self._rng_before_end: dict[str, Any] | None = None
        #: The states of the host's generators before a batch that drew from them and then failed.
        self.rng_before_failed: dict[str, Any] | None = None
        self._has_begun = self.keeps_state = False
        self.loader_state: Any = None
        self._end_state: Any = None

    def begin(self) -> Self:
        """Begin the loader, unless it has begun already."""
        if not self._has_begun:
            self._has_begun = True
            options = self._settings
            self._source = Source(
                options.loader, self._device, options.loader_timeout, options.loader_rng
            )
            self.loader_state = self._end_state = self._source.state
            self.keeps_state = self._source.keeps_state
        return self

    def __iter__(self) -> PrefetchIterator:
        return self

    def __next__(self) -> Any:
        return self.take().batch

    def take(self) -> Prefetched:
        """The next batch. Raises `StopIteration` at the end."""
        if not self._has_begun:
            self.begin()
        while self._source is not None and len(self._ahead) <= self._settings.depth:
            # As in a plain loop, the loader ends after its last batch was used. And it may write
            # the next batch into the tensors of one that was not copied.
            if self._ahead and (self._source.gave_last or self._ahead[-1].is_shared):
                break
            self._pull()
        if not self._ahead:
            self.close()
            if self._error is not None:
                # As in a plain loop, the batches before the error have been handed out.
                error, self._error = self._error, None
                try:
                    raise error
                finally:
                    del error  # its traceback would keep this frame alive, and so the loader
            self.loader_state = self._end_state
            raise StopIteration
        prefetched = self._ahead.popleft()
        if prefetched.ready is not None:
            self._hand_over(prefetched)
        if prefetched.to_keep is not None:
            self._keep(prefetched.to_keep)
        if self._source is not None and not self._ahead:
            self._source.release_end_flag()
        self.loader_state = prefetched.loader_state
        return prefetched

    def has_more(self, must_know: Callable[[], bool]) -> bool:
        """Whether another batch, or an error, follows. With a depth of 0 nothing was fetched ahead,
        and only the loader knows: it is asked if `must_know()` is true, and otherwise the answer is
        True."""
        if not self._ahead and self._source is not None and must_know():
            self._pull()
        return bool(self._ahead) or self._source is not None or self._error is not None

    def drawn_ahead(self) -> list[dict[str, Any]]:
        """The states of the host's generators before each batch that was fetched and not yet handed
        out, and before the end."""
        waiting = (prefetched.rng_before for prefetched in self._ahead)
        found = [*waiting, self._rng_before_uncopied, self._rng_before_end]
        return [states for states in found if states is not None]

    def close(self) -> None:
        """Drop the fetched batches and the loader's iterator."""
        while self._ahead:
            prefetched = self._ahead.popleft()
            if prefetched.ready is not None:
                # The owner gets the memory back, and must not reuse it before the copy is done.
                self._owner.wait_event(prefetched.ready)
            if prefetched.to_keep is not None:
                self._keep(prefetched.to_keep)
        self._has_begun = True  # so that it cannot begin any more
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def __del__(self) -> None:
        self.close()  # the loop was left early

    def _pull(self) -> None:
        """Fetch one batch and start its copy. An error is raised after the batches before it."""
        assert self._source is not None
        self._source.note_rng()  # outside the wait: this is not the loader's time
        source = self._source
        if self._shared_last:
            self._let_loader_write()
        try:
            with self._device.ledger.waiting("data"):
                batch = next(source)
        except StopIteration:
            self._end_state, self._rng_before_end = source.state, source.rng_before
            self._source = None
            return
        except BaseException as problem:
            self.rng_before_failed = source.rng_before_failed(problem)
            self._end_with(problem)
            return
        try:
            prefetched = self._copy(batch)
        except BaseException as problem:
            self._rng_before_uncopied = source.rng_before
            self._end_with(problem)
            return
        prefetched.loader_state, prefetched.rng_before = source.state, source.rng_before
        prefetched.alignment = source.alignment
        self._shared_last = prefetched.is_shared
        self._ahead.append(prefetched)
        self._pulled += 1

    def _let_loader_write(self) -> None:
        """Order the loader's work on the device behind the steps so far: it may write the next
        batch into tensors that they read."""
        producer = self._device.current_stream()
        if producer is not self._owner:
            producer.wait_stream(self._owner)

    def _end_with(self, problem: BaseException) -> None:
        """Keep an error of the loader or the copy, to be raised later. Ctrl-C is raised at once."""
        if not isinstance(problem, Exception):
            raise problem
        source, self._source, self._error = self._source, None, problem
        if source is not None:
            source.close()

    def _copy(self, batch: Any) -> Prefetched:
        leaves, cache = flatten_batch(batch), self._settings.cache
        nbytes, samples = measure_leaves(leaves)
        kept = None if cache is None else cache.take_out(leaves)
        if kept is not None:
            found = rebuild_batch(batch, kept.on_device)
            return Prefetched(found, None, nbytes, samples, to_keep=kept)
        if not self._device.asynchronous:
            return Prefetched(self._moved(batch, leaves), None, nbytes, samples, is_shared=True)
        ready = self._free_event()
        transfer = self._settings.transfers[self._pulled % len(self._settings.transfers)]
        arriving, copied = self._sender.send(leaves, transfer, ready)
        if copied:
            self._copies.append((ready, self._is_reusable()))
        else:
            self._spare.append(ready)
        try:
            on_device = rebuild_batch(batch, arriving)
        except BaseException:  # from the batch's own class; the copy still writes to the memory
            if copied:
                self._owner.wait_event(ready)
            raise
        prefetched = Prefetched(on_device, ready if copied else None, nbytes, samples)
        if copied < len(leaves):
            # Not objects that have moved themselves: what they hold is on the device now.
            prefetched.is_shared = any(
                one is leaf and isinstance(leaf, torch.Tensor)
                for one, leaf in zip(arriving, leaves, strict=True)
            )
        if cache is not None:
            prefetched.to_keep = CachedBatch.of(leaves, arriving)
        return prefetched

    def _keep(self, batch: CachedBatch) -> None:
        """Put a batch into the cache, when the owner waits for its copy: another pass that finds it
        there will not."""
        if self._settings.cache is not None:
            self._settings.cache.keep(batch)

    def _moved(self, batch: Any, leaves: list[Any]) -> Any:
        """The batch on a device that needs no copies: itself, if all of its tensors are there."""
        if all(type(leaf) is torch.Tensor and self._device.holds(leaf) for leaf in leaves):
            return batch
        target = self._device.torch_device
        return rebuild_batch(batch, [leaf.to(target) for leaf in leaves])

    def _free_event(self) -> Event:
        """An event to record behind a copy: a new one, or one whose copy is done. If too many
        copies are queued, the host waits for the oldest."""
        if self._spare:
            return self._spare.pop()
        if len(self._copies) < _MAX_COPIES:
            return self._device.event()
        oldest, is_reusable = self._copies.popleft()
        if not oldest.query():
            self._device.wait(oldest, "copies_behind")
        return oldest if is_reusable else self._device.event()

    def _is_reusable(self) -> bool:
        """Whether this copy's event can be recorded again once it is the oldest. Its batch has been
        handed out by then; but a staging buffer, if there is one, still waits for the event."""
        return self._settings.depth < _MAX_COPIES and not self._sender.staged

    def _hand_over(self, prefetched: Prefetched) -> None:
        assert prefetched.ready is not None
        reader = self._settings.owner or self._device.current_stream()
        reader.wait_event(prefetched.ready)
        if reader is not self._owner:
            # The loop has switched to another stream than the one that owns the memory.
            for tensor in batch_tensors(prefetched.batch):
                self._device.record_stream(tensor, reader)


class _StatefulIterator(PrefetchIterator):
    """A pass that notes the loader's state in its prefetcher after each batch handed out."""

    def __init__(self, settings: StatefulPrefetcher) -> None:
        super().__init__(settings)
        self._prefetcher = settings

    def begin(self) -> Self:
        if not self._has_begun:
            super().begin()
            self._note()
        return self

    def take(self) -> Prefetched:
        try:
            return super().take()
        finally:
            self._note()

    def _note(self) -> None:
        if self.keeps_state:
            self._prefetcher.note(self.loader_state)
