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
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from headrace import batches
from headrace.batchcache import BatchCache
from headrace.device import Device, Event, PinnedBuffer, Stream, open_device
from headrace.errors import DeviceMismatchError, PlanError
from headrace.loading import Source

# More than a few small tensors in a batch travel together, in one staging buffer and one copy.
_SMALL_BYTES = 256 << 10
_FEW_TENSORS = 4
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
    iterable of nested batches will do; `len` is kept; each `for` loop starts the loader anew. With
    `pin=False` memory that is not pinned is copied as it is, for which the host must wait. A loader
    that gives nothing for `loader_timeout` seconds is a `LoaderError`; 0 waits for ever.
    """
    return Prefetcher(loader, open_device(device), depth, pin=pin, loader_timeout=loader_timeout)


class Prefetcher:
    """What `prefetch` returns: an iterable over device batches, as often as the loader allows.

    `transfers` are the streams that copy, batch by batch in turn. `owner` is the stream that
    reads; without one, the stream that is current when the loop begins. `runs_on_owner` promises
    that each batch is asked for with the owner as the current stream.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: Device,
        depth: int = 2,
        *,
        pin: bool = True,
        transfers: tuple[Stream, ...] = (),
        owner: Stream | None = None,
        runs_on_owner: bool = False,
        cache: BatchCache | None = None,
        loader_timeout: float = 0,
    ) -> None:
        if not loader_timeout >= 0:
            raise PlanError(f"loader_timeout = {loader_timeout!r}: expected seconds, 0 or more")
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise PlanError(f"depth = {depth!r}: expected a whole number, 0 or more")
        self.loader = loader
        self.device = device
        self.depth = depth
        self.pin = pin
        self.transfers = transfers or (device.stream("transfer"),)
        self.owner = owner
        self.runs_on_owner = runs_on_owner
        self.cache = cache
        self.loader_timeout = loader_timeout

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> PrefetchIterator:
        return PrefetchIterator(self)


@dataclass(slots=True)
class _Slot:
    """A batch under way: `ready` passes when its copy is done; None if nothing was copied."""

    batch: Any
    ready: Event | None
    nbytes: int
    samples: int
    loader_state: Any = None


class PrefetchIterator:
    """One pass over the loader. `close` (or dropping it) lets go of everything at once.

    `loader_state` is the loader's own after the batch that was handed out last.
    """

    def __init__(self, settings: Prefetcher) -> None:
        self._settings = settings
        self._device = settings.device
        self._owner = settings.owner or settings.device.current_stream()
        self._under_way: deque[_Slot] = deque()
        self._source: Source | None = None
        self._error: BaseException | None = None
        self._pulled = 0
        self._copies: deque[tuple[Event, bool]] = deque()
        self._spare: list[Event] = []
        self._sender = _Sender(self._device, self._owner, settings)
        self.delivered = 0
        self.last_nbytes = self.last_samples = 0
        # Last: it may raise, and close() needs the rest.
        self._source = Source(settings.loader, self._device, settings.loader_timeout)
        self.loader_state = self._source.state

    def __iter__(self) -> PrefetchIterator:
        return self

    def __next__(self) -> Any:
        while self._source is not None and len(self._under_way) <= self._settings.depth:
            self._pull()
        if not self._under_way:
            self.close()
            if self._error is not None:
                # Batches that came before the error were delivered first, as in a plain loop.
                error, self._error = self._error, None
                raise error
            raise StopIteration
        slot = self._under_way.popleft()
        if slot.ready is not None:
            self._hand_over(slot)
        self.delivered += 1
        self.last_nbytes, self.last_samples = slot.nbytes, slot.samples
        self.loader_state = slot.loader_state
        return slot.batch

    def close(self) -> None:
        """Drop the batches under way and the loader's iterator."""
        while self._under_way:
            slot = self._under_way.popleft()
            if slot.ready is not None:
                # Its memory goes back to the owner, which must not reuse it under the copy.
                self._owner.wait_event(slot.ready)
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def __del__(self) -> None:
        self.close()  # a loop that was left early, or dropped

    def _pull(self) -> None:
        """Take one batch from the loader and start its copy. An error waits for its turn."""
        assert self._source is not None
        try:
            with self._device.ledger.waiting("data"):
                batch = next(self._source)
        except StopIteration:
            self._source = None
        except Exception as problem:  # the loader's own, raised later as itself
            source, self._source, self._error = self._source, None, problem
            source.close()
        else:
            slot = self._send(batch)
            slot.loader_state = self._source.state
            self._under_way.append(slot)
            self._pulled += 1

    def _send(self, batch: Any) -> _Slot:
        leaves, cache = batches.flatten(batch), self._settings.cache
        nbytes, samples = batches.measure(leaves)
        kept = None if cache is None else cache.find(batch)
        if kept is not None:
            return _Slot(kept, None, nbytes, samples)
        if not self._device.asynchronous:
            return _Slot(self._moved(batch, leaves), None, nbytes, samples)
        mark = self._free_mark()
        transfer = self._settings.transfers[self._pulled % len(self._settings.transfers)]
        arriving, was_copied = self._sender.send(leaves, transfer, mark)
        if was_copied:
            self._copies.append((mark, self._may_be_used_again()))
        else:
            self._spare.append(mark)
        try:
            on_device = batches.rebuild(batch, arriving)
        except BaseException:  # of the batch's own class; its memory is not to be reused yet
            if was_copied:
                self._owner.wait_event(mark)
            raise
        if cache is not None:
            cache.keep(batch, on_device)
        return _Slot(on_device, mark if was_copied else None, nbytes, samples)

    def _moved(self, batch: Any, leaves: list[Any]) -> Any:
        """On a device that copies nothing: the batch itself, if all of it is there already."""
        if all(type(leaf) is torch.Tensor and self._device.holds(leaf) for leaf in leaves):
            return batch
        target = self._device.torch_device
        return batches.rebuild(batch, [leaf.to(target) for leaf in leaves])

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

    def _hand_over(self, slot: _Slot) -> None:
        assert slot.ready is not None
        reader = self._settings.owner or self._device.current_stream()
        reader.wait_event(slot.ready)
        if reader is not self._owner:
            # The loop moved to another stream than the one that owns the memory.
            for tensor in batches.tensors(slot.batch):
                self._device.record_stream(tensor, reader)


class _Sender:
    """Sends batches on their way: from host memory, by way of staging if need be, into slots."""

    def __init__(self, device: Device, owner: Stream, settings: Prefetcher) -> None:
        self._device = device
        self._owner = owner
        self._pin = settings.pin
        self._runs_on_owner = settings.runs_on_owner
        self._queued = device.event()
        self._buffers: list[PinnedBuffer] = []
        #: Whether the batch that was sent last went by way of staging memory.
        self.staged = False

    def send(self, leaves: list[Any], transfer: Stream, mark: Event) -> tuple[list[Any], bool]:
        """The leaves on the device, or on their way there, and whether any is on its way: then
        `mark` passes when they have arrived."""
        host = [leaf for leaf in leaves if self._is_to_be_copied(leaf)]
        if host and len(host) == len(leaves):  # mostly
            return self._copy(host, transfer, mark), True
        copied = {id(leaf) for leaf in host}
        # First what may raise: no copy may be under way into memory that nobody waits for.
        others = iter([self._other(leaf) for leaf in leaves if id(leaf) not in copied])
        copies = iter(self._copy(host, transfer, mark) if host else [])
        arriving = [next(copies if id(leaf) in copied else others) for leaf in leaves]
        return arriving, bool(host)

    def _is_to_be_copied(self, leaf: Any) -> bool:
        """Whether it is a plain tensor in host memory."""
        if not isinstance(leaf, torch.Tensor) or self._device.holds(leaf):
            return False
        if leaf.device.type != "cpu":
            raise DeviceMismatchError(
                f"a batch holds a tensor on {leaf.device}; the loop runs on {self._device}"
            )
        return batches.is_plain_tensor(leaf)

    def _other(self, leaf: Any) -> Any:
        there = isinstance(leaf, torch.Tensor) and self._device.holds(leaf)
        return self._pass_through(leaf) if there else self._move_object(leaf)

    def _copy(
        self, sources: list[torch.Tensor], transfer: Stream, mark: Event
    ) -> list[torch.Tensor]:
        """The sources' copies, under way on the transfer stream; `mark` is recorded behind them."""
        device = self._device
        packed = self._packed(sources) if self._pin and len(sources) > _FEW_TENSORS else []
        in_packs = {at for pack in packed for at in pack.places} if packed else ()
        alone = [at for at in range(len(sources)) if at not in in_packs]
        staged = [self._staged(sources[at]) for at in alone]
        with nullcontext() if self._runs_on_owner else device.use(self._owner):
            # The memory is to be the reader's, with the strides that a plain `.to()` would give.
            slots = [torch.empty_like(sources[at], device=device.torch_device) for at in alone]
            for pack in packed:
                pack.allocate()
        # Earlier work of the owner may still use this memory; and with deterministic algorithms
        # PyTorch fills fresh memory, on the owner too.
        self._queued.record(self._owner)
        transfer.wait_event(self._queued)
        with device.use(transfer):
            for slot, source in zip(slots, staged, strict=True):
                device.copy(slot, source, known_pinned=self._pin)
            for pack in packed:
                pack.copy()
            mark.record(transfer)
        self._release_staging(packed, mark)
        if not packed:
            return slots
        views = dict(zip(alone, slots, strict=True))
        for pack in packed:
            views |= pack.views()
        return [views[at] for at in range(len(sources))]

    def _packed(self, sources: list[torch.Tensor]) -> list[_Packed]:
        """The many small ones among them, if there are many, by type."""
        small = [at for at, source in enumerate(sources) if _is_small(source)]
        if len(small) <= _FEW_TENSORS:
            return []
        return [_Packed(self._device, group) for group in _by_dtype(sources, small)]

    def _release_staging(self, packed: list[_Packed], mark: Event) -> None:
        self.staged = bool(self._buffers or packed)
        for buffer in self._buffers:
            buffer.release(after=mark)
        self._buffers.clear()
        for pack in packed:
            pack.buffer.release(after=mark)

    def _staged(self, source: torch.Tensor) -> torch.Tensor:
        """The source itself where a copy can run from it, else a copy of it in pinned memory."""
        if not self._pin or source.numel() == 0 or self._device.is_pinned(source):
            return source
        self._device.say_once(
            "staging",
            "batches come in memory that is not pinned and are staged through pinned buffers; "
            "pin_memory=True in the DataLoader spares that copy",
        )
        buffer = self._device.pinned.take(source.numel() * source.element_size())
        self._buffers.append(buffer)
        staged = buffer.view((source.numel(),), source.dtype)
        staged = staged.as_strided(source.shape, _dense_strides(source))
        staged.copy_(source)
        return staged

    def _pass_through(self, tensor: torch.Tensor) -> torch.Tensor:
        self._device.say_once(
            "already there",
            "batches arrive on %s already; they are passed through, in order after the stream "
            "that is current where the loader runs",
            self._device,
        )
        producer = self._device.current_stream()
        if producer is not self._owner:
            self._owner.wait_stream(producer)
            self._device.record_stream(tensor, self._owner)
        return tensor

    def _move_object(self, leaf: Any) -> Any:
        """An object that moves itself does so on the reader's stream, and the host waits."""
        self._device.say_once(
            f"object {type(leaf).__name__}",
            "a batch holds a %s, which moves itself with .to(): the host waits for each",
            type(leaf).__name__,
        )
        with self._device.use(self._owner), self._device.ledger.waiting("object_copy"):
            return leaf.to(self._device.torch_device)


class _Packed:
    """Many small contiguous tensors of one type: staged, copied and taken apart as one."""

    def __init__(self, device: Device, sources: dict[int, torch.Tensor]) -> None:
        self._device = device
        self._sources = sources
        self.places = sources.keys()
        self._sizes = [source.numel() for source in sources.values()]
        self._dtype = next(iter(sources.values())).dtype
        self.buffer = device.pinned.take(sum(self._sizes) * self._dtype.itemsize)
        self._staged = self.buffer.view((sum(self._sizes),), self._dtype)
        torch.cat([source.view(-1) for source in sources.values()], out=self._staged)
        self._arena: torch.Tensor | None = None

    def allocate(self) -> None:
        self._arena = self._device.empty((sum(self._sizes),), self._dtype)

    def copy(self) -> None:
        assert self._arena is not None
        self._device.copy(self._arena, self._staged, known_pinned=True)

    def views(self) -> dict[int, torch.Tensor]:
        assert self._arena is not None
        pieces = self._arena.split(self._sizes)
        return {
            at: piece.view(source.shape)
            for (at, source), piece in zip(self._sources.items(), pieces, strict=True)
        }


def _is_small(source: torch.Tensor) -> bool:
    return source.is_contiguous() and source.numel() * source.element_size() <= _SMALL_BYTES


def _by_dtype(sources: list[torch.Tensor], which: list[int]) -> list[dict[int, torch.Tensor]]:
    groups: dict[torch.dtype, dict[int, torch.Tensor]] = {}
    for at in which:
        groups.setdefault(sources[at].dtype, {})[at] = sources[at]
    return list(groups.values())


def _dense_strides(source: torch.Tensor) -> tuple[int, ...]:
    """The strides a plain `.to()` would give: the source's own if dense, else contiguous."""
    if source.is_contiguous():
        return source.stride()
    return torch.empty_like(source, device="meta").stride()
