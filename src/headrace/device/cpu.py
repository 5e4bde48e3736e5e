"""The CPU as a device: every operation is done when its call returns, so nothing ever waits."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext

import torch

from headrace.device.base import Device, Event, MemoryFigures, Stream
from headrace.device.ledger import Ledger
from headrace.device.trace import Trace


class CpuStream(Stream):
    def query(self) -> bool:
        return True

    def _wait_event(self, event: Event) -> None:
        """Nothing to do: the work before the event is done."""

    def _wait_stream(self, other: Stream) -> None:
        """Nothing to do: the work on the other stream is done."""


class CpuEvent(Event):
    _recorded_ns = 0

    def _record(self, stream: Stream) -> None:
        self._recorded_ns = time.perf_counter_ns()

    def _query(self) -> bool:
        return True

    def _synchronize(self) -> None:
        """Nothing to do: the event passed when it was recorded."""

    def _elapsed_ms(self, end: Event) -> float:
        assert isinstance(end, CpuEvent)
        return (end._recorded_ns - self._recorded_ns) / 1e6


class _CurrentStream:
    """The current stream of each thread, which on an accelerator the driver keeps."""

    def __init__(self, default: Stream) -> None:
        self._default = default
        self._thread = threading.local()

    def get(self) -> Stream:
        stream: Stream = getattr(self._thread, "stream", self._default)
        return stream

    def set(self, stream: object) -> Stream:
        """Make `stream` current. Returns the one that was current before."""
        assert isinstance(stream, Stream)
        before = self.get()
        self._thread.stream = stream
        return before


class CpuDevice(Device):
    """The CPU. Its streams and events do nothing, but are checked as on an accelerator."""

    asynchronous = False

    def __init__(self, ledger: Ledger | None = None) -> None:
        super().__init__(torch.device("cpu"), ledger)
        self._streams: dict[str, CpuStream] = {}
        self._current = _CurrentStream(CpuStream(self, "default"))

    def stream(self, name: str, *, priority: int = 0) -> CpuStream:
        stream = self._streams.setdefault(name, CpuStream(self, name, priority))
        self._require_priority(name, stream.priority, priority)
        return stream

    def current_stream(self) -> Stream:
        return self._current.get()

    def event(self, *, timing: bool = False) -> CpuEvent:
        return CpuEvent(self, timing)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return False

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu

    def _record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Nothing to do: no stream still reads the tensor."""

    def memory(self) -> MemoryFigures:
        import psutil

        machine = psutil.virtual_memory()
        return MemoryFigures(machine.total, machine.available, 0, 0, 0, 0)

    def description(self) -> str:
        return "CPU"

    def _switch(self, stream: Stream) -> object:
        return self._current.set(stream)

    def switch_back(self, before: object) -> None:
        self._current.set(before)

    def _synchronize(self, stream: Stream | None) -> None:
        """Nothing to do: all work is done."""

    def _watch_work(self, trace: Trace) -> AbstractContextManager[object]:
        trace.give_up("on the CPU the host itself computes: there is no separate device to trace")
        return nullcontext()

    def _allocate_pinned(self, nbytes: int) -> torch.Tensor:
        # Ordinary memory: pinning needs an accelerator, and here every copy blocks anyway.
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
