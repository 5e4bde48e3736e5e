"""Graphs on the fake device: a capture records work on a tape, a replay puts it on a stream again.

As on CUDA, nothing runs during a capture. PyTorch has to compute to know the shapes of results, but
afterwards the tape restores all older memory and the random generator, and fills the memory that
the capture allocated with garbage. A replay does the tape's arithmetic again in the same memory,
and is checked and timed like any other work.
"""

from __future__ import annotations

import importlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from headrace.device import Graph, Obstacle, Result, cuda_namespace, noting_host_draws
from headrace.errors import CaptureError, ClosedError, DeviceError, DeviceMismatchError
from headrace.fake import patches
from headrace.fake.branches import Branches
from headrace.fake.graph_pools import GraphPool, fill_with_garbage
from headrace.fake.patches import Replacement
from headrace.fake.raw_memory import bytes_of, references, unobserved
from headrace.races.checker import Clock, storage_key
from headrace.races.operators import Operation, tensors
from headrace.races.race import Launch

if TYPE_CHECKING:
    from headrace.fake.device import FakeDevice
    from headrace.fake.streams import FakeStream

_COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True, slots=True)
class Mark:
    """A position in a captured stream, as an event records it."""

    tape: Tape
    stream: FakeStream
    count: int
    #: What the position is ordered after, within the capture.
    clock: Clock


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """An operator call that a replay repeats. Its new tensors, by their position in the result, are
    copied into those that the capture made. `trains` is whether gradients were on: some operators
    return more then (an LSTM also returns what its backward needs)."""

    func: Any
    args: Any
    kwargs: Any
    outputs: Sequence[tuple[int, torch.Tensor]] = ()
    trains: bool = False

    def run(self) -> None:
        torch._C._set_grad_enabled(self.trains)  # until `unobserved` ends
        result = self.func(*self.args, **self.kwargs)
        if self.outputs:
            found = tensors(result)
            for position, output in self.outputs:
                output.copy_(found[position])


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Tape:
    """One capture: the streams it covers, the work put on them, and the memory to restore."""

    device: FakeDevice
    origin: FakeStream
    pool: GraphPool
    #: Those that may draw random numbers in the capture, besides the device's own.
    generators: Sequence[torch.Generator] = ()
    launches: list[Launch] = field(default_factory=list)
    arithmetic: list[_Arithmetic] = field(default_factory=list)
    over: bool = False
    #: Whether the work has drawn from the device's generator.
    draws: bool = False
    #: The order of the captured operations among themselves.
    branches: Branches = field(init=False)
    #: The captured streams, and how much was put on each.
    _counts: dict[FakeStream, int] = field(default_factory=dict)
    #: Those whose work no other captured stream waits for yet.
    _unjoined: set[FakeStream] = field(default_factory=set)
    #: What the capture made, and what was there before and is written: the memory and its content.
    _allocated: dict[int, torch.Tensor] = field(default_factory=dict)
    _before: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _problem: RuntimeError | None = None
    #: Memory from outside the capture, and the first captured operation that uses it.
    _inputs: dict[int, tuple[torch.Tensor, Launch]] = field(default_factory=dict)
    #: How often this tape refers to each storage.
    _references: Counter[int] = field(default_factory=Counter)
    #: Its number among the captures of the pool.
    _number: int = field(init=False)

    def __post_init__(self) -> None:
        self.branches = Branches(self.device.checker)
        self._number = self.pool.enter(self)
        # A graph may end without `close()`. Its counts must not stay: other memory will have the
        # same keys.
        weakref.finalize(self, self.device.captured_references.subtract, self._references)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record inside the block. However the block ends, restore the memory."""
        self.device.graph_random_state.reset(self.origin)
        with unobserved():
            random_state = self.device.random_state()
            states = [generator.get_state() for generator in self.generators]
            # PyTorch computes with what earlier captures have left, and would complain about
            # indices that are garbage.
            for pool in self.device.graph_pools:
                for memory in pool.indices():
                    self.save_before_write([memory])
                    memory.zero_()
        self._add_stream(self.origin)
        try:
            with self.device.call.changed(tape=self):
                yield
            if self._problem is not None:
                raise self._problem  # the work caught the error, but the capture has failed
            if self._unjoined:
                names = ", ".join(sorted(stream.name for stream in self._unjoined))
                raise RuntimeError(f"capturing stream has unjoined work: on {names}")
        finally:
            self.over, self._problem = True, None
            for stream in self._counts:
                stream.tape = None
            with unobserved():
                self._restore()
                self.draws = not torch.equal(random_state, self.device.random_state())
                self.device.set_random_state(random_state)
                for generator, state in zip(self.generators, states, strict=True):
                    generator.set_state(state)

    def _restore(self) -> None:
        for memory, content in self._before.values():
            if memory.untyped_storage().nbytes() >= content.numel():  # not if it was resized
                memory.copy_(content)
        for memory in self._allocated.values():
            fill_with_garbage(memory)
        forgotten = Counter(self._before.keys())
        self._references.subtract(forgotten)
        self.device.captured_references.subtract(forgotten)
        self._before.clear()

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that this tape keeps: count that it refers to the memory."""
        key = storage_key(tensor)
        self._references[key] += 1
        self.device.captured_references[key] += 1
        return tensor

    def freed_inputs(self) -> list[tuple[torch.Tensor, Launch]]:
        """Memory from outside any pool that only captures refer to any more: on CUDA, where they
        refer to none, it is freed, and may belong to somebody else. That of a pool stays there."""
        kept = self.device.captured_references
        freed = [use for key, use in self._inputs.items() if references(key) <= kept[key]]
        storage_of = self.device.checker.storage_of
        return [
            (tensor, launch)
            for tensor, launch in freed
            if (tracked := storage_of(tensor)) is None
            or tracked.pool is None
            or not tracked.pool.is_open
        ]

    def overwrite_shared(self) -> None:
        """Do to the memory of the pool's other graphs what a replay of this one does on CUDA."""
        self.pool.replayed(self._number)

    def forget(self) -> None:
        """Free all memory."""
        self.pool.leave(self)
        self.device.captured_references.subtract(self._references)
        self._references.clear()
        self._inputs.clear()
        self.launches.clear()
        self.arithmetic.clear()
        self._allocated.clear()

    def refuse(self, what: str) -> NoReturn:
        """Raise CUDA's error. The capture has failed, even if the work catches it."""
        if self._problem is None:
            self._problem = RuntimeError(
                f"operation not permitted when stream is capturing: {what}"
            )
        raise self._problem

    # --- streams ----------------------------------------------------------------------------------

    def mark(self, stream: FakeStream) -> Mark:
        return Mark(self, stream, self._counts[stream], dict(self.branches.clock(stream)))

    def wait(self, stream: FakeStream, mark: Mark) -> None:
        """Let a stream wait for a captured one. It joins the capture, and a captured stream must
        wait for it before the capture ends."""
        if stream not in self._counts:
            if stream is self.device.default_stream:
                self.refuse("the default stream would depend on a capturing stream")
            self._add_stream(stream)
        self.branches.wait(stream, mark.clock)
        if self._counts[mark.stream] == mark.count:
            self._unjoined.discard(mark.stream)
        if stream is not self.origin:
            self._unjoined.add(stream)

    def _add_stream(self, stream: FakeStream) -> None:
        self._counts[stream] = 0
        stream.tape = self

    # --- what is recorded -------------------------------------------------------------------------

    def launched(self, stream: FakeStream, launch: Launch) -> None:
        """Record an operation for the checker and the clock, which see it at each replay."""
        self._counts[stream] += 1
        if stream is not self.origin:
            self._unjoined.add(stream)
        self.branches.launched(stream, launch)
        if launch.reads or launch.writes or launch.cost_ns:
            with unobserved():
                kept = launch.on(self._detached(launch.reads), self._detached(launch.writes))
                self.launches.append(kept)
                for tensor in (*kept.reads, *kept.writes):
                    key = storage_key(tensor)
                    if key not in self._allocated and self.device.checker.storage_of(tensor):
                        self._inputs.setdefault(key, (tensor, kept))

    def allocated(self, memory: Sequence[torch.Tensor]) -> None:
        """Take the memory of new tensors as the graph's."""
        with unobserved():
            for tensor in memory:
                key = storage_key(tensor)
                if key not in self._allocated:
                    self.pool.allocated(self._number, tensor)
                    self._allocated[key] = self._kept(bytes_of(tensor))

    def save_before_write(self, written: Sequence[torch.Tensor]) -> None:
        """Keep a copy of tensors that are about to be written."""
        with unobserved():
            for tensor in written:
                key = storage_key(tensor)
                if key not in self._allocated and key not in self._before:
                    memory = self._kept(bytes_of(tensor))
                    self._before[key] = memory, memory.clone()

    def before_operation(self, operation: Operation, written: Sequence[torch.Tensor]) -> None:
        for value in (*operation.args, *operation.kwargs.values()):
            if not isinstance(value, torch.Generator) or value is torch.default_generator:
                continue
            # The dispatcher may hand another object for the same generator.
            known = {one._cdata for one in self.generators}  # type: ignore[attr-defined]
            if value._cdata not in known:  # type: ignore[attr-defined]
                self.refuse("random numbers from a generator of the step's own")
        self.save_before_write(written)

    def after_operation(
        self, operation: Operation, result: Any, fresh: Sequence[torch.Tensor]
    ) -> None:
        """Record an operation's arithmetic. Host scalars keep the value they have now."""
        keys = {storage_key(tensor) for tensor in fresh}
        trains = torch.is_grad_enabled()
        with unobserved():
            outputs = [
                (position, self._kept(tensor.data))
                for position, tensor in enumerate(tensors(result))
                if storage_key(tensor) in keys
            ]
            args, kwargs = (
                self._detached(part, bake=True) for part in (operation.args, operation.kwargs)
            )
            self.arithmetic.append(_Arithmetic(operation.func, args, kwargs, outputs, trains))

    def copied(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Record a copy. From pinned memory, a replay copies what is there at that time."""
        with unobserved():
            pair = self._detached((into, source))
            self.arithmetic.append(_Arithmetic(_COPY, pair, {}))

    def _detached(self, value: Any, *, bake: bool = False) -> Any:
        """The same memory without autograd's history and version counter. Ordinary host memory, and
        with `bake` all host memory, is copied as it is now."""
        if isinstance(value, torch.Tensor):
            fixed = not self.device.holds(value) and (bake or not self.device.is_pinned(value))
            return value.detach().clone() if fixed else self._kept(value.data)
        if isinstance(value, (tuple, list)):
            return type(value)(self._detached(part, bake=bake) for part in value)
        if isinstance(value, dict):
            return {name: self._detached(part, bake=bake) for name, part in value.items()}
        return value


class FakeGraph(Graph):
    def __init__(self, tape: Tape) -> None:
        self._tape: Tape | None = tape

    def replay(self) -> None:
        tape = self._tape
        if tape is None:
            raise ClosedError("a graph was replayed after its close()")
        refuse(tape.device, "the replay of a graph")
        for tensor, launch in tape.freed_inputs():
            tape.device.replays_freed(tensor, launch)
        with unobserved():
            with tape.device.drawing():
                for step in tape.arithmetic:
                    step.run()
            tape.overwrite_shared()
        shared = [tape.pool.memory]
        if tape.draws:
            shared.append(tape.device.graph_random_state.memory)
        tape.device.replay(tape.launches, shared)

    def close(self) -> None:
        if self._tape is not None:
            self._tape.forget()
        self._tape = None


# --- for the device -------------------------------------------------------------------------------


def capture(
    device: FakeDevice, work: Callable[[], Result], pool: object, stream: FakeStream
) -> tuple[Graph, Result]:
    if not isinstance(pool, GraphPool) or pool.device is not device:
        raise DeviceMismatchError(f"capture on {device} expects a pool from its graph_pool()")
    if not device.watches_this_thread():
        raise DeviceError(f"{device} captures only inside its `with device:` block")
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
    draws = noting_host_draws(found, with_torch=device.draws_apart)
    with draws, device.call.changed(obstacles=found):
        yield found


def refuse(device: FakeDevice, what: str, stream: FakeStream | None = None) -> None:
    """Raise if this thread is capturing, or `stream` is captured: `what` makes the host wait for or
    query the device, which a capture forbids."""
    tape = device.call.tape or (None if stream is None else stream.tape)
    if tape is not None:
        tape.refuse(what)


def wait(stream: FakeStream, mark: Mark | None) -> bool:
    """Handle a stream's wait for a captured position; None: for work outside any capture. Returns
    whether the wait was recorded in a capture, so that it orders nothing now."""
    if mark is None:
        if stream.tape is not None:
            stream.tape.refuse("a dependency on work outside the capture")
        return False
    if mark.tape.over or stream.tape not in (None, mark.tape):
        raise RuntimeError("operation not permitted on an event last recorded in another capture")
    mark.tape.wait(stream, mark)
    return True


# --- what PyTorch asks the real device ------------------------------------------------------------

_IS_CAPTURING = "_cuda_isCurrentStreamCapturing"
_HEALTH_CHECK = next(
    name
    for name in (
        "_accelerator_graph_capture_health_check",
        "_cuda_graph_capture_health_check",  # before PyTorch 2.10
    )
    if hasattr(torch.optim.Optimizer, name)
)


def _health_check(optimizer: torch.optim.Optimizer) -> None:
    """Replaces PyTorch's own check, which asks the real device whether it is capturing."""
    for device in patches.devices:
        if device.current_stream().tape is None:
            continue
        if not all(group.get("capturable") for group in optimizer.param_groups):
            raise RuntimeError(
                "Attempting CUDA graph capture of step() for an instance of "
                f"{type(optimizer).__name__} but param_groups' capturable is False."
            )


def _is_capturing() -> bool:
    """Replaces what `torch.cuda.is_current_stream_capturing` calls."""
    for device in patches.devices:
        query = device.call.capture_query
        if query is not None and query.in_captures:
            return query.ask()
        if device.current_stream().tape is not None:
            return True
        if query is not None and query.ask():
            return True
    return cuda_namespace().is_available() and bool(patches.originals[_IS_CAPTURING]())


def _capturable_devices(supports_xla: bool = True) -> list[str]:
    """PyTorch's list, with "cpu" added: that is what C++ takes the fake's tensors for. It calls
    nothing, since importing torch.distributed.optim compiles it with TorchScript."""
    devices = ["cpu", "cuda", "xpu", "hpu"]
    if supports_xla:
        devices.append("xla")
    return devices


def _not_captured(name: str) -> Callable[..., Any]:
    """Replaces a function that sets the device's random generator, as checkpointing does. A capture
    refuses it, because a replay would not repeat it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        for device in patches.devices:
            refuse(device, f"torch.{name}()")
        return patches.originals[name](*args, **kwargs)

    return run


def replacements() -> Iterator[Replacement]:
    for name in ("manual_seed", "set_rng_state"):
        yield Replacement(torch.random, name, _not_captured(name))
    yield Replacement(cuda_namespace().graphs, _IS_CAPTURING, _is_capturing)
    yield Replacement(torch.optim.Optimizer, _HEALTH_CHECK, _health_check)
    optimizer = importlib.import_module("torch.optim.optimizer")  # torch.optim hides the name
    yield Replacement(optimizer, "_get_capturable_supported_devices", _capturable_devices)
