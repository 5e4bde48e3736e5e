"""Tensors as they are at one moment, on their way to the host.

    current      [step N][clone][step N+1] …           the caller goes on at once
    checkpoint                  [piece][piece] …       sent, and then read, by a thread

Device tensors are cloned on the stream that works on them, into one piece of memory, so that it
may overwrite them at once. Whoever calls `arrive` has it copied to the host on a stream of its own,
piece by piece through a little pinned memory: to pin as much as a model takes would stop every
launch of the process meanwhile. Where there is no memory for clones, the tensors themselves are
copied, in line with the work on them, before the caller goes on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from headrace.device import Device, Event, PinnedBuffer, Stream, open_device
from headrace.errors import CheckpointError

_PIECE_BYTES = 16 << 20
_PIECES_UNDER_WAY = 2
_ALIGNMENT = 64
# Bits are copied, not numbers: not every kind of number can be copied in a bunch, or unchanged.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Snapshot:
    """`tensors` as they are when the current stream gets there. Release it after use. It may be
    made in one thread, and arrive and be released in another."""

    def __init__(self, device: Device, tensors: Mapping[str, torch.Tensor]) -> None:
        self._device = device
        self._on_host: dict[str, torch.Tensor] = {}
        self._cloned = device.event()
        self._clones: torch.Tensor | None = None
        live: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if device.asynchronous and device.holds(tensor):
                live[name] = _plain(tensor)
            elif tensor.is_cpu:
                self._on_host[name] = _clone(tensor)
            else:
                raise CheckpointError(
                    f"{name!r} lies on {tensor.device}: expected {device} or the host"
                )
        self._layout = _Layout.of(live)
        if live:
            self._take(live)

    def arrive(self) -> dict[str, torch.Tensor]:
        """The tensors on the host, contiguous. Waits for their copies."""
        if self._clones is not None:
            stream = self._device.stream("checkpoint")
            stream.wait_event(self._cloned)
            memory = _host_memory(self._layout.nbytes)
            try:
                _carry(self._device, stream, [(self._clones, memory)])
            except BaseException:  # Ctrl-C in a wait: a copy may still read them
                self._device.record_stream(self._clones, stream)
                raise
            self._clones = None  # now: its copies were waited for
            self._on_host |= self._layout.views(memory)
        return self._on_host

    def release(self) -> None:
        """Let go of it all, arrived or not."""
        self._on_host = {}
        self._clones = None

    def _take(self, live: dict[str, torch.Tensor]) -> None:
        try:
            clones = self._device.empty((self._layout.nbytes,), torch.uint8)
        except torch.OutOfMemoryError:
            self._device.warn_once(
                "checkpoint memory",
                "a checkpoint finds no memory on %s for a copy of what it saves: it is copied to "
                "the host in line, and the next step waits for that",
                self._device,
            )
        else:
            _copy(live, self._layout, clones)
            self._cloned.record()
            self._clones = clones
            return
        memory = _host_memory(self._layout.nbytes)
        self._on_host |= self._layout.views(memory)
        pairs = [(_bytes(tensor), _bytes(self._on_host[name])) for name, tensor in live.items()]
        _carry(self._device, self._device.current_stream(), pairs)


def reserve_staging(device: Device) -> None:
    """Pin now what snapshots go through, so that none has to while a loop runs."""
    buffers: list[PinnedBuffer] = []
    try:
        while device.asynchronous and len(buffers) < _PIECES_UNDER_WAY:
            buffers.append(device.pinned.take(_PIECE_BYTES))
    finally:
        for buffer in buffers:
            buffer.release()


@contextmanager
def on_host(
    tensors: Mapping[str, torch.Tensor], device: Device | None
) -> Iterator[Mapping[str, torch.Tensor]]:
    """The tensors, contiguous and on the host, inside the block. Waits for those on a device."""
    if device is None:
        elsewhere = next((t.device for t in tensors.values() if not t.is_cpu), None)
        if elsewhere is None:
            yield {name: _plain(tensor).contiguous() for name, tensor in tensors.items()}
            return
        device = open_device(elsewhere)
    snapshot = Snapshot(device, tensors)
    try:
        yield snapshot.arrive()
    finally:
        snapshot.release()


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where tensors lie, one behind the other, in one piece of memory of `nbytes` bytes."""

    places: dict[str, tuple[int, torch.dtype, tuple[int, ...]]]
    nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> _Layout:
        places, end = {}, 0
        for name, tensor in tensors.items():
            places[name] = (end, tensor.dtype, tuple(tensor.shape))
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        return cls(places, end)

    def bytes_of(self, name: str, memory: torch.Tensor) -> torch.Tensor:
        """A tensor's part of `memory`, which is bytes."""
        begin, dtype, shape = self.places[name]
        return memory[begin : begin + math.prod(shape) * dtype.itemsize]

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in `memory`."""
        return {
            name: self.bytes_of(name, memory).view(dtype).view(shape)
            for name, (_, dtype, shape) in self.places.items()
        }


def _copy(sources: Mapping[str, torch.Tensor], layout: _Layout, memory: torch.Tensor) -> None:
    """Copy all to their places, with few launches: a model has hundreds of tensors."""
    bunches: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for name, source in sources.items():
        target = layout.bytes_of(name, memory)
        if not source.is_contiguous():
            target.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)
        elif source.numel():
            word = _WORDS[source.element_size()]
            to, of = bunches.setdefault(word, ([], []))
            to.append(target.view(word))
            of.append(source.view(-1).view(word))
    for to, of in bunches.values():
        torch._foreach_copy_(to, of)


def _carry(device: Device, stream: Stream, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy device bytes to host bytes on `stream`, through pinned memory. Waits for them."""
    under_way: deque[_Piece] = deque()
    with device.use(stream):  # a thread's current device is another, too
        try:
            for source, target in pairs:
                for part, there in zip(
                    source.split(_PIECE_BYTES), target.split(_PIECE_BYTES), strict=True
                ):
                    if len(under_way) == _PIECES_UNDER_WAY:
                        under_way.popleft().land()
                    under_way.append(_Piece(device, stream, part, there))
            while under_way:
                under_way.popleft().land()
        finally:
            while under_way:
                under_way.popleft().drop()


class _Piece:
    """Some bytes on their way from the device, through pinned memory, to where they are kept."""

    def __init__(
        self, device: Device, stream: Stream, source: torch.Tensor, target: torch.Tensor
    ) -> None:
        self._device = device
        self._target = target
        self._arrived: Event = device.event()
        self._buffer: PinnedBuffer = device.pinned.take(_PIECE_BYTES)
        self._staging = self._buffer.view(source.shape, torch.uint8)
        try:
            device.copy(self._staging, source, known_pinned=True)
            self._arrived.record(stream)
        except BaseException:
            self._arrived.record(stream)
            self._buffer.release(after=self._arrived)
            raise

    def land(self) -> None:
        """Wait until they are there, and put them where they are kept."""
        try:
            self._device.wait(self._arrived, "checkpoint_copy")
        except BaseException:
            self.drop()
            raise
        try:
            self._target.copy_(self._staging)
        finally:
            self._buffer.release()

    def drop(self) -> None:
        self._buffer.release(after=self._arrived)


def _host_memory(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return _plain(tensor).clone(memory_format=torch.contiguous_format)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Without history, and without a conjugation or sign that is yet to be applied."""
    return tensor.detach().resolve_conj().resolve_neg()
