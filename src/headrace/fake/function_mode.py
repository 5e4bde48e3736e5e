"""The mode above autograd: it sees calls as the user wrote them.

It makes `device=`, `.to()`, `.cpu()` and pinning work for a device that PyTorch does not
know, and stores in each new autograd node the stream it was made on.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from headrace.device import host_copy
from headrace.fake import autograd, numpy_views, patches
from headrace.fake.patches import Replacement
from headrace.races.operators import dispatches_itself, tensors
from headrace.races.race import calling_site
from headrace.source_lines import HEADRACE, TORCH

if TYPE_CHECKING:
    from headrace.device import CaptureQuery, Obstacle
    from headrace.fake.device import FakeDevice
    from headrace.fake.graphs import Tape

_DEVICE: Any = torch._C.TensorBase.device
#: Properties that start no operation and make no autograd node: nothing to follow.
_PLAIN_PROPERTIES = frozenset(
    getattr(torch.Tensor, name)
    for name in ("shape", "dtype", "ndim", "grad", "requires_grad", "is_leaf", "layout", "grad_fn")
) | {_DEVICE}
#: Functions that may return a tensor of an array's own memory.
_SHARING = frozenset(("as_tensor", "asarray"))
_OWN_FRAMES = (
    str(HEADRACE / "fake") + os.sep,
    str(HEADRACE / "races") + os.sep,
    str(TORCH / "overrides.py"),
)
_SAVE = torch.serialization._save.__code__
_SHALLOW_COPY = copy.copy.__code__  # of a tensor, it shares the storage
#: Groups the tensors of an optimizer by device and dtype.
_GROUPING = "_group_tensors_by_device_and_dtype"


class ModeCall(threading.local):
    """What the dispatch mode needs to know about the call that the function mode is running."""

    #: Where `device=` asks for the result: "device" or "host".
    named: str | None = None
    #: "device" in a call on device tensors, "host" in any other call, None outside of calls.
    inside: str | None = None
    #: "to device" or "to host" while a tensor is moved; `non_blocking` as in `.to()`.
    moving: str | None = None
    non_blocking = False
    #: True while `x[i] = 1.0` runs: PyTorch makes a tensor of the number and copies it.
    storing_number = False
    #: True while PyTorch may check values that it checks on the CPU only: the host does not wait.
    checking_values = False
    #: The capture that this thread is making, and the obstacles that `device.watch()` collects.
    tape: Tape | None = None
    obstacles: list[Obstacle] | None = None
    #: Answers code of this thread that asks whether its work is being captured.
    capture_query: CaptureQuery | None = None

    @contextmanager
    def changed(self, **changes: Any) -> Iterator[None]:
        """Change some fields inside the block."""
        before = {name: getattr(self, name) for name in changes}
        vars(self).update(changes)
        try:
            yield
        finally:
            vars(self).update(before)


class FunctionMode(TorchFunctionMode):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    @classmethod
    def is_on(cls, device: FakeDevice) -> bool:
        """Whether this thread's mode is on. PyTorch turns it off inside each call."""
        modes = _get_current_function_mode_stack()
        return any(isinstance(mode, cls) and mode._device is device for mode in modes)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        device, name = self._device, getattr(func, "__name__", "")
        if name == "_parse_to":
            return func(*args, **kwargs)  # `Module.to` asks what its arguments mean
        if func is torch.unravel_index:  # it makes tensors on the device that it asks for
            with self:
                return torch.functional._unravel_index(*args, **kwargs).unbind(-1)
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if tensor is not None:
            if name == "__get__":
                read = getattr(func, "__self__", None)
                if read in _PLAIN_PROPERTIES:
                    return func(*args)
            special = _TENSOR_METHODS.get(name)
            if special is not None:
                return special(device, func, tensor, args, kwargs)
        elif name in _SHARING:
            return _as_tensor(device, func, args, kwargs)
        elif name == "tensor":
            _note_numbers(device, args[:1])
        if kwargs.pop("pin_memory", False):
            return _pinned(device, _call(device, func, args, kwargs))
        return _call(device, func, args, kwargs)


def _call(device: FakeDevice, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run `func`, as device work if it names the device or takes tensors that lie on it."""
    call, target = device.call, kwargs.get("device")
    named = None
    if target is not None:
        named = "device" if device.is_named_by(target) else "host"
    if named == "device":
        kwargs = {**kwargs, "device": "cpu"}
    inside = named or call.inside
    if inside != "device" and named is None:
        inside = "device" if _any_held(device, (args, kwargs)) else "host"
    outside = call.named, call.inside
    call.named, call.inside = named, inside
    try:
        result = func(*args, **kwargs)
    finally:
        call.named, call.inside = outside
    if named == "device" and isinstance(result, torch.Tensor) and not device.holds(result):
        # torch.tensor(numbers, device=…): PyTorch makes it on the host, unseen, and copies it.
        return _move(device, result, "to device", False, {"dtype": result.dtype})
    if inside == "device" and torch.is_grad_enabled():
        autograd.tag(tensors(result), device.current_stream(), calling_site())
    return result


def _any_held(device: FakeDevice, values: Any) -> bool:
    """Whether a tensor in nested arguments lies on the device."""
    with torch._C.DisableTorchFunction():
        return bool(device.checker.held(tensors(values)))


# --- moving ---------------------------------------------------------------------------------------


def _to(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    target, dtype, non_blocking, memory_format = _parse_to(device, args[1:], kwargs)
    if len(patches.devices) > 1 and any(
        other.is_named_by(target) for other in patches.devices if other is not device
    ):
        return func(*args, **kwargs)  # another fake device's mode moves it there
    copied = bool(kwargs.get("copy", False))
    here, there = device.holds(tensor), device.is_named_by(target)
    if target is not None and target.type == "meta":
        return func(*args, **kwargs)  # there is nothing to copy
    if target is not None and tensor.is_meta:
        return tensor.cpu()  # PyTorch says that it has no data
    if target is None:
        there = here
    if target is None and not copied and memory_format is None:
        return _call(device, torch.Tensor.to, (tensor, dtype or tensor.dtype), {})
    options = {"dtype": dtype or tensor.dtype}
    if memory_format is not None:
        options["memory_format"] = memory_format
    if here == there:
        return _call(device, torch.Tensor.to, (tensor,), {**options, "copy": copied})
    return _move(device, tensor, "to device" if there else "to host", non_blocking, options)


def _cpu(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    if not device.holds(tensor):
        return func(*args, **kwargs)
    return _move(device, tensor, "to host", False, {"dtype": tensor.dtype})


def _move(
    device: FakeDevice, tensor: torch.Tensor, way: str, non_blocking: bool, options: dict[str, Any]
) -> Any:
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return _copy_over(device, tensor, way, non_blocking, options)
    apply = patches.originals["apply"].__func__
    moved = apply(_Moved, tensor, device, way, non_blocking, options)
    if moved.grad_fn is not None:
        # Tag this node only: the nodes before it belong to the other side.
        stream = device.current_stream() if way == "to device" else None
        autograd.tag_node(moved.grad_fn, device, stream, calling_site())
    return moved


class _Moved(torch.autograd.Function):
    """A copy between host and device whose gradient goes the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        device: FakeDevice,
        way: str,
        non_blocking: bool,
        options: dict[str, Any],
    ) -> torch.Tensor:
        ctx.device, ctx.dtype = device, tensor.dtype
        ctx.back = "to host" if way == "to device" else "to device"
        return _copy_over(device, tensor, way, non_blocking, options)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        back = _move(ctx.device, gradient, ctx.back, False, {"dtype": ctx.dtype})
        return back, None, None, None, None


def _copy_over(
    device: FakeDevice, tensor: torch.Tensor, way: str, non_blocking: bool, options: dict[str, Any]
) -> torch.Tensor:
    moving = device.call.changed(moving=way, non_blocking=non_blocking)
    with moving, torch._C.DisableTorchFunction():
        return tensor.to(**options, copy=True)


# --- pinned memory --------------------------------------------------------------------------------


def _pinned(device: FakeDevice, tensor: torch.Tensor) -> torch.Tensor:
    if device.holds(tensor):
        raise RuntimeError(f"cannot pin a tensor on {device}; only host memory can be pinned")
    device.mark_pinned(tensor)
    return tensor


def _pin_memory(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    if device.is_pinned(tensor):
        return tensor
    with torch.no_grad():
        return _pinned(device, tensor if device.holds(tensor) else tensor.detach().clone())


def _is_pinned(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    return device.is_pinned(tensor)


# --- calls that the dispatch mode does not see ----------------------------------------------------


def _read(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """`tolist()`, `print(tensor)` and such."""
    if func.__name__ == "__format__" and tensor.dim() == 0:
        return func(*args, **kwargs)  # it calls `item()`, which is seen
    _note_read(device, tensor, func.__name__.strip("_"))
    return func(*args, **kwargs)


def _pickle(tensor: torch.Tensor, protocol: int) -> Any:
    """Replaces the method that `torch.save` calls for each tensor."""
    is_read = not _is_inside(_SHALLOW_COPY) and not _storage_is_copied(tensor)
    for device in patches.devices if is_read else ():
        _note_read(device, tensor, "pickle")
    return patches.originals["_reduce_ex_internal"](tensor, protocol)


def _storage_is_copied(tensor: torch.Tensor) -> bool:
    """Whether `torch.save` copies the tensor's storage to the host afterwards, which is seen. It
    does if the storage says that it lies elsewhere."""
    return tensor.untyped_storage().device.type != "cpu" and _is_inside(_SAVE)


def _is_inside(code: CodeType) -> bool:
    """Whether a function is running in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _note_read(device: FakeDevice, tensor: torch.Tensor, name: str) -> None:
    if device.holds(tensor):
        stream = device.current_stream()
        device.operation(stream, "copy d2h", "copy", reads=tensors(tensor))
        device.hidden_wait(stream, name)
    else:
        device.operation(None, name, "host", reads=tensors(tensor))


def _numpy(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    if device.holds(tensor) and func.__name__ == "numpy" and (kwargs.get("force") or args[1:]):
        return _cpu(device, func, tensor.detach(), (), {}).numpy()
    if device.holds(tensor):
        raise TypeError(
            f"can't convert {device} device type tensor to numpy. Use Tensor.cpu() to copy the "
            "tensor to host memory first."
        )
    if func.__name__ == "numpy" and device.is_pinned(tensor):
        return numpy_views.watch(device, tensor, func(*args, **kwargs))
    device.operation(None, "numpy", "host", reads=[tensor])
    return func(*args, **kwargs)


def _resize_storage(storage: torch.UntypedStorage, nbytes: int) -> Any:
    """Replaces `UntypedStorage.resize_`: 0 frees the memory, and to grow is to allocate."""
    result = patches.originals["resize_"](storage, nbytes)
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        tensor = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    for device in patches.devices:
        device.resized(tensor)
    return result


def _sharing(name: str) -> Callable[..., Any]:
    """Replaces a function that makes a tensor of memory it is handed, which may be watched."""

    def make(*args: Any, **kwargs: Any) -> Any:
        result = patches.originals[name](*args, **kwargs)
        for device in patches.devices:
            device.shares(result)
        return result

    return make


def _note_numbers(device: FakeDevice, data: Any) -> None:
    """`torch.tensor([loss, …])` reads each tensor in a list, unseen by the dispatch mode."""
    for value in data:
        if isinstance(value, list | tuple):
            with torch._C.DisableTorchFunction():
                found = device.checker.held(tensors(value))
            for tensor in found:
                _note_read(device, tensor, "aten::_local_scalar_dense")


def _as_tensor(device: FakeDevice, func: Any, args: Any, kwargs: Any) -> Any:
    _note_numbers(device, args[:1])
    result = _call(device, func, args, kwargs)
    if isinstance(result, torch.Tensor):
        device.shares(result)
    return result


def _converted(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """`torch.tensor(x, device=…)`, `torch.as_tensor(x, device=…)` and such: to the host, a copy."""
    target = kwargs.get("device")
    if target is None or device.is_named_by(target) or not device.holds(tensor):
        return _call(device, func, args, kwargs)
    source = tensor.detach() if func.__name__ == "tensor" else tensor
    return _move(device, source, "to host", False, {"dtype": kwargs.get("dtype") or tensor.dtype})


def _deepcopy(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """Clone instead: PyTorch would copy the storage without the modes seeing it."""
    memo = args[1]
    if not device.holds(tensor) or not tensor.is_leaf or id(tensor) in memo:
        return func(*args, **kwargs)
    if dispatches_itself(type(tensor)):  # it copies the tensors inside
        return func(*args, **kwargs)
    copied = _call(device, torch.Tensor.clone, (tensor.detach(),), {})
    memo[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        copied.grad = _deepcopy(device, func, tensor.grad, (tensor.grad, memo), kwargs)
    vars(copied).update(copy.deepcopy(vars(tensor), memo))
    return copied


def _new_tensor(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    _note_numbers(device, args[1:2])
    if device.holds(tensor) and kwargs.get("device") is None:
        kwargs = {**kwargs, "device": device.torch_device}
    return _call(device, func, args, kwargs)


def _setitem(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    with device.call.changed(storing_number=not isinstance(args[2], torch.Tensor)):
        return _call(device, func, args, kwargs)


def _ctc_loss(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """Pass lengths as lists: C++ would take those that lie on the host for device tensors. As on
    CUDA, those on the device are read first, and copies bring them all to the kernel."""

    def listed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _cpu(device, torch.Tensor.cpu, value, (value,), {}).tolist()
        return value

    if device.holds(tensor):
        kwargs = {
            name: listed(kwargs[name]) if "lengths" in name else kwargs[name] for name in kwargs
        }
        args = (*args[:2], *map(listed, args[2:]))
        device.note_obstacle(host_copy)
        device.hidden_wait(device.current_stream(), "copy from pageable memory")
    return _call(device, func, args, kwargs)


def _one_hot(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """As on CUDA, do not check the classes, which makes the host wait. It waits once for their
    number if that is not given."""
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if not device.holds(tensor) or classes == 0 or tensor.numel() == 0:
        return _call(device, func, args, kwargs)
    if classes < 0:
        classes = int(_call(device, torch.Tensor.max, (tensor,), {})) + 1
    empty = _call(device, torch.Tensor.new_zeros, (tensor, (*tensor.shape, classes)), {})
    return _call(device, torch.Tensor.scatter_, (empty, -1, tensor.unsqueeze(-1), 1), {})


def _quantile(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    with device.call.changed(checking_values=device.holds(tensor)):
        return _call(device, func, args, kwargs)


def _pad_packed(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """Return the lengths on the host."""
    padded, lengths = _call(device, func, args, kwargs)
    return padded, torch.tensor(lengths.tolist(), device="cpu")


_TENSOR_METHODS: dict[str, Callable[..., Any]] = {
    "to": _to,
    "cpu": _cpu,
    "pin_memory": _pin_memory,
    "is_pinned": _is_pinned,
    "tolist": _read,
    "__repr__": _read,
    "__format__": _read,
    "numpy": _numpy,
    "__array__": _numpy,
    "__deepcopy__": _deepcopy,
    "new_tensor": _new_tensor,
    "tensor": _converted,
    "as_tensor": _converted,
    "asarray": _converted,
    "__setitem__": _setitem,
    "ctc_loss": _ctc_loss,
    "one_hot": _one_hot,
    "quantile": _quantile,
    "nanquantile": _quantile,
    "_pad_packed_sequence": _pad_packed,
}


# --- where a tensor is ----------------------------------------------------------------------------


def holder(tensor: torch.Tensor) -> FakeDevice | None:
    """The fake device that a tensor lies on."""
    return next((device for device in patches.devices if device.holds(tensor)), None)


def _device(tensor: torch.Tensor) -> torch.device:
    """Replaces the property of tensors. PyTorch turns modes off inside each call: code that runs
    there, as in a `TorchDispatchMode`, has to see the same device as the user."""
    device = holder(tensor)
    if device is not None:
        return device.torch_device
    real: torch.device = _DEVICE.__get__(tensor)
    return real


# --- devices as arguments -------------------------------------------------------------------------


def _grouped(lists: Any, *args: Any) -> Any:
    """C++ takes the fake device's tensors for the host's. A group lies where its first tensor lies:
    code that asks moves other tensors there."""
    groups = patches.originals[_GROUPING](lists, *args)
    return {
        (columns[0][0].device, dtype): (columns, places)
        for (_, dtype), (columns, places) in groups.items()
    }


def replacements() -> Iterator[Replacement]:
    yield Replacement(torch.Tensor, "device", property(_device))
    yield Replacement(torch.Tensor, "_reduce_ex_internal", _pickle)
    yield Replacement(torch.UntypedStorage, "resize_", _resize_storage)
    for name in ("from_numpy", "from_dlpack", "frombuffer"):
        yield Replacement(torch, name, _sharing(name))
    yield Replacement(torch._C, _GROUPING, _grouped)


def _parse_to(device: FakeDevice, args: Any, kwargs: Any) -> tuple[Any, Any, bool, Any]:
    """Target, dtype, non_blocking and memory format of a call of `.to(…)`."""
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, torch.Tensor):
        target = other.device
        non_blocking = args[1] if len(args) > 1 else kwargs.get("non_blocking")
        return target, other.dtype, bool(non_blocking), None
    kwargs = {key: value for key, value in kwargs.items() if key != "copy"}
    parsed = torch._C._nn._parse_to(*args, **kwargs)
    return parsed[0], parsed[1], parsed[2], parsed[3]
