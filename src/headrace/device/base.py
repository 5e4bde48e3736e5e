"""`Device`, `Stream` and `Event`: the interface of all devices.

It has three implementations: accelerators (`accelerator.py`, with `cuda.py`), the CPU (`cpu.py`)
and, for tests, `headrace.fake.FakeDevice`. The public methods here check their arguments for all
of them; a device implements the abstract and the underscored ones.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch

from headrace.device.graph import CaptureQuery, Graph, Obstacle
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

    On the CPU `total` and `free` are the machine's; nothing counts the others, which are 0.
    """

    total: int
    free: int
    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int


class Stream(abc.ABC):
    """A queue of device work, which runs in order. Work on two streams may overlap unless events
    order it. `Device.stream` makes one for each name."""

    def __init__(self, device: Device, name: str, priority: int = 0) -> None:
        self.device = device
        self.name = name
        self.priority = priority

    def wait_event(self, event: Event) -> None:
        """Make work that is queued on this stream from now on wait for `event`, as it was recorded
        last before this call. The host does not wait.
        """
        event._require_recorded("made a stream wait for")
        self.device.require_own("an event", event.device)
        self._wait_event(event)

    def wait_stream(self, other: Stream) -> None:
        """Make work that is queued on this stream from now on wait for all work that is on `other`
        *now*. The host does not wait."""
        self.device.require_own("a stream", other.device)
        self._wait_stream(other)

    @abc.abstractmethod
    def query(self) -> bool:
        """Whether all work on this stream is done. Never blocks."""

    @abc.abstractmethod
    def _wait_event(self, event: Event) -> None: ...

    @abc.abstractmethod
    def _wait_stream(self, other: Stream) -> None: ...

    def __repr__(self) -> str:
        return f"<stream {self.name!r} on {self.device}>"


class Event(abc.ABC):
    """A mark in a stream: it has passed when all work before it is done.

    Made by `Device.event`. It may be recorded again; the last record counts. To make the host wait
    for it, use `Device.wait`, which writes the wait into the ledger.
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
        """Device time from this mark to `end`. Both need `timing=True` and must have passed."""
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

    `torch_device` is the device's name for PyTorch: `model.to(device.torch_device)`. A device may
    be used from any thread; each thread has its own current stream.
    """

    #: Whether work runs while the host goes on. On the CPU, every call returns with its work done.
    asynchronous: bool = True
    #: Whether `capture` works here.
    captures: bool = False
    #: Whether `torch.compile` is worth its time here.
    compiles: bool = False

    def __init__(self, torch_device: torch.device, ledger: Ledger | None = None) -> None:
        self.torch_device = torch_device
        self.ledger = ledger if ledger is not None else Ledger()
        self.pinned = PinnedPool(self._allocate_pinned)
        self._warned: set[str] = set()

    # --- streams ------------------------------------------------------------------------------

    @abc.abstractmethod
    def stream(self, name: str, *, priority: int = 0) -> Stream:
        """The stream called `name`, which the first call makes.

        As in PyTorch, a lower `priority` is served first: -1 before 0. Asking for an existing
        stream with another priority is an error.
        """

    def _require_priority(self, name: str, made_with: int, priority: int) -> None:
        """Raise if an existing stream is asked for with another priority than its own."""
        if made_with != priority:
            raise DeviceError(
                f"stream {name!r} was made with priority {made_with}; "
                f"it was asked for with {priority}"
            )

    @abc.abstractmethod
    def current_stream(self) -> Stream:
        """The stream to which this thread's work goes now."""

    def use(self, stream: Stream) -> AbstractContextManager[Stream]:
        """Send this thread's work to `stream` inside the `with` block."""
        self.require_own("a stream", stream.device)
        return _Use(self, stream)

    def switch(self, stream: Stream) -> object:
        """Send this thread's work to `stream`. Returns a value for `switch_back`, which undoes it.

        For code that cannot be a `with` block; otherwise use `use`.
        """
        self.require_own("a stream", stream.device)
        return self._switch(stream)

    # --- events and host waits ------------------------------------------------------------------

    @abc.abstractmethod
    def event(self, *, timing: bool = False) -> Event:
        """A new event, not yet recorded. With `timing`, `elapsed_ms` works."""

    def wait(self, event: Event, reason: str) -> None:
        """Block this thread until `event` has passed, and count the wait in the ledger.

        On an accelerator the thread sleeps and does not spin.
        """
        self.require_own("an event", event.device)
        if event.query():
            self.ledger.passed(reason)
        else:
            with self.ledger.waiting(reason):
                event._synchronize()

    def synchronize(self, reason: str, stream: Stream | None = None) -> None:
        """Block this thread until `stream`, or the whole device, is done, and count the wait."""
        if stream is not None:
            self.require_own("a stream", stream.device)
        with self.ledger.waiting(reason):
            self._synchronize(stream)

    # --- memory and copies ----------------------------------------------------------------------

    @abc.abstractmethod
    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a copy from this host tensor can run while the host goes on."""

    @abc.abstractmethod
    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is on this device."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory on the device. It belongs to the current stream. Order other streams
        that use it with events, and let them finish (or call `record_stream`) before it is freed.
        """
        return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def copy(
        self, destination: torch.Tensor, source: torch.Tensor, *, known_pinned: bool = False
    ) -> None:
        """Copy `source` into `destination` on the current stream. The host does not wait, unless
        the host's memory is not pinned: then a warning says once what to do. `known_pinned` skips
        the check for that, which takes time in a loop.
        """
        if self.asynchronous and not known_pinned:
            for tensor in (source, destination):
                if not self.holds(tensor) and not self.is_pinned(tensor):
                    self._copy_pageable(destination, source)
                    return
        destination.copy_(source, non_blocking=True)

    def _copy_pageable(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.warn_once(
            "pageable copy",
            "a copy between %s and host memory that is not pinned makes the host wait; give the "
            "DataLoader pin_memory=True, or take a buffer from device.pinned",
            self,
        )
        with self.ledger.waiting("pageable_copy"):
            destination.copy_(source, non_blocking=True)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """After `tensor` is freed, keep its memory from reuse until `stream` is done with it.

        This delays reuse: where you can, order the streams with events before you free it.
        """
        self.require_own("a stream", stream.device)
        self._record_stream(tensor, stream)

    def read_host(self, tensor: torch.Tensor) -> list[list[float]]:
        """The numbers in a 2-D *host* tensor whose copy is done. No other code in the package reads
        a tensor's values, so no wait can hide there."""
        if self.asynchronous and self.holds(tensor):
            raise DeviceError("read_host was given a device tensor: copy it and wait first")
        rows: list[list[float]] = tensor.tolist()
        return rows

    @abc.abstractmethod
    def memory(self) -> MemoryFigures: ...

    def peak_memory(self) -> int:
        """The largest number of bytes allocated at once since `reset_peak_memory`; 0 on the CPU."""
        return 0

    def reset_peak_memory(self) -> None:
        """Count the peaks in `memory()` from now on."""
        return

    def limit_memory(self, nbytes: int | None) -> None:
        """Limit this process to `nbytes` of device memory, or lift the limit with None. Beyond it,
        allocations fail as if memory had run out. Ignored where the device cannot do it."""
        return

    def release_unused(self) -> None:
        """Return memory that the allocator keeps for reuse. May wait for the device."""
        return

    # --- graphs ---------------------------------------------------------------------------------

    def graph_pool(self) -> object:
        """Memory that several graphs share. Replay them one at a time. Each must write what it
        reads there; copy out what you need before the next replay."""
        raise CaptureError(f"{self} captures no graphs")

    def capture(self, work: Callable[[], Result], pool: object) -> tuple[Graph, Result]:
        """Record the device work of `work` as a graph, without running it. Returns the graph and
        what `work` returned. All memory that `work` allocates is the pool's.

        Raises `CaptureError`, from the error that caused it, if the work cannot be captured.

        First the host waits for the device. A capture begins by resetting the random state that
        all graphs read, on a stream of its own: a replay still under way would draw other numbers.
        """
        if self.is_capturing():
            raise CaptureError(f"{self} is capturing already, and does one capture at a time")
        self.synchronize("capture")
        caller, own = self.current_stream(), self.stream("capture")
        try:
            return self._capture(work, pool, own)
        finally:
            caller.wait_stream(own)  # the next replay sets that state again

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured, by whomever."""
        return False

    def delay(self, ns: int) -> bool:
        """Keep the current stream busy for about so long, without a host wait. False if this device
        cannot."""
        return False

    def watch(self) -> AbstractContextManager[list[Obstacle]]:
        """Watch a step that runs in the block. Afterwards the list has what a graph could not
        repeat: host waits, copies from host memory, random numbers drawn on the host."""
        return nullcontext([])

    def answering(self, query: CaptureQuery) -> AbstractContextManager[None]:
        """Inside the block, `query` answers code that asks whether its work is being captured
        (`torch.cuda.is_current_stream_capturing`), in this thread and in autograd's. In a capture
        the answer is yes, unless the query is for captures as well."""
        return nullcontext()

    def random_state(self) -> torch.Tensor:
        """The state of this device's default random generator. Does not wait."""
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def stream_states(self) -> dict[str, bool]:
        """For each stream in use, by name, whether all its work is done. Never blocks."""
        return {}

    # --- arithmetic and profiling ---------------------------------------------------------------

    def numerics(self, precision: str | None) -> AbstractContextManager[object]:
        """Inside the block, compute float32 products in TF32, or in full precision for "fp32".

        With None, PyTorch's settings stay as they are. The CPU ignores this.
        """
        return nullcontext()

    def float32_switches(self) -> str | None:
        """PyTorch's current settings for float32 products, as text; None where there are none."""
        return None

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """Mark the block with `name` in the vendor's profiler, if there is one."""
        return nullcontext()

    def use_share(self) -> float | None:
        """The device's utilization: the share of recent time in which anything ran, as the driver
        measures it; None if it does not."""
        return None

    def sensors(self) -> Sensors | None:
        """Use, memory, power, clock and temperature from the driver; None if there is none."""
        return None

    def trace(self) -> AbstractContextManager[Trace]:
        """Trace the block: each kernel and copy with its time and stream.

        Use it for a few steps, not for a run: it takes memory, and the host waits for the device at
        both ends. If the work cannot be traced, `Trace.missing` says why.
        """
        return traced(self)

    def has_fast_bf16(self) -> bool:
        """Whether bf16 products are faster than float32 products on this device."""
        return False

    @abc.abstractmethod
    def description(self) -> str:
        """The device's name, as the driver gives it."""

    # --- for the devices themselves ------------------------------------------------------------

    @abc.abstractmethod
    def _switch(self, stream: Stream) -> object: ...

    @abc.abstractmethod
    def switch_back(self, before: object) -> None:
        """Undo a `switch`, in the thread that made it."""

    @abc.abstractmethod
    def _synchronize(self, stream: Stream | None) -> None: ...

    def _capture(
        self, work: Callable[[], Result], pool: object, stream: Stream
    ) -> tuple[Graph, Result]:
        """Record `work` on a stream, whose work is done."""
        raise CaptureError(f"{self} captures no graphs")

    @abc.abstractmethod
    def _record_stream(self, tensor: torch.Tensor, stream: Stream) -> None: ...

    def _watch_work(self, trace: Trace) -> AbstractContextManager[object]:
        """Record what runs in the block, and put it into `trace` after it."""
        trace.give_up(f"Headrace has no profiler for {self}")
        return nullcontext()

    @abc.abstractmethod
    def _allocate_pinned(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor of `nbytes` in pinned host memory."""

    def warn_once(self, key: str, message: str, *args: object) -> None:
        """Log `message` as a warning, once for each `key` on this device."""
        if key not in self._warned:
            self._warned.add(key)
            log.warning(message, *args)

    def require_own(self, what: str, device: Device) -> None:
        """Raise unless `device`, the owner of `what` ("a stream", say), is this one."""
        if device is self:
            return
        if device.torch_device != self.torch_device or type(device) is not type(self):
            raise DeviceMismatchError(f"{what} of {device} was given to {self}")

    def __str__(self) -> str:
        return str(self.torch_device)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.torch_device}>"


class _Use:
    """The block of `Device.use`. A class: a generator would take three times as long."""

    __slots__ = ("_before", "_device", "_stream")

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device = device
        self._stream = stream

    def __enter__(self) -> Stream:
        self._before = self._device._switch(self._stream)
        return self._stream

    def __exit__(self, *exception: object) -> None:
        self._device.switch_back(self._before)
