"""Backward on the fake device: each node on its forward's stream, as PyTorch's engine does it.

On an accelerator the engine

- runs a backward operation on the stream of its forward operation, whichever stream was current
  when `backward()` was called;
- makes each node's stream wait for the streams of the nodes that feed it;
- adds up gradients that meet, on the stream of the node where they meet;
- makes the caller's stream wait for all of these streams at the end, and then runs the callbacks
  that were queued, on the caller's stream.

Here the CPU engine does the arithmetic, and hooks on each node report when it begins and ends.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable

from headrace.fake import graphs, patches
from headrace.fake.patches import Replacement
from headrace.fake.tape_entries import Mark
from headrace.races.actors import Clock, join
from headrace.races.frames import calling_site
from headrace.races.operators import tensors
from headrace.races.storages import storage_key
from headrace.source_lines import Site

if TYPE_CHECKING:
    from headrace.fake.device import FakeDevice
    from headrace.fake.streams import FakeEvent, FakeStream

_KEY = "headrace.forward"
_ENGINE = "_execution_engine"
_SUMS = ("add", "add_")
_numbers = itertools.count()
# Whether a captured backward runs nodes of other streams on the captured stream.
_override_stale_streams: Callable[[], bool] = getattr(
    torch._C, "_override_stale_capture_stream", bool
)


@dataclass(frozen=True, slots=True)
class _MadeBy:
    """The forward operation that made a node, as stored in the node's metadata."""

    number: int
    device: FakeDevice
    #: None if the result lies on the host: the backward then runs on the caller's stream.
    stream: FakeStream | None
    site: Site


@dataclass(slots=True)
class _Arrival:
    """A gradient that has arrived at a node: the clock of the streams that made it, and when they
    ended."""

    clock: Clock = field(default_factory=dict)
    time_ns: int = 0
    #: The positions of those streams, if they are being captured.
    marks: list[Mark] = field(default_factory=list)

    def add(self, stream: FakeStream) -> _Arrival:
        """Count all work that is on `stream` now among what made the gradient."""
        mark = stream.mark()
        if mark is not None:
            self.marks.append(mark)
        join(self.clock, stream.actor.clock)
        self.time_ns = max(self.time_ns, stream.actor.time_ns)
        return self


@dataclass(slots=True)
class _BackwardRun:
    """One run of the engine, from the call to its end."""

    callers: dict[FakeDevice, FakeStream]
    #: For nodes that have not begun: by the node's number and the gradient's position.
    arrivals: dict[int, dict[int, _Arrival]] = field(default_factory=dict)
    streams: set[FakeStream] = field(default_factory=set)
    begun: _MadeBy | None = None
    #: Sums that the engine does after a node has ended: the memory of the gradient that arrived
    #: second, the node where it meets the first, and the position there.
    sums: list[tuple[int, _MadeBy, int]] = field(default_factory=list)
    #: The node whose incoming gradients are being summed.
    summing_for: _MadeBy | None = None
    #: Ends of collectives that C++ has launched: the caller's stream waits for them at the end.
    ends: list[FakeEvent] = field(default_factory=list)
    finished: bool = False

    def stream_of(self, forward: _MadeBy) -> FakeStream:
        caller = self.callers[forward.device]
        if forward.stream is None or (caller.tape is not None and _override_stale_streams()):
            return caller
        return forward.stream


class _Runs(threading.local):
    """The engine's runs in this thread, the innermost last: a node may call `backward()` too."""

    def __init__(self) -> None:
        self.stack: list[_BackwardRun] = []


_runs = _Runs()


def tag(outputs: Sequence[torch.Tensor], stream: FakeStream, site: Site) -> None:
    """Store `stream` and `site` in all nodes that the operation behind these outputs made."""
    todo = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while todo:
        node: Any = todo.pop()
        if _KEY not in node.metadata:
            tag_node(node, stream.device, stream, site)
            todo += [feeding for feeding, _ in node.next_functions if feeding is not None]


def tag_node(node: Any, device: FakeDevice, stream: FakeStream | None, site: Site) -> None:
    """Store one node's forward operation. `tag` stops at nodes that have one."""
    node.metadata[_KEY] = _MadeBy(next(_numbers), device, stream, site)
    node.register_prehook(_begins)
    node.register_hook(_ends)


# --- for the modes and the device -----------------------------------------------------------------


def stream_in_run(device: FakeDevice) -> FakeStream | None:
    """The stream that the engine's work goes to while it runs, unless a hook chooses another."""
    if not _runs.stack:
        return None
    run, forward = _runs.stack[-1], _running()
    if forward is None or forward.device is not device:
        return run.callers.get(device)
    # A tensor's hook runs before the node's own first hook: begin the node for it.
    _begin(run, forward)
    return run.stream_of(forward)


def callers_stream(device: FakeDevice) -> FakeStream | None:
    """The stream that was current at the running call of `backward()`; None outside of one."""
    return _runs.stack[-1].callers.get(device) if _runs.stack else None


def forward_site() -> Site | None:
    """The line of the forward operation whose backward is running, if one is."""
    forward = _running()
    return None if forward is None else forward.site


def in_node() -> bool:
    """Whether a node that belongs to a fake device is running."""
    return _running() is not None


def wait_at_the_end(device: FakeDevice, event: FakeEvent) -> bool:
    """Make the caller's stream wait for `event` when the engine's run ends, as DDP's reducer does.
    Returns False outside of a run."""
    if not _runs.stack or device not in _runs.stack[-1].callers:
        return False
    _runs.stack[-1].ends.append(event)
    return True


def notice(operation: str, inputs: Sequence[torch.Tensor]) -> None:
    """Notice if an operation is the engine's own sum of two gradients. The sum belongs to the node
    where they meet, not to the node that has just ended."""
    if not _runs.stack:
        return
    run = _runs.stack[-1]
    run.summing_for = None
    if not run.sums or operation not in _SUMS:
        return
    keys = {storage_key(tensor) for tensor in inputs}
    for index, (key, consumer, position) in enumerate(run.sums):
        if key in keys:
            del run.sums[index]
            run.summing_for = consumer
            _join(run.stream_of(consumer), run.arrivals[consumer.number][position])
            _record_stream(inputs, run.stream_of(consumer))
            return


# --- the engine -----------------------------------------------------------------------------------


def _running() -> _MadeBy | None:
    if _runs.stack and _runs.stack[-1].summing_for is not None:
        return _runs.stack[-1].summing_for
    node: Any = torch._C._current_autograd_node()
    return None if node is None else node.metadata.get(_KEY)


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    """Replaces PyTorch's entry into the engine."""
    run = _BackwardRun({device: device.current_stream() for device in patches.devices})
    with ExitStack() as afterwards:
        for device in run.callers:
            afterwards.enter_context(device.autograd_runs())
        _runs.stack.append(run)
        afterwards.callback(_runs.stack.pop)
        return patches.originals["_engine_run_backward"](*args, **kwargs)


def _begin(run: _BackwardRun, forward: _MadeBy) -> None:
    if run.begun is forward or run.summing_for is not None:
        return
    if run.begun is None:
        patches.originals[_ENGINE].queue_callback(lambda: _finish(run))
    run.begun = forward
    run.sums = []
    stream = run.stream_of(forward)
    forward.device.choose(None)  # a stream that the last node's hooks chose ended with that node
    arrivals = run.arrivals.pop(forward.number, {})
    if not arrivals:
        # A root: its gradient comes from the caller's stream.
        arrivals = {0: _Arrival().add(run.callers[forward.device])}
    for arrival in arrivals.values():
        _join(stream, arrival)
    run.streams.add(stream)


def _join(stream: FakeStream, arrival: _Arrival) -> None:
    if stream.tape is not None or arrival.marks:
        marks: Sequence[Mark | None] = arrival.marks or [None]
        for mark in marks:
            graphs.wait(stream, mark)
        return
    with stream.device.lock:
        stream.joins(arrival.clock, arrival.time_ns)


def _record_stream(gradients: Sequence[torch.Tensor | None], stream: FakeStream) -> None:
    """As the engine does, keep a gradient's memory until the stream that uses it is done."""
    with torch._C.DisableTorchFunction():
        for gradient in gradients:
            tracked = None if gradient is None else stream.device.checker.storage_of(gradient)
            if tracked is not None:
                tracked.recorded_streams.add(stream.state.number)


def _begins(gradients: Sequence[torch.Tensor | None]) -> None:
    if not _runs.stack:
        return  # after the block, or the engine was entered in a way that is not watched
    run = _runs.stack[-1]
    run.summing_for = None
    forward = _running()
    assert forward is not None
    _begin(run, forward)
    _record_stream(gradients, run.stream_of(forward))


def _ends(made: Sequence[torch.Tensor | None], gradients: object) -> None:
    if not _runs.stack:
        return
    run, forward = _runs.stack[-1], _running()
    assert forward is not None
    node: Any = torch._C._current_autograd_node()
    stream = run.stream_of(forward)
    for (fed, position), gradient in zip(node.next_functions, made, strict=True):
        below = None if fed is None else fed.metadata.get(_KEY)
        if below is None or gradient is None:
            continue
        arrivals = run.arrivals.setdefault(below.number, {})
        if position in arrivals:
            run.sums.append((storage_key(gradient), below, position))
        arrivals.setdefault(position, _Arrival()).add(stream)


def _finish(run: _BackwardRun) -> None:
    """The engine's end: the caller's stream waits for every stream that was used."""
    if run.finished:
        return
    run.finished = True
    for device in run.callers:
        device.choose(None)  # a stream that the last node's hooks chose ended with that node
    for stream in run.streams:
        _join(run.callers[stream.device], _Arrival().add(stream))
    for event in run.ends:
        run.callers[event.device].wait_event(event)


class _Engine:
    """Replaces the engine, for the callbacks that hooks queue: they run after the end."""

    def queue_callback(self, callback: Callable[[], object]) -> None:
        run = _runs.stack[-1] if _runs.stack else None

        def call() -> None:
            if run is not None:
                _finish(run)
            callback()

        patches.originals[_ENGINE].queue_callback(call)

    def __getattr__(self, name: str) -> Any:
        return getattr(patches.originals[_ENGINE], name)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `torch.autograd.Function.apply`, which the function mode does not see."""
    result = patches.originals["apply"].__func__(cls, *args, **kwargs)
    if torch.is_grad_enabled():
        for device in patches.devices:
            here = [tensor for tensor in tensors(result) if device.holds(tensor)]
            if here:
                tag(here, device.current_stream(), calling_site())
    return result


def _saved_tensors_hooks(self: Any, pack_hook: Any, unpack_hook: Any) -> None:
    """Replaces `saved_tensors_hooks.__init__`; activation checkpointing uses it, too."""
    patches.originals["__init__"](self, _watched(pack_hook), _watched(unpack_hook))


def _watched(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The hook with the function mode on: PyTorch calls hooks in the middle of an operation, with
    the mode off."""

    def run(value: Any) -> Any:
        with ExitStack() as afterwards:
            for device in patches.devices:
                afterwards.enter_context(device.user_callback())
            return hook(value)

    return run


def replacements() -> Iterator[Replacement]:
    yield Replacement(torch.autograd, "_engine_run_backward", _run_backward)
    yield Replacement(Variable, _ENGINE, _Engine())
    yield Replacement(torch.autograd.graph.saved_tensors_hooks, "__init__", _saved_tensors_hooks)
    yield Replacement(torch.autograd.Function, "apply", classmethod(_apply))
