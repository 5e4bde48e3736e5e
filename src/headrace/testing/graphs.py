"""Graphs on the fake device: work that is recorded on a tape once, and put on a stream again.

As on CUDA nothing runs during a capture. PyTorch has to compute to know the results' shapes, but
afterwards all memory that was there before is as it was, the random generator stands where it
stood, and memory that the capture made holds nothing of use until the first replay. A replay does
the tape's arithmetic again, into the same memory, and is checked and timed like any other work.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from headrace.device import Graph, Obstacle, Result
from headrace.errors import CaptureError, ClosedError, DeviceError, DeviceMismatchError
from headrace.testing import followed
from headrace.testing.checker import storage_key
from headrace.testing.operators import Operation, tensors
from headrace.testing.races import Launch, calling_site

if TYPE_CHECKING:
    from headrace.testing.fake import FakeDevice
    from headrace.testing.streams import FakeStream

_COPY = torch.ops.aten.copy_.default
# All bits set: no number in any floating type, -1 in the others.
_GARBAGE = 0xFF


class Pool:
    """Memory that graphs share, and so may not use at the same time: every replay writes `memory`,
    and two that nothing orders are a race on it."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        with unseen():
            self.memory = torch.zeros(1, dtype=torch.uint8)
            with device.lock:
                known = device.checker.track(self.memory, "pool", device.host(), calling_site())
        known.label = "graph pool"


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment in a captured stream: what an event recorded there stands for."""

    tape: Tape
    stream: FakeStream
    count: int


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """An operator's call, to be made again. Its new tensors, by their position in the result, are
    copied into those that the capture made. `trains` is whether gradients were on: some operators
    return more then (an LSTM, what its backward needs)."""

    func: Any
    args: Any
    kwargs: Any
    outputs: Sequence[tuple[int, torch.Tensor]] = ()
    trains: bool = False

    def run(self) -> None:
        torch._C._set_grad_enabled(self.trains)  # until `unseen` ends
        result = self.func(*self.args, **self.kwargs)
        if self.outputs:
            found = tensors(result)
            for position, output in self.outputs:
                output.copy_(found[position])


@dataclass(eq=False, repr=False, slots=True)
class Tape:
    """One capture: which streams it covers, what is put on them, and what must be put back."""

    device: FakeDevice
    origin: FakeStream
    pool: Pool
    launches: list[Launch] = field(default_factory=list)
    arithmetic: list[_Arithmetic] = field(default_factory=list)
    over: bool = False
    #: The captured streams, and how much was put on each.
    _counts: dict[FakeStream, int] = field(default_factory=dict)
    #: Those whose work no other captured stream waits for yet.
    _loose: set[FakeStream] = field(default_factory=set)
    #: What the capture made, and what was there before and is written: the memory and its content.
    _made: dict[int, torch.Tensor] = field(default_factory=dict)
    _before: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _problem: RuntimeError | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside the block the tape runs. However it ends, the memory is as it was."""
        with unseen():
            random_state = self.device.random_state()
        self._take_in(self.origin)
        try:
            with self.device.call.but(tape=self):
                yield
            if self._problem is not None:
                raise self._problem  # the work went on after an error; the capture cannot
            if self._loose:
                names = ", ".join(sorted(stream.name for stream in self._loose))
                raise RuntimeError(f"capturing stream has unjoined work: on {names}")
        finally:
            self.over, self._problem = True, None
            for stream in self._counts:
                stream.tape = None
            with unseen():
                self._put_back()
                self.device.set_random_state(random_state)

    def _put_back(self) -> None:
        for memory, content in self._before.values():
            if memory.untyped_storage().nbytes() >= content.numel():  # not if it was resized
                memory.copy_(content)
        for memory in self._made.values():
            memory.fill_(_GARBAGE)
        self._before.clear()

    def forget(self) -> None:
        """Let go of all memory."""
        self.launches.clear()
        self.arithmetic.clear()
        self._made.clear()

    def refuse(self, what: str) -> NoReturn:
        """Raise what CUDA raises. The capture has failed then, whoever catches the error."""
        if self._problem is None:
            self._problem = RuntimeError(
                f"operation not permitted when stream is capturing: {what}"
            )
        raise self._problem

    # --- streams ----------------------------------------------------------------------------------

    def mark(self, stream: FakeStream) -> Mark:
        return Mark(self, stream, self._counts[stream])

    def wait(self, stream: FakeStream, mark: Mark) -> None:
        """A stream waits for a captured one: from now on it is captured too, until the capture
        ends, and must be waited for before that."""
        if stream not in self._counts:
            if stream is self.device.default_stream:
                self.refuse("the default stream would depend on a capturing stream")
            self._take_in(stream)
        if self._counts[mark.stream] == mark.count:
            self._loose.discard(mark.stream)
        if stream is not self.origin:
            self._loose.add(stream)

    def _take_in(self, stream: FakeStream) -> None:
        self._counts[stream] = 0
        stream.tape = self

    # --- what is recorded -------------------------------------------------------------------------

    def launched(self, stream: FakeStream, launch: Launch) -> None:
        """An operation on a captured stream, as the checker and the clock are to see it later."""
        self._counts[stream] += 1
        if stream is not self.origin:
            self._loose.add(stream)
        if launch.reads or launch.writes or launch.cost_ns:
            with unseen():
                self.launches.append(launch.on(self._live(launch.reads), self._live(launch.writes)))

    def made(self, memory: Sequence[torch.Tensor]) -> None:
        """Tensors that the capture made: theirs is the graph's memory."""
        with unseen():
            for tensor in memory:
                self._made.setdefault(storage_key(tensor), _bytes_of(tensor))

    def keep(self, written: Sequence[torch.Tensor]) -> None:
        """Remember what is in tensors that are about to be written."""
        with unseen():
            for tensor in written:
                key = storage_key(tensor)
                if key not in self._made and key not in self._before:
                    memory = _bytes_of(tensor)
                    self._before[key] = memory, memory.clone()

    def begins(self, operation: Operation, written: Sequence[torch.Tensor]) -> None:
        for value in (*operation.args, *operation.kwargs.values()):
            if isinstance(value, torch.Generator) and value is not torch.default_generator:
                self.refuse("random numbers from a generator of the step's own")
        self.keep(written)

    def ended(self, operation: Operation, result: Any, fresh: Sequence[torch.Tensor]) -> None:
        """Remember an operation's arithmetic. Numbers on the host are taken now, once for all."""
        keys = {storage_key(tensor) for tensor in fresh}
        trains = torch.is_grad_enabled()
        with unseen():
            outputs = [
                (position, tensor.data)
                for position, tensor in enumerate(tensors(result))
                if storage_key(tensor) in keys
            ]
            args, kwargs = (
                self._live(part, bake=True) for part in (operation.args, operation.kwargs)
            )
            self.arithmetic.append(_Arithmetic(operation.func, args, kwargs, outputs, trains))

    def copied(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Remember a copy: from pinned memory, what is there when it is replayed."""
        with unseen():
            pair = self._live((into, source))
            self.arithmetic.append(_Arithmetic(_COPY, pair, {}))

    def _live(self, value: Any, *, bake: bool = False) -> Any:
        """The same memory without autograd's history and count of changes; ordinary host memory,
        and with `bake` all that is not on the device, as it is now."""
        if isinstance(value, torch.Tensor):
            fixed = not self.device.holds(value) and (bake or not self.device.is_pinned(value))
            return value.detach().clone() if fixed else value.data
        if isinstance(value, (tuple, list)):
            return type(value)(self._live(part, bake=bake) for part in value)
        if isinstance(value, dict):
            return {name: self._live(part, bake=bake) for name, part in value.items()}
        return value


class FakeGraph(Graph):
    def __init__(self, tape: Tape) -> None:
        self._tape: Tape | None = tape

    def replay(self) -> None:
        tape = self._tape
        if tape is None:
            raise ClosedError("a graph was replayed after its close()")
        refuse(tape.device, "the replay of a graph")
        with unseen():
            for step in tape.arithmetic:
                step.run()
        tape.device.replay(tape.launches, tape.pool.memory)

    def close(self) -> None:
        if self._tape is not None:
            self._tape.forget()
        self._tape = None


# --- for the device -------------------------------------------------------------------------------


def capture(device: FakeDevice, work: Callable[[], Result], pool: object) -> tuple[Graph, Result]:
    if not isinstance(pool, Pool) or pool.device is not device:
        raise DeviceMismatchError(f"capture on {device} expects a pool from its graph_pool()")
    if not device.follows_this_thread():
        raise DeviceError(f"{device} captures only inside its `with device:` block")
    stream = device.stream("capture")
    if stream.tape is not None:
        raise CaptureError(f"{device} is capturing already, and does one capture at a time")
    tape = Tape(device, stream, pool)
    try:
        with device.use(stream), tape.recording():
            result = work()
    except Exception as problem:
        tape.forget()
        raise CaptureError("the step could not be captured") from problem
    return FakeGraph(tape), result


@contextmanager
def watch(device: FakeDevice) -> Iterator[list[Obstacle]]:
    found: list[Obstacle] = []
    with device.call.but(obstacles=found):
        yield found


def refuse(device: FakeDevice, what: str, stream: FakeStream | None = None) -> None:
    """Raise, for something that makes the host wait or ask, if this thread is capturing or
    `stream` is captured."""
    tape = device.call.tape or (None if stream is None else stream.tape)
    if tape is not None:
        tape.refuse(what)


def wait(stream: FakeStream, mark: Mark | None) -> bool:
    """Whether a stream's wait, for a captured moment or (None) any other, is part of a capture.
    Then it orders nothing now."""
    if mark is None:
        if stream.tape is not None:
            stream.tape.refuse("a dependency on work outside the capture")
        return False
    if mark.tape.over or stream.tape not in (None, mark.tape):
        raise RuntimeError("operation not permitted on an event last recorded in another capture")
    mark.tape.wait(stream, mark)
    return True


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


@contextmanager
def unseen() -> Iterator[None]:
    """Inside the block neither the modes nor autograd nor autocast see anything."""
    with ExitStack() as stack:
        for guard in (
            torch._C.DisableTorchFunction,
            torch._C._DisableTorchDispatch,
            torch._C._DisableAutocast,
            torch.inference_mode,
        ):
            stack.enter_context(guard())
        yield


# --- what PyTorch asks the real device ------------------------------------------------------------

_HEALTH_CHECK = next(
    name
    for name in (
        "_accelerator_graph_capture_health_check",
        "_cuda_graph_capture_health_check",  # before PyTorch 2.10
    )
    if hasattr(torch.optim.Optimizer, name)
)


def _health_check(optimizer: torch.optim.Optimizer) -> None:
    """In place of PyTorch's own, which asks the real device whether it is capturing."""
    for device in followed.devices:
        if device.current_stream().tape is None:
            continue
        if not all(group.get("capturable") for group in optimizer.param_groups):
            raise RuntimeError(
                "Attempting CUDA graph capture of step() for an instance of "
                f"{type(optimizer).__name__} but param_groups' capturable is False."
            )


def _capturable_devices(supports_xla: bool = True) -> list[str]:
    """PyTorch's list, and what the fake's tensors are to C++."""
    devices: list[str] = followed.originals["_get_capturable_supported_devices"](supports_xla)
    return [*devices, "cpu"]


def _not_captured(name: str) -> Callable[..., Any]:
    """In place of what sets the device's random generator, as checkpointing does. Not in a graph:
    here it would happen at capture, and never again."""

    def run(*args: Any, **kwargs: Any) -> Any:
        for device in followed.devices:
            refuse(device, f"torch.{name}()")
        return followed.originals[name](*args, **kwargs)

    return run


for _name in ("manual_seed", "set_rng_state"):
    followed.patch(torch.random, _name, _not_captured(_name))
followed.patch(torch.optim.Optimizer, _HEALTH_CHECK, _health_check)
_optimizer = importlib.import_module("torch.optim.optimizer")  # torch.optim hides the name
followed.patch(_optimizer, "_get_capturable_supported_devices", _capturable_devices)
