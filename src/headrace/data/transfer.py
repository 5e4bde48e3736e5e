"""Copying a batch to the device, through pinned staging buffers if it is in pageable memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from headrace.data.tree import is_plain_tensor
from headrace.device import Device, Event, PinnedBuffer, Stream
from headrace.errors import DeviceMismatchError

# If a batch has more than a few small tensors, they share one staging buffer and one copy.
_SMALL_BYTES = 256 << 10
_FEW_TENSORS = 4


class Sender:
    """Starts the copies of batches from host memory into slots, which `owner` will read."""

    def __init__(self, device: Device, owner: Stream, *, pin: bool, runs_on_owner: bool) -> None:
        self._device = device
        self._owner = owner
        self._pin = pin
        self._runs_on_owner = runs_on_owner
        self._queued = device.event()
        self._buffers: list[PinnedBuffer] = []
        #: Whether the batch that was sent last went through a staging buffer.
        self.staged = False

    def send(self, leaves: list[Any], transfer: Stream, ready: Event) -> tuple[list[Any], int]:
        """Start the copies. Returns the leaves on the device, and how many of them are being
        copied: if any is, `ready` passes when the copies are done."""
        host = [leaf for leaf in leaves if self._must_copy(leaf)]
        if host and len(host) == len(leaves):  # the common case
            return self._copy(host, transfer, ready), len(host)
        copied = {id(leaf) for leaf in host}
        # Move these first, since that may raise: then nobody would wait for a copy under way.
        others = iter([self._move_other(leaf) for leaf in leaves if id(leaf) not in copied])
        copies = iter(self._copy(host, transfer, ready) if host else [])
        arriving = [next(copies if id(leaf) in copied else others) for leaf in leaves]
        return arriving, len(host)

    def _must_copy(self, leaf: Any) -> bool:
        """Whether it is a plain tensor in host memory."""
        if not isinstance(leaf, torch.Tensor) or self._device.holds(leaf):
            return False
        if not leaf.is_cpu:
            raise DeviceMismatchError(
                f"a batch holds a tensor on {leaf.device}, and the loop runs on {self._device}: "
                f"expected tensors on the CPU or on {self._device}"
            )
        return is_plain_tensor(leaf)

    def _move_other(self, leaf: Any) -> Any:
        """A leaf that is not a plain host tensor, on the device."""
        is_there = isinstance(leaf, torch.Tensor) and self._device.holds(leaf)
        return self._pass_through(leaf) if is_there else self._move_object(leaf)

    def _copy(
        self, sources: list[torch.Tensor], transfer: Stream, ready: Event
    ) -> list[torch.Tensor]:
        """Queue the copies on the transfer stream and record `ready` behind them. Returns the
        destinations."""
        device = self._device
        packs = self._pack_small(sources) if self._pin and len(sources) > _FEW_TENSORS else []
        in_packs = {at for pack in packs for at in pack.indices}
        alone = [one for at, one in enumerate(sources) if at not in in_packs] if packs else sources
        staged = [self._staged(source) for source in alone] if self._pin else alone
        if self._runs_on_owner:
            slots = self._allocate(alone, packs)
        else:
            with device.use(self._owner):
                slots = self._allocate(alone, packs)
        # Work that the owner queued before may still use this memory. And with deterministic
        # algorithms, PyTorch fills new memory on the owner's stream.
        self._queued.record(self._owner)
        transfer.wait_event(self._queued)
        with device.use(transfer):
            for slot, source in zip(slots, staged, strict=True):
                device.copy(slot, source, known_pinned=self._pin)
            for pack in packs:
                pack.copy()
            ready.record(transfer)
        self.staged = bool(self._buffers or packs)
        if self.staged:
            self._release_staging(packs, ready)
        if not packs:
            return slots
        views, others = {at: view for pack in packs for at, view in pack.views()}, iter(slots)
        return [views[at] if at in views else next(others) for at in range(len(sources))]

    def _allocate(self, alone: list[torch.Tensor], packs: list[_Pack]) -> list[torch.Tensor]:
        """Memory on the device, with the strides that a plain `.to()` would give."""
        for pack in packs:
            pack.allocate()
        target = self._device.torch_device
        return [torch.empty_like(source, device=target) for source in alone]

    def _pack_small(self, sources: list[torch.Tensor]) -> list[_Pack]:
        """The small tensors as one pack for each dtype; none if there are only a few."""
        small = [at for at, source in enumerate(sources) if _is_small(source)]
        if len(small) <= _FEW_TENSORS:
            return []
        return [_Pack(self._device, group) for group in _by_dtype(sources, small)]

    def _release_staging(self, packs: list[_Pack], ready: Event) -> None:
        for buffer in (*self._buffers, *(pack.buffer for pack in packs)):
            buffer.release(after=ready)
        self._buffers.clear()

    def _staged(self, source: torch.Tensor) -> torch.Tensor:
        """The source itself if it is pinned or empty, else a copy of it in pinned memory."""
        if self._device.is_pinned(source) or source.numel() == 0:
            return source
        self._device.warn_once(
            "staging",
            "batches are not pinned and are staged through pinned buffers; "
            "pin_memory=True in the DataLoader saves that copy",
        )
        buffer = self._device.pinned.take(source.numel() * source.element_size())
        self._buffers.append(buffer)
        staged = buffer.view((source.numel(),), source.dtype)
        staged = staged.as_strided(source.shape, _dense_strides(source))
        staged.copy_(source)
        return staged

    def _pass_through(self, tensor: torch.Tensor) -> torch.Tensor:
        self._device.warn_once(
            "already there",
            "the loader's batches are on %s already: they are not copied, and used after the work "
            "on the loader's current stream",
            self._device,
        )
        producer = self._device.current_stream()
        if producer is not self._owner:
            self._owner.wait_stream(producer)
            self._device.record_stream(tensor, self._owner)
        return tensor

    def _move_object(self, leaf: Any) -> Any:
        """Move an object with its own `.to()`, on the owner's stream. The host waits for it."""
        self._device.warn_once(
            f"object {type(leaf).__name__}",
            "a batch holds a %s, which has a .to() of its own: the host waits for each copy",
            type(leaf).__name__,
        )
        with self._device.use(self._owner), self._device.ledger.waiting("object_copy"):
            return leaf.to(self._device.torch_device)


class _Pack:
    """Many small contiguous tensors of one dtype, which share a staging buffer and a copy."""

    def __init__(self, device: Device, sources: dict[int, torch.Tensor]) -> None:
        self._device = device
        self._sources = sources
        self.indices = sources.keys()
        self._sizes = [source.numel() for source in sources.values()]
        self._dtype = next(iter(sources.values())).dtype
        self.buffer = device.pinned.take(sum(self._sizes) * self._dtype.itemsize)
        self._staged = self.buffer.view((sum(self._sizes),), self._dtype)
        torch.cat([source.view(-1) for source in sources.values()], out=self._staged)
        self._destination: torch.Tensor | None = None

    def allocate(self) -> None:
        self._destination = self._device.empty((sum(self._sizes),), self._dtype)

    def copy(self) -> None:
        assert self._destination is not None
        self._device.copy(self._destination, self._staged, known_pinned=True)

    def views(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The tensors on the device, each with its position among the batch's."""
        assert self._destination is not None
        pieces = self._destination.split(self._sizes)
        for (at, source), piece in zip(self._sources.items(), pieces, strict=True):
            yield at, piece.view(source.shape)


def _is_small(source: torch.Tensor) -> bool:
    return source.is_contiguous() and source.numel() * source.element_size() <= _SMALL_BYTES


def _by_dtype(sources: list[torch.Tensor], indices: list[int]) -> list[dict[int, torch.Tensor]]:
    groups: dict[torch.dtype, dict[int, torch.Tensor]] = {}
    for at in indices:
        groups.setdefault(sources[at].dtype, {})[at] = sources[at]
    return list(groups.values())


def _dense_strides(source: torch.Tensor) -> tuple[int, ...]:
    """The strides a plain `.to()` would give: the source's own if dense, else contiguous."""
    if source.is_contiguous():
        return source.stride()
    return torch.empty_like(source, device="meta").stride()
