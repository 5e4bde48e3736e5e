"""Snapshots: tensors as they are at one point of a stream, copied to the host later.

    current stream      [step N][clone][step N+1] …        the caller does not wait
    checkpoint stream                  [chunk][chunk] …    a thread queues the copies and waits

A snapshot clones device tensors on the current stream, into one block of memory, so the next step
may overwrite them. `to_host` copies the clones on a stream of its own, in chunks through two pinned
buffers: pinning as much memory as a model takes would block every kernel launch of the process
meanwhile. If there is no memory for clones, the snapshot copies the tensors themselves to the host
on the current stream, and the caller waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from headrace.checkpoint.layout import MemoryLayout, clone_into
from headrace.device import Device, Event, PinnedBuffer, Stream, open_device
from headrace.errors import CheckpointError

_CHUNK_BYTES = 16 << 20
_CHUNKS_IN_FLIGHT = 2


class Snapshot:
    """`tensors` as they are at this point of the current stream. Release it after use.

    `to_host` and `release` may be called from another thread.
    """

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
                    f"{name!r} is on {tensor.device}: expected {device} or the host"
                )
        self._layout = MemoryLayout.of(live)
        if live:
            self._clone(live)

    def to_host(self) -> dict[str, torch.Tensor]:
        """Copy the tensors to the host and wait for the copies. They are contiguous there."""
        if self._clones is not None:
            stream = self._device.stream("checkpoint")
            stream.wait_event(self._cloned)
            memory = _host_memory(self._layout.nbytes)
            try:
                _copy_to_host(self._device, stream, [(self._clones, memory)])
            except BaseException:  # Ctrl-C while waiting: a copy may still read the clones
                self._device.record_stream(self._clones, stream)
                raise
            self._clones = None
            self._on_host |= self._layout.views(memory)
        return self._on_host

    def release(self) -> None:
        """Free the memory, whether the tensors were copied to the host or not."""
        self._on_host = {}
        self._clones = None

    def _clone(self, live: dict[str, torch.Tensor]) -> None:
        try:
            clones = self._device.empty((self._layout.nbytes,), torch.uint8)
        except torch.OutOfMemoryError:
            self._device.warn_once(
                "checkpoint memory",
                "no memory on %s to clone the state for a checkpoint: training waits while the "
                "state is copied to the host",
                self._device,
            )
        else:
            clone_into(clones, live, self._layout)
            self._cloned.record()
            self._clones = clones
            return
        memory = _host_memory(self._layout.nbytes)
        self._on_host |= self._layout.views(memory)
        pairs = [(_bytes(tensor), _bytes(self._on_host[name])) for name, tensor in live.items()]
        _copy_to_host(self._device, self._device.current_stream(), pairs)


def reserve_staging(device: Device) -> None:
    """Allocate the pinned buffers of snapshots now, not while a loop runs."""
    buffers: list[PinnedBuffer] = []
    try:
        while device.asynchronous and len(buffers) < _CHUNKS_IN_FLIGHT:
            buffers.append(device.pinned.take(_CHUNK_BYTES))
    finally:
        for buffer in buffers:
            buffer.release()


@contextmanager
def on_host(
    tensors: Mapping[str, torch.Tensor], device: Device | None
) -> Iterator[Mapping[str, torch.Tensor]]:
    """The tensors, contiguous and on the host, until the block ends. Waits for device copies."""
    if device is None:
        on_device = next((t.device for t in tensors.values() if not t.is_cpu), None)
        if on_device is None:
            yield {name: _plain(tensor).contiguous() for name, tensor in tensors.items()}
            return
        device = open_device(on_device)
    snapshot = Snapshot(device, tensors)
    try:
        yield snapshot.to_host()
    finally:
        snapshot.release()


def _copy_to_host(
    device: Device, stream: Stream, pairs: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Copy device bytes to host bytes on `stream`, through pinned memory, and wait for them."""
    in_flight: deque[_Chunk] = deque()
    with device.use(stream):  # this thread may have another current device
        try:
            for source, target in pairs:
                for source_part, target_part in zip(
                    source.split(_CHUNK_BYTES), target.split(_CHUNK_BYTES), strict=True
                ):
                    if len(in_flight) == _CHUNKS_IN_FLIGHT:
                        in_flight.popleft().finish()
                    in_flight.append(_Chunk(device, stream, source_part, target_part))
            while in_flight:
                in_flight.popleft().finish()
        finally:
            while in_flight:
                in_flight.popleft().abandon()


class _Chunk:
    """Bytes being copied from the device, through a pinned buffer, to their target on the host."""

    def __init__(
        self, device: Device, stream: Stream, source: torch.Tensor, target: torch.Tensor
    ) -> None:
        self._device = device
        self._target = target
        self._arrived: Event = device.event()
        self._buffer: PinnedBuffer = device.pinned.take(_CHUNK_BYTES)
        self._staging = self._buffer.view(source.shape, torch.uint8)
        try:
            device.copy(self._staging, source, known_pinned=True)
            self._arrived.record(stream)
        except BaseException:
            self._arrived.record(stream)
            self._buffer.release(after=self._arrived)
            raise

    def finish(self) -> None:
        """Wait for the copy, and move the bytes from the pinned buffer to the target."""
        try:
            self._device.wait(self._arrived, "checkpoint_copy")
        except BaseException:
            self.abandon()
            raise
        try:
            self._target.copy_(self._staging)
        finally:
            self._buffer.release()

    def abandon(self) -> None:
        """Give the buffer back for use after the copy."""
        self._buffer.release(after=self._arrived)


def _host_memory(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return _plain(tensor).clone(memory_format=torch.contiguous_format)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Detached, with a pending conjugation or negation applied."""
    return tensor.detach().resolve_conj().resolve_neg()
