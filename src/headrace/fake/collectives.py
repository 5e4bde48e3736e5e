"""Collectives as PyTorch runs them on NCCL.

A call without `async_op` is a kernel on the current stream. With it, the collective runs on a
stream of the process group, which waits for the stream that is current at the call, and the process
group keeps the tensors until `work.wait()`. That makes the stream that is current then wait for the
collective, and the host goes on.

The transport (gloo, or PyTorch's fake process group) does the arithmetic at once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from headrace.fake import autograd, data_parallel, patches
from headrace.fake.collective_schema import ends, reads_and_writes, stream_name
from headrace.fake.patches import Replacement
from headrace.races.operators import Operation, tensors
from headrace.races.storages import storage_key

if TYPE_CHECKING:
    from headrace.fake.device import FakeDevice
    from headrace.fake.streams import FakeEvent, FakeStream

_WRAPS = "_wrap_tensor_autograd"
_WAIT = "_c10d_functional::wait_tensor"


class _LaunchedHere(threading.local):
    """The collectives that the Python call in this thread has launched, and their tensors; None
    outside of one: then C++ launches them, as DDP's reducer does, and waits for them unseen."""

    launched: list[FakeEvent] | None = None
    kept: list[_Kept] | None = None


class _Kept:
    """The tensors of a collective that is under way. Without a wait, the process group drops them
    when the collective is done."""

    def __init__(self, stream: FakeStream, tensors: list[torch.Tensor]) -> None:
        self._stream, self._tensors = stream, tensors

    def release(self) -> None:
        self._tensors = []

    def __del__(self) -> None:
        for tensor in self._tensors:
            self._stream.device.record_stream(tensor, self._stream)


_calls = _LaunchedHere()
#: What each `Work` keeps.
_kept: weakref.WeakKeyDictionary[Any, list[_Kept]] = weakref.WeakKeyDictionary()
_barriers: weakref.WeakSet[Any] = weakref.WeakSet()
#: Results of functional collectives, by their memory, until `wait_tensor`.
_unwaited: dict[int, FakeEvent] = {}


def run(device: FakeDevice, operation: Operation) -> Any:
    """Run a collective whose tensors lie on the device."""
    if operation.name.endswith(_WRAPS):
        return operation.run()
    if operation.name == _WAIT:
        result = operation.run()
        event = _unwaited.pop(storage_key(operation.args[0]), None)
        if event is not None:
            device.current_stream().wait_event(event)
        return result
    reads, writes = reads_and_writes(operation)
    current = device.current_stream()
    if current.tape is not None:
        current.tape.before_operation(operation, writes)
    result = operation.run()
    fresh = []
    if operation.name.startswith("_c10d_functional"):
        known = {storage_key(tensor) for tensor in operation.inputs()}
        fresh = [tensor for tensor in tensors(result) if storage_key(tensor) not in known]
        writes = [*writes, *fresh]
    device.learn_of_making(operation.inputs())
    is_current = _calls.launched is not None and operation.named("async_op") is False
    stream = current if is_current else device.stream(stream_name(operation))
    if fresh:
        device.operation(current, operation.name, "kernel", allocates=fresh, cost_ns=0)
    if not is_current:
        stream.wait_stream(current)
    held = [tensor for tensor in (*reads, *writes) if device.holds(tensor)]
    device.operation(stream, operation.name, "kernel", reads=reads, writes=writes)
    if _calls.kept is not None and not fresh:
        _calls.kept += [] if is_current else [_Kept(stream, held)]
    else:
        for tensor in held:
            device.record_stream(tensor, stream)
    if current.tape is not None:
        current.tape.after_operation(operation, result, fresh)
    event = device.event()
    event.record(stream)
    if fresh:
        _unwaited.update((storage_key(tensor), event) for tensor in fresh)
    elif _calls.launched is not None:
        _calls.launched.append(event)
    elif not autograd.wait_at_the_end(device, event):
        current.wait_event(event)
    return result


# --- what Python calls ----------------------------------------------------------------------------


def _launching(kind: Any, name: str) -> Callable[..., Any]:
    """Replaces a method of `ProcessGroup`: its `Work` ends when what it launches ends."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        outside = _calls.launched, _calls.kept
        _calls.launched, _calls.kept = [], []
        try:
            work = patches.original(kind, name)(self, *args, **kwargs)
            if work is not None:
                ends[work], _kept[work] = _calls.launched, _calls.kept
                if name == "barrier":
                    _barriers.add(work)
        finally:
            _calls.launched, _calls.kept = outside
        return work

    return call


def _wait(kind: Any, name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Gloo may do the rest of its arithmetic here, unlike NCCL; a callback is the user's.
        hidden = nullcontext() if "Callback" in kind.__name__ else torch._C._DisableTorchDispatch()
        with hidden:
            result = patches.original(kind, name)(self, *args, **kwargs)
        for event in ends.get(self, ()):
            current = event.device.current_stream()
            current.wait_event(event)
            if issubclass(kind, torch._C.Future):
                _keep_for(current, result)
        for kept in _kept.get(self, ()):
            kept.release()
        if self in _barriers:
            for device in patches.devices:
                device.hidden_wait(device.current_stream(), "barrier")
        return result

    return call


def _is_completed(kind: Any, name: str) -> Callable[..., Any]:
    def call(self: Any) -> Any:
        found = ends.get(self)
        if not found:
            return patches.original(kind, name)(self)
        if not all(event.query() for event in found):
            return False
        patches.original(type(self), "wait")(self)  # it may be slower than the virtual clock
        return True

    return call


def _get_future(kind: Any, name: str) -> Callable[..., Any]:
    def call(self: Any) -> Any:
        future = patches.original(kind, name)(self)
        ends[future] = ends.get(self, [])
        return future

    return call


def _then(kind: Any, name: str) -> Callable[..., Any]:
    """As on CUDA, the callback runs on a stream of its own, after what the future stands for."""

    def call(self: Any, callback: Callable[[Any], Any]) -> Any:
        before, after = ends.get(self, []), list[Any]()
        # Else the callback might run later, in a thread of the transport that nobody watches.
        value = patches.original(kind, "wait")(self) if before else None

        def watched(future: Any) -> Any:
            if not before:
                return callback(future)
            device = before[0].device
            stream = device.stream("future callback")
            for event in before:
                stream.wait_event(event)
            _keep_for(stream, value)
            with device.use(stream):
                result = callback(future)
            end = device.event()
            end.record(stream)
            after.append(end)
            return result

        chained = patches.original(kind, name)(self, watched)
        ends[chained] = after
        return chained

    return call


def _keep_for(stream: FakeStream, value: Any) -> None:
    """As a future on CUDA does, keep its value's memory until the stream that uses it is done."""
    for tensor in tensors(value):
        if stream.device.holds(tensor):
            stream.device.record_stream(tensor, stream)


def _returns_work(method: Any) -> bool:
    """Whether a method of `ProcessGroup` launches something, by the signature in its docstring."""
    return "Work" in (getattr(method, "__doc__", None) or "").partition("->")[2]


def replacements() -> Iterator[Replacement]:
    if not torch.distributed.is_available():
        return
    group, base = torch.distributed.ProcessGroup, torch.distributed.Work
    for name, method in list(vars(group).items()):
        if _returns_work(method):
            yield Replacement(group, name, _launching(group, name))
    works = [kind for kind in (base, *base.__subclasses__()) if "wait" in vars(kind)]
    for kind, name, wrapper in (
        *((kind, "wait", _wait) for kind in works),
        (base, "synchronize", _wait),
        (base, "is_completed", _is_completed),
        (base, "get_future", _get_future),
        (torch._C.Future, "wait", _wait),
        (torch._C.Future, "then", _then),
    ):
        yield Replacement(kind, name, wrapper(kind, name))
    yield from data_parallel.replacements()
