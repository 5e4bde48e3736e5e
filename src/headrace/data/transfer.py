"""A batch on its way to the device: its tensors from host memory, by way of pinned staging if need
be, into memory of the stream that will read it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from headrace.data.tree import is_plain_tensor
from headrace.device import Device, Event, PinnedBuffer, Stream
from headrace.errors import DeviceMismatchError

# More than a few small tensors in a batch travel together, in one staging buffer and one copy.
_SMALL_BYTES = 256 << 10
_FEW_TENSORS = 4


class Sender:
    """Sends batches on their way: from host memory, by way of staging if need be, into slots."""

    def __init__(self, device: Device, owner: Stream, *, pin: bool, runs_on_owner: bool) -> None:
        self._device = device
        self._owner = owner
        self._pin = pin
        self._runs_on_owner = runs_on_owner
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
        return is_plain_tensor(leaf)

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
