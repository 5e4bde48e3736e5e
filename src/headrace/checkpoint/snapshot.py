"""Tensors as they are at one moment, on their way to the host.

    current      [step N][clone][step N+1] …           the caller goes on at once
    checkpoint                  [copy to pinned]       sent, and then read, by a thread

Device tensors are cloned on the stream that works on them, so that it may overwrite them at once.
Pinned memory is slow to get, so that is left to whoever calls `arrive`, as are the copies, on a
stream of their own. Where there is no memory for clones, the tensors themselves are copied, in
line with the work on them, before the caller goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from headrace.device import Device, PinnedBuffer, Stream, open_device
from headrace.errors import CheckpointError


class Snapshot:
    """`tensors` as they are when the current stream gets there. Release it after use. It may be
    made in one thread, and arrive and be released in another."""

    def __init__(self, device: Device, tensors: Mapping[str, torch.Tensor]) -> None:
        self._device = device
        self._on_host: dict[str, torch.Tensor] = {}
        self._buffers: list[PinnedBuffer] = []
        self._clones: dict[str, torch.Tensor] = {}
        self._cloned, self._copied = device.event(), device.event()
        self._arrived = False
        live: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if device.asynchronous and device.holds(tensor):
                live[name] = tensor
            elif tensor.is_cpu:
                self._on_host[name] = _clone(tensor)
            else:
                raise CheckpointError(
                    f"{name!r} lies on {tensor.device}: expected {device} or the host"
                )
        if live:
            self._take(live)

    def arrive(self) -> dict[str, torch.Tensor]:
        """The tensors on the host, contiguous. Waits for their copies."""
        if self._clones:
            stream = self._device.stream("checkpoint")
            stream.wait_event(self._cloned)
            self._send(self._clones, stream)
        if self._buffers:
            self._device.wait(self._copied, "checkpoint_copy")
            self._arrived = True
        return self._on_host

    def release(self) -> None:
        """Give the pinned memory back, arrived or not."""
        self._on_host = {}
        self._clones = {}
        while self._buffers:
            self._buffers.pop().release(after=None if self._arrived else self._copied)

    def _take(self, live: dict[str, torch.Tensor]) -> None:
        try:
            self._clones = {name: _clone(tensor) for name, tensor in live.items()}
        except torch.OutOfMemoryError:
            self._device.say_once(
                "checkpoint memory",
                "a checkpoint finds no memory on %s for a copy of what it saves: it is copied to "
                "the host in line, and the next step waits for that",
                self._device,
            )
        else:
            self._cloned.record()
            return
        self._send(dict(live), self._device.current_stream())

    def _send(self, tensors: dict[str, torch.Tensor], stream: Stream) -> None:
        """Start their copies on `stream`, and let go of them."""
        device = self._device
        try:
            with device.use(stream):  # a thread's current device is another, too
                for name in list(tensors):
                    tensor = _plain(tensors.pop(name))
                    buffer = device.pinned.take(tensor.numel() * tensor.element_size())
                    self._buffers.append(buffer)
                    self._on_host[name] = buffer.view(tensor.shape, tensor.dtype)
                    # It is let go before its copy is done, and may belong to another stream.
                    device.record_stream(tensor, stream)
                    device.copy(self._on_host[name], tensor, known_pinned=True)
        except BaseException:
            self._copied.record(stream)
            self.release()
            raise
        self._copied.record(stream)


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


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return _plain(tensor).clone(memory_format=torch.contiguous_format)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Without history, and without a conjugation or sign that is yet to be applied."""
    return tensor.detach().resolve_conj().resolve_neg()
