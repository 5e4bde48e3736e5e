"""Accelerators, through the interface that PyTorch has for all of them (CUDA, ROCm, XPU)."""

from __future__ import annotations

import gc
import os
import threading
from types import ModuleType
from typing import Any

import torch

from headrace.device.base import Device, Event, MemoryFigures, Stream
from headrace.device.ledger import Ledger

# By process, not by Device object. PyTorch takes streams from a pool of 32 for each priority; after
# those, two streams are the same one. And memory freed on one stream is not reused on another.
_streams: dict[tuple[torch.device, str], tuple[Any, int]] = {}
_streams_lock = threading.Lock()
# PyTorch's stream sanitizer does not know that a query that returns True orders the host. It knows
# that a wait does.
_SANITIZED = bool(os.environ.get("TORCH_CUDA_SANITIZER"))


# A forked child (a DataLoader's worker) must not collect the parent's garbage. To free pinned
# memory, PyTorch calls the driver; in a forked process that fails, and the child dies.
def _keep_garbage() -> None:
    if _streams:
        gc.freeze()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_garbage)


class AcceleratorStream(Stream):
    def __init__(self, device: Device, name: str, priority: int, raw: Any) -> None:
        super().__init__(device, name, priority)
        #: PyTorch's own stream object (`torch.cuda.Stream`, `torch.xpu.Stream`).
        self.raw = raw

    def query(self) -> bool:
        return bool(self.raw.query())

    def wait_event(self, event: Event) -> None:
        # This runs in every step, so the usual case skips the checks of the base class.
        own = event.device is self.device
        if own and event.recorded and isinstance(event, AcceleratorEvent):
            event.raw.wait(self.raw)
        else:
            super().wait_event(event)

    def _wait_event(self, event: Event) -> None:
        assert isinstance(event, AcceleratorEvent)
        self.raw.wait_event(event.raw)

    def _wait_stream(self, other: Stream) -> None:
        assert isinstance(other, AcceleratorStream)
        self.raw.wait_stream(other.raw)


class AcceleratorEvent(Event):
    def __init__(self, device: Device, timing: bool, raw: Any) -> None:
        super().__init__(device, timing)
        #: PyTorch's own event object.
        self.raw = raw

    def record(self, stream: Stream | None = None) -> None:
        if isinstance(stream, AcceleratorStream) and stream.device is self.device:  # the usual case
            self.raw.record(stream.raw)
            self.recorded = True
        else:
            super().record(stream)

    def _record(self, stream: Stream) -> None:
        assert isinstance(stream, AcceleratorStream)
        self.raw.record(stream.raw)

    def query(self) -> bool:
        if self.recorded and not _SANITIZED:  # the usual case
            passed: bool = self.raw.query()
            return passed
        return super().query()

    def _query(self) -> bool:
        done = bool(self.raw.query())
        if done and _SANITIZED:
            self.raw.synchronize()  # returns at once: there is nothing left to wait for
        return done

    def _synchronize(self) -> None:
        self.raw.synchronize()

    def _elapsed_ms(self, end: Event) -> float:
        assert isinstance(end, AcceleratorEvent)
        return float(self.raw.elapsed_time(end.raw))


class AcceleratorDevice(Device):
    """A device that works while the host goes on, through its PyTorch module (`torch.xpu`, say)."""

    def __init__(self, torch_device: torch.device, ledger: Ledger | None = None) -> None:
        super().__init__(torch_device, ledger)
        self._module: ModuleType = torch.get_device_module(torch_device)
        self._index: int = torch_device.index
        self._wrapped: dict[int, AcceleratorStream] = {}

    def stream(self, name: str, *, priority: int = 0) -> AcceleratorStream:
        with _streams_lock:
            known = _streams.get((self.torch_device, name))
            if known is None:
                raw = self._module.Stream(device=self.torch_device, priority=priority)
                known = _streams[(self.torch_device, name)] = (raw, priority)
        raw, made_with = known
        self._require_priority(name, made_with, priority)
        return self._wrap(raw, name, priority)

    def current_stream(self) -> AcceleratorStream:
        raw = self._module.current_stream(self.torch_device)
        return self._wrapped.get(raw.stream_id) or self._wrap(raw, "default", 0)

    def named_streams(self) -> list[tuple[str, Any]]:
        """This device's streams so far, by name, as PyTorch's own objects."""
        with _streams_lock:
            return [
                (name, raw) for (on, name), (raw, _) in _streams.items() if on == self.torch_device
            ]

    def event(self, *, timing: bool = False) -> AcceleratorEvent:
        return AcceleratorEvent(self, timing, self._raw_event(timing))

    def stream_states(self) -> dict[str, bool]:
        # Not every vendor's module has `default_stream`.
        found = getattr(self._module, "default_stream", self._module.current_stream)
        default = found(self.torch_device)
        streams = {"default": default, **dict(self.named_streams())}
        return {name: bool(raw.query()) for name, raw in streams.items()}

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.is_pinned()

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.torch_device

    def _record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        assert isinstance(stream, AcceleratorStream)
        tensor.record_stream(stream.raw)

    def memory(self) -> MemoryFigures:
        free, total = self._module.mem_get_info(self.torch_device)
        module, device = self._module, self.torch_device
        return MemoryFigures(
            total=total,
            free=free,
            allocated=module.memory_allocated(device),
            reserved=module.memory_reserved(device),
            peak_allocated=module.max_memory_allocated(device),
            peak_reserved=module.max_memory_reserved(device),
        )

    def peak_memory(self) -> int:
        return int(self._module.max_memory_allocated(self.torch_device))

    def reset_peak_memory(self) -> None:
        self._module.reset_peak_memory_stats(self.torch_device)

    def release_unused(self) -> None:
        with self.ledger.waiting("release_memory"):
            self._module.empty_cache()

    def random_state(self) -> torch.Tensor:
        state: torch.Tensor = self._module.get_rng_state(self.torch_device)
        return state

    def set_random_state(self, state: torch.Tensor) -> None:
        self._module.set_rng_state(state, self.torch_device)

    def description(self) -> str:
        return str(self._module.get_device_name(self.torch_device))

    def switch_back(self, before: object) -> None:
        if before is None:
            return
        assert isinstance(before, tuple)
        raw, index = before
        self._module.set_stream(raw)
        if index != self._index:
            self._module.set_device(index)

    def _switch(self, stream: Stream) -> object:
        assert isinstance(stream, AcceleratorStream)
        raw, index = self._module.current_stream(self.torch_device), self._module.current_device()
        if index == self._index and raw.stream_id == stream.raw.stream_id:
            return None  # already current: the usual case, and setting it again takes time
        self._module.set_stream(stream.raw)  # also makes its device current
        return raw, index

    def _synchronize(self, stream: Stream | None) -> None:
        if stream is None:
            self._module.synchronize(self.torch_device)
        else:
            assert isinstance(stream, AcceleratorStream)
            stream.raw.synchronize()

    def _allocate_pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")

    def _raw_event(self, timing: bool) -> Any:
        return self._module.Event(enable_timing=timing)

    def _wrap(self, raw: Any, name: str, priority: int) -> AcceleratorStream:
        """The one `AcceleratorStream` for `raw`, so that streams can be compared with `is`."""
        stream = AcceleratorStream(self, name, priority, raw)
        return self._wrapped.setdefault(raw.stream_id, stream)
