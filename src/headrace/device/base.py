"""The seam to the hardware: what every device can do.

Three devices stand behind it: accelerators (`accelerator.py`, with `cuda.py`), the CPU
(`cpu.py`) and, for tests, `headrace.testing.FakeDevice`. The public methods here check what they
are given, once for all of them; the underscored ones are what a device implements.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch

from headrace.device.graph import Graph, Obstacle
from headrace.device.ledger import Ledger
from headrace.device.pinned import PinnedPool
from headrace.device.sensors import Sensors
from headrace.device.trace import Trace, traced
from headrace.errors import CaptureError, DeviceError, DeviceMismatchError, EventNotRecordedError

Result = TypeVar("Result")

log = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Device memory in bytes. `reserved` includes what the allocator keeps for reuse.

    On the CPU `total` and `free` are the machine's; the others are 0, since nothing counts them.
    """

    total: int
    free: int
    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int


class Stream(abc.ABC):
    """A queue of device work, done in order. Two streams run side by side unless events order
    them. Made by `Device.stream`, once per device and name."""

    def __init__(self, device: Device, name: str, priority: int = 0) -> None:
        self.device = device
        self.name = name
        self.priority = priority

    def wait_event(self, event: Event) -> None:
        """Work put on this stream from now on starts only after `event`. The host goes on.

        What counts is the event's last `record` before this call.
        """
        event._require_recorded("made a stream wait for")
        self.device.require_own("an event", event.device)
        self._wait_event(event)

    def wait_stream(self, other: Stream) -> None:
        """Work put on this stream from now on starts only after all that is on `other` *now*."""
        self.device.require_own("a stream", other.device)
        self._wait_stream(other)

    @abc.abstractmethod
    def query(self) -> bool:
        """Whether all work put on this stream is done. Never blocks."""

    @abc.abstractmethod
    def _wait_event(self, event: Event) -> None: ...

    @abc.abstractmethod
    def _wait_stream(self, other: Stream) -> None: ...

    def __repr__(self) -> str:
        return f"<stream {self.name!r} on {self.device}>"


class Event(abc.ABC):
    """A mark in a stream: it has passed when all work before it is done.

    Made by `Device.event`. May be recorded again; then the newest record is the one that counts.
    The host waits for one through `Device.wait`, which writes it into the ledger.
    """

    def __init__(self, device: Device, timing: bool) -> None:
        self.device = device
        self.timing = timing
        self.recorded = False

    def record(self, stream: Stream | None = None) -> None:
        """Put the mark at the end of `stream` (default: the current one)."""
        if stream is None:
            stream = self.device.current_stream()
        self.device.require_own("a stream", stream.device)
        self._record(stream)
        self.recorded = True

    def query(self) -> bool:
        """Whether the mark has passed. Never blocks."""
        self._require_recorded("queried")
        return self._query()

    def elapsed_ms(self, end: Event) -> float:
        """Device time from this mark to `end`; both made with `timing=True`, both passed."""
        for event in (self, end):
            event._require_recorded("timed")
            if not event.timing:
                raise DeviceMismatchError(
                    "elapsed_ms needs events made with device.event(timing=True); "
                    "one of these was made without"
                )
        return self._elapsed_ms(end)

    @abc.abstractmethod
    def _record(self, stream: Stream) -> None: ...

    @abc.abstractmethod
    def _query(self) -> bool: ...

    @abc.abstractmethod
    def _synchronize(self) -> None: ...

    @abc.abstractmethod
    def _elapsed_ms(self, end: Event) -> float: ...

    def _require_recorded(self, action: str) -> None:
        if not self.recorded:
            raise EventNotRecordedError(
                f"an event on {self.device} was {action} before anything recorded it; "
                "call event.record(stream) first"
            )


class Device(abc.ABC):
    """One device: its streams, events, pinned memory and copies, and the ledger of host waits.

    `torch_device` is what to give to PyTorch (`model.to(device.torch_device)`). A device may be
    used from any thread; the current stream is each thread's own.
    """

    #: Whether work runs beside the host at all. On the CPU every call returns with its work done.
    asynchronous: bool = True
    #: Whether `capture` works here.
    captures: bool = False
    #: Whether `torch.compile` is worth its time here.
    compiles: bool = False

    def __init__(self, torch_device: torch.device, ledger: Ledger | None = None) -> None:
        self.torch_device = torch_device
        self.ledger = ledger if ledger is not None else Ledger()
        self.pinned = PinnedPool(self._allocate_pinned)
        self._said: set[str] = set()

    # --- streams ------------------------------------------------------------------------------

    @abc.abstractmethod
    def stream(self, name: str, *, priority: int = 0) -> Stream:
        """The stream called `name`, made the first time it is asked for.

        A lower `priority` number is served first, as PyTorch counts (-1 before 0). Asking for a
        known name with another priority is an error.
        """

    @abc.abstractmethod
    def current_stream(self) -> Stream:
        """The stream that this thread's work goes to now."""

    def use(self, stream: Stream) -> AbstractContextManager[Stream]:
        """Send this thread's work to `stream` inside the `with` block, and back after it."""
        return _Use(self, stream)

    def switch(self, stream: Stream) -> object:
        """Send this thread's work to `stream` until `switch_back` is given what this returns.

        `use` does both; this is for code that cannot be a `with` block.
        """
        self.require_own("a stream", stream.device)
        return self._switch(stream)

    # --- events and host waits ------------------------------------------------------------------

    @abc.abstractmethod
    def event(self, *, timing: bool = False) -> Event:
        """A new event, not yet recorded. With `timing`, its device time can be compared."""

    def wait(self, event: Event, reason: str) -> None:
        """Block this thread until `event` has passed, and say so in the ledger.

        On an accelerator the thread sleeps; it does not spin.
        """
        self.require_own("an event", event.device)
        if event.query():
            self.ledger.passed(reason)
        else:
            with self.ledger.waiting(reason):
                event._synchronize()

    def synchronize(self, reason: str, stream: Stream | None = None) -> None:
        """Block this thread until `stream`, or the whole device, is done. In the ledger."""
        if stream is not None:
            self.require_own("a stream", stream.device)
        with self.ledger.waiting(reason):
            self._synchronize(stream)

    # --- memory and copies ----------------------------------------------------------------------

    @abc.abstractmethod
    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a copy from this host tensor can run beside the host."""

    @abc.abstractmethod
    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies on this device."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory on the device. It belongs to the current stream: others that use
        it must be ordered by events, and be done (or recorded) before it is freed."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def copy(
        self, destination: torch.Tensor, source: torch.Tensor, *, known_pinned: bool = False
    ) -> None:
        """Copy `source` into `destination` on the current stream; the host goes on at once.

        From or to host memory that is not pinned the copy still happens, but the host stands
        still for it; that is said once in the log, with the remedy. `known_pinned` spares the
        look at a loop's every batch.
        """
        if self.asynchronous and not known_pinned:
            for tensor in (source, destination):
                if not self.holds(tensor) and not self.is_pinned(tensor):
                    self._copy_pageable(destination, source)
                    return
        destination.copy_(source, non_blocking=True)

    def _copy_pageable(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.say_once(
            "pageable copy",
            "a copy between %s and host memory that is not pinned makes the host wait; give the "
            "DataLoader pin_memory=True, or take a buffer from device.pinned",
            self,
        )
        with self.ledger.waiting("pageable_copy"):
            destination.copy_(source, non_blocking=True)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep `tensor`'s memory from reuse, once it is freed, until `stream` is done with it.

        A fallback: it delays reuse. Better, order the streams with events before freeing.
        """
        self.require_own("a stream", stream.device)
        self._record_stream(tensor, stream)

    def read_host(self, tensor: torch.Tensor) -> list[list[float]]:
        """The numbers in a 2-D *host* tensor, whose copy has passed: here so that nowhere else
        in the package a tensor is read, and a wait cannot hide."""
        if self.asynchronous and self.holds(tensor):
            raise DeviceError("read_host was given a device tensor: copy it and wait first")
        rows: list[list[float]] = tensor.tolist()
        return rows

    @abc.abstractmethod
    def memory(self) -> MemoryFigures: ...

    def peak_memory(self) -> int:
        """Most bytes allocated at once since `reset_peak_memory`; 0 where nothing is counted."""
        return 0

    def reset_peak_memory(self) -> None:
        """Let the peaks in `memory()` count from now. Nothing to do where nothing is counted."""
        return

    def limit_memory(self, nbytes: int | None) -> None:
        """Let this process have no more device memory than that, as if there were no more: what
        asks for more is out of memory. None: all there is. Not everywhere can this be done."""
        return

    def release_unused(self) -> None:
        """Give memory that the allocator keeps for reuse back to the device. May wait for it."""
        return

    # --- graphs ---------------------------------------------------------------------------------

    def graph_pool(self) -> object:
        """Memory that graphs share. They must be replayed one at a time, each must write what it
        reads there, and what is to outlive a replay must be copied out before the next."""
        raise CaptureError(f"{self} captures no graphs")

    def capture(self, work: Callable[[], Result], pool: object) -> tuple[Graph, Result]:
        """Record what `work` puts on the current stream, without running any of it; also returns
        what `work` returned. All memory that `work` gets is the pool's.

        Raises `CaptureError`, from the error that was its cause, if that cannot be done. The host
        waits for nothing.
        """
        raise CaptureError(f"{self} captures no graphs")

    def watch(self) -> AbstractContextManager[list[Obstacle]]:
        """Run a step in the block as usual; then the list has what a graph could not repeat in
        it: host waits, copies from host memory, random numbers drawn on the host."""
        return nullcontext([])

    def random_state(self) -> torch.Tensor:
        """Where this device's default random generator stands. Waits for nothing."""
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def stream_states(self) -> dict[str, bool]:
        """Of each stream in use by name: whether all that was put on it is done. Never blocks."""
        return {}

    # --- arithmetic and profiling ---------------------------------------------------------------

    def numerics(self, precision: str | None) -> AbstractContextManager[object]:
        """Inside the block, float32 products use TF32, or do not with "fp32".

        With None, PyTorch's own switches stay as they are. Only accelerators have the choice.
        """
        return nullcontext()

    def float32_switches(self) -> str | None:
        """How PyTorch is set to compute float32 products now; None where there is no choice."""
        return None

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """Mark the block with `name` in the vendor's profiler, where there is one."""
        return nullcontext()

    def use_share(self) -> float | None:
        """The share of recent time in which anything ran on the device, as its driver counts;
        None where nobody does."""
        return None

    def sensors(self) -> Sensors | None:
        """What its driver measures: use, memory, power, clock, temperature; None if nobody does."""
        return None

    def trace(self) -> AbstractContextManager[Trace]:
        """See what the device does in the block: each kernel and copy with its time and stream.

        For a few steps, not for a run: it takes memory, and some time at its ends, where the host
        waits for the device. Where the work cannot be seen, `Trace.missing` says why.
        """
        return traced(self)

    def has_fast_bf16(self) -> bool:
        """Whether bf16 products are faster here than those of float32."""
        return False

    @abc.abstractmethod
    def description(self) -> str:
        """The device in words, as the driver names it."""

    # --- for the devices themselves ------------------------------------------------------------

    @abc.abstractmethod
    def _switch(self, stream: Stream) -> object: ...

    @abc.abstractmethod
    def switch_back(self, before: object) -> None:
        """Undo a `switch`, in the thread that made it."""

    @abc.abstractmethod
    def _synchronize(self, stream: Stream | None) -> None: ...

    @abc.abstractmethod
    def _record_stream(self, tensor: torch.Tensor, stream: Stream) -> None: ...

    def _watch_work(self, trace: Trace) -> AbstractContextManager[object]:
        """Inside the block, see what runs; after it, tell `trace`."""
        trace.missing = f"no profiler of Headrace's sees the work of {self}"
        return nullcontext()

    @abc.abstractmethod
    def _allocate_pinned(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor of `nbytes` in pinned host memory."""

    def say_once(self, key: str, message: str, *args: object) -> None:
        """Log `message` as a warning, the first time `key` comes up on this device."""
        if key not in self._said:
            self._said.add(key)
            log.warning(message, *args)

    def require_own(self, what: str, device: Device) -> None:
        """Raise unless `device`, to which `what` ("a stream", say) belongs, is this one."""
        if device is self:
            return
        if device.torch_device != self.torch_device or type(device) is not type(self):
            raise DeviceMismatchError(f"{what} of {device} was given to {self}")

    def __str__(self) -> str:
        return str(self.torch_device)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.torch_device}>"


class _Use:
    """The block of `Device.use`: a class, since a generator would cost three times as much."""

    __slots__ = ("_before", "_device", "_stream")

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device = device
        self._stream = stream

    def __enter__(self) -> Stream:
        self._before = self._device.switch(self._stream)
        return self._stream

    def __exit__(self, *exception: object) -> None:
        self._device.switch_back(self._before)
