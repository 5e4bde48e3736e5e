"""`torch.cuda.Stream`, `Event` and `CUDAGraph` on the fake device; `torch.Stream` and `Event`."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from headrace.fake.cuda import state
from headrace.fake.streams import FakeEvent, FakeStream
from headrace.races.frames import calling_frames
from headrace.races.source import assigned_name, name_of_new_object

if TYPE_CHECKING:
    pass

# The classes that user code may test for. Whatever is replaced, this package keeps the real ones.
_RealStream, _RealEvent = torch.cuda.Stream, torch.cuda.Event


class Stream:
    """`torch.Stream`: a queue of the fake device.

    A program may keep a stream for longer than a block, in a global variable say. In the next block
    it is a new stream of that name.
    """

    _made: FakeStream
    #: Whether its name is what the line that made it assigned it to, and not to a list of it, say.
    _is_assigned = False

    @property
    def _fake(self) -> FakeStream:
        fake_cuda = state.device()
        before = self._made
        if before.device is not fake_cuda:
            if before is before.device.default_stream:
                self._made = fake_cuda.default_stream
            else:
                name, made_at = before.name.partition(" #")[0], before.device.stream_sites()
                self._made = fake_cuda.new_stream(name, before.priority, made_at.get(before.name))
                fake_cuda.wrappers[self._made] = self
        return self._made

    def __new__(cls, device: Any = None, priority: int = 0, **ids: Any) -> Any:
        fake_cuda = state.device()
        state.check_index(device)
        if "stream_id" in ids:
            return stream_of(fake_cuda.stream_by_id(ids["stream_id"]))
        made = object.__new__(cls)
        # CUDA has priorities from -5 to 0, and takes others for the nearest of these.
        frames = calling_frames()
        made._made = fake_cuda.new_stream(name_of_new_object(frames), min(0, max(-5, priority)))
        made._is_assigned = assigned_name(frames) is not None
        fake_cuda.wrappers[made._made] = made
        return made

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    @property
    def device_index(self) -> int:
        return 0

    @property
    def device_type(self) -> int:
        return 1  # CUDA, in PyTorch's numbering

    @property
    def stream_id(self) -> int:
        return self._fake.state.number

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    @property
    def native_handle(self) -> int:
        return self.stream_id

    @property
    def priority(self) -> int:
        return self._fake.priority

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.stream_id)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5

    def wait_stream(self, stream: Stream) -> None:
        self._fake.wait_stream(stream._fake)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event if event is not None else Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        state.device().synchronize("stream.synchronize", self._fake)

    def query(self) -> bool:
        return self._fake.query()

    def is_capturing(self) -> bool:
        return self._fake.tape is not None

    def __enter__(self) -> Stream:
        blocks = self.__dict__.setdefault("_blocks", [])
        blocks.append(state.device().use(self._fake))
        blocks[-1].__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.__dict__["_blocks"].pop().__exit__(*exception)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other._fake is self._fake

    def __hash__(self) -> int:
        return hash(("cuda", self.stream_id))

    def __repr__(self) -> str:
        return f"<fake torch.cuda.Stream {self._made.name!r}>"


class CudaStream(Stream):
    """`torch.cuda.Stream`."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """So that `isinstance` holds with the real class too, where somebody still has it."""
        return _RealStream

    def record_event(self, event: Event | None = None) -> Event:
        return Stream.record_event(self, CudaEvent() if event is None else event)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream_id


class ExternalStream(CudaStream):
    """`torch.cuda.ExternalStream`: another object for a stream of this device."""

    def __new__(cls, stream_ptr: int, device: Any = None, **kwargs: Any) -> Any:
        state.check_index(device)
        try:
            return stream_of(state.device().stream_by_id(stream_ptr))
        except RuntimeError:
            raise state.not_emulated(
                "torch.cuda.streams.ExternalStream() of a stream that PyTorch has not made"
            ) from None


def stream_of(fake: FakeStream) -> CudaStream:
    """The `torch.cuda.Stream` of a fake stream, the same at each call."""
    wrappers = state.device().wrappers
    wrapper: CudaStream | None = wrappers.get(fake)
    if wrapper is None:
        wrapper = object.__new__(CudaStream)
        wrapper._made = fake
        wrapper = wrappers.setdefault(fake, wrapper)  # another thread may have been faster
    return wrapper


class Event:
    """`torch.Event`. As in CUDA, an event that nothing has recorded has passed: waiting for it
    orders nothing."""

    def __init__(
        self,
        device: Any = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        state.check_index(device)
        if interprocess:
            raise state.not_emulated("torch.cuda.Event(interprocess=True)")
        self._made = state.device().event(timing=enable_timing)
        self._is_external = external

    @property
    def _fake(self) -> FakeEvent:
        """In a later block than its own, an event that nothing has recorded."""
        if self._made.device is not state.device():
            self._made = state.device().event(timing=self._made.timing)
        return self._made

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    @property
    def cuda_event(self) -> int:
        return id(self)

    event_id = cuda_event

    def record(self, stream: Stream | None = None) -> None:
        self._fake.record(self._used_on(stream))

    def wait(self, stream: Stream | None = None) -> None:
        waiting = self._used_on(stream)
        if self._fake.recorded:
            waiting.wait_event(self._fake)

    def _used_on(self, stream: Stream | None) -> FakeStream:
        used = state.device().current_stream() if stream is None else stream._fake
        if self._is_external and used.tape is not None:  # each replay would record it again
            raise state.not_emulated("torch.cuda.Event(external=True) in a capture")
        return used

    def query(self) -> bool:
        return self._fake.query() if self._fake.recorded else True

    def synchronize(self) -> None:
        if self._fake.recorded:
            state.device().wait(self._fake, "event.synchronize")

    def elapsed_time(self, end_event: Event) -> float:
        for event in (self, end_event):
            if not event._fake.timing:
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if not event._fake.recorded:
                raise ValueError("Both events must be recorded before calculating elapsed time.")
        return self._fake.elapsed_ms(end_event._fake)

    def ipc_handle(self) -> bytes:
        raise state.not_emulated("Event.ipc_handle()")

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Event:
        raise state.not_emulated("Event.from_ipc_handle()")

    def __repr__(self) -> str:
        return f"<fake torch.cuda.Event {self.cuda_event:#x}>"


class CudaEvent(Event):
    """`torch.cuda.Event`."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        Event.__init__(
            self, enable_timing=enable_timing, interprocess=interprocess, external=external
        )

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return _RealEvent
