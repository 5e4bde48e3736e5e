"""How the fake device sees PyTorch work: one mode above autograd, one below.

The function mode sees calls as the user wrote them. It gives `device=`, `.to()`, `.cpu()`,
`.device` and pinning their meaning on a device that PyTorch does not know, and tells autograd's
new nodes which stream they were made on. The dispatch mode sees the operations that really run,
backward's too, and hands each one's reads, writes and allocations to the device.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.testing import autograd
from headrace.testing.races import calling_site

if TYPE_CHECKING:
    from headrace.testing.fake import FakeDevice, FakeStream

_DEVICE_PROPERTY = torch.Tensor.__dict__.get("device") or torch._C.TensorBase.device
# Operations that allocate and do not write, or take a tensor only for its shape.
_ALLOCATE_ONLY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_SHAPE_ONLY = ("_like", "new_full", "new_zeros", "new_ones", *_ALLOCATE_ONLY)
# CUDA takes host tensors as indices; everywhere else mixing is an error, save for 0-dim tensors.
_MAY_MIX = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "copy_")
# Operations whose result's size or value the host must read before it can go on.
_HOST_READS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
    "is_nonzero",
    "bincount",
    "repeat_interleave",
)
_TORCH = Path(torch.__file__).resolve().parent
_OWN_FRAMES = (str(Path(__file__).resolve().parent), str(_TORCH / "overrides.py"))
_ASKS_CPP = tuple(str(_TORCH / part) for part in ("nn/utils/clip_grad.py", "optim", "amp"))


class Call(threading.local):
    """What the function mode tells the dispatch mode about the call that is under way."""

    on_device = False
    #: "to device" or "to host" while a tensor is moved, and whether the host waits for it.
    moving: str | None = None
    non_blocking = False


class FunctionMode(TorchFunctionMode):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        device, name = self._device, getattr(func, "__name__", "")
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if tensor is not None:
            if name == "__get__" and getattr(func, "__self__", None) is _DEVICE_PROPERTY:
                return device.torch_device if device.holds(tensor) else func(*args)
            special = _TENSOR_METHODS.get(name)
            if special is not None:
                return special(device, func, tensor, args, kwargs)
        if kwargs.pop("pin_memory", False):
            result = func(*args, **kwargs)
            device.mark_pinned(result)
            return result
        return _call(device, func, args, kwargs)


def _call(device: FakeDevice, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run `func`, as device work if it names the device or takes tensors that lie on it."""
    call, outside = device.call, device.call.on_device
    made_here = _is_here(kwargs.get("device"), device)
    if made_here:
        kwargs = {**kwargs, "device": "cpu"}
        call.on_device = True
    elif kwargs.get("device") is not None:
        call.on_device = False
    else:
        call.on_device = outside or any(device.holds(leaf) for leaf in _tensors((args, kwargs)))
    try:
        result = func(*args, **kwargs)
    finally:
        call.on_device, on_device = outside, call.on_device
    if made_here and isinstance(result, torch.Tensor) and not device.holds(result):
        # torch.tensor(numbers, device=…): made on the host, behind the modes' back, then copied.
        return _move(device, result, "to device", False, {"dtype": result.dtype})
    if on_device and torch.is_grad_enabled():
        autograd.tag(_tensors(result), device.current_stream(), calling_site())
    return result


def _to(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    target, dtype, non_blocking, memory_format = _parse_to(device, args[1:], kwargs)
    copy = bool(kwargs.get("copy", False))
    here, there = device.holds(tensor), _is_here(target, device)
    if target is None or (here and not there and _device_from_cpp()):
        target, there = None, here
    if target is None and not copy and memory_format is None:
        return _call(device, torch.Tensor.to, (tensor, dtype or tensor.dtype), {})
    options = {"dtype": dtype or tensor.dtype}
    if memory_format is not None:
        options["memory_format"] = memory_format
    if here == there:
        return _call(device, torch.Tensor.to, (tensor,), {**options, "copy": copy})
    return _move(device, tensor, "to device" if there else "to host", non_blocking, options)


def _cpu(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    if not device.holds(tensor):
        return func(*args, **kwargs)
    return _move(device, tensor, "to host", False, {"dtype": tensor.dtype})


def _move(
    device: FakeDevice, tensor: torch.Tensor, way: str, non_blocking: bool, options: dict[str, Any]
) -> Any:
    call = device.call
    call.moving, call.non_blocking = way, non_blocking
    try:
        return _call(device, torch.Tensor.to, (tensor,), {**options, "copy": True})
    finally:
        call.moving = None


def _pin_memory(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    if device.holds(tensor):
        raise RuntimeError(f"cannot pin a tensor on {device}; only host memory can be pinned")
    if device.is_pinned(tensor):
        return tensor
    with torch.no_grad():
        pinned = tensor.detach().clone()
    device.mark_pinned(pinned)
    return pinned


def _is_pinned(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    return device.is_pinned(tensor)


def _read(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """`tolist()`, `print(tensor)` and such: no operation shows them to the dispatch mode."""
    name = func.__name__.strip("_")
    if device.holds(tensor):
        stream = device.current_stream()
        device.operation(stream, "copy d2h", "copy", reads=[tensor])
        device.hidden_wait(stream, name)
    else:
        device.operation(None, name, "host", reads=[tensor])
    return func(*args, **kwargs)


def _deepcopy(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """PyTorch copies the storage behind the modes' back; a clone is the same and is seen."""
    if not device.holds(tensor) or not tensor.is_leaf:
        return func(*args, **kwargs)
    copied = _call(device, torch.Tensor.clone, (tensor.detach(),), {})
    args[1][id(tensor)] = copied.requires_grad_(tensor.requires_grad)
    return copied


def _numpy(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    if device.holds(tensor):
        raise TypeError(
            f"can't convert {device} device type tensor to numpy. Use Tensor.cpu() to copy the "
            "tensor to host memory first."
        )
    device.operation(None, "numpy", "host", reads=[tensor])
    return func(*args, **kwargs)


_TENSOR_METHODS: dict[str, Callable[..., Any]] = {
    "to": _to,
    "cpu": _cpu,
    "pin_memory": _pin_memory,
    "is_pinned": _is_pinned,
    "tolist": _read,
    "__repr__": _read,
    "__format__": _read,
    "__deepcopy__": _deepcopy,
    "numpy": _numpy,
    "__array__": _numpy,
}


class DispatchMode(TorchDispatchMode):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            inputs = _tensors((args, kwargs))
            name = func._schema.name
            short = name.removeprefix("aten::")
            on_device = [tensor for tensor in inputs if self._device.holds(tensor)]
            self._refuse_mixed(short, inputs, on_device)
            if short == "copy_":
                result = func(*args, **kwargs)
                self._copy(args[0], args[1], bool(_argument(args, kwargs, 2, "non_blocking")))
                return result
            if short == "_to_copy" and self._device.call.moving is not None:
                return self._move(func, args, kwargs)
            if not on_device and not self._makes_device_memory(inputs):
                self._on_host(name, inputs, func, args, kwargs)
                return func(*args, **kwargs)
            return self._on_stream(name, short, inputs, func, args, kwargs)

    def _on_stream(
        self, name: str, short: str, inputs: list[torch.Tensor], func: Any, args: Any, kwargs: Any
    ) -> Any:
        device, stream = self._device, self._device.current_stream()
        reads, writes = _reads_and_writes(func, args, kwargs)
        if short.endswith(_SHAPE_ONLY) or short in _SHAPE_ONLY:
            reads = []
        result = func(*args, **kwargs)
        known = {_storage_key(tensor) for tensor in inputs}
        outputs = _tensors(result)
        fresh = [tensor for tensor in outputs if _storage_key(tensor) not in known]
        aliases = {_storage_key(tensor) for tensor in outputs} & known
        if aliases and not writes:
            # A view: no kernel runs, whatever the schema says.
            reads = [tensor for tensor in reads if _storage_key(tensor) not in aliases]
        written = [] if short in _ALLOCATE_ONLY else fresh
        if reads or writes or fresh:
            kernel = bool(reads or writes or written)
            device.operation(
                stream,
                name,
                "kernel",
                reads=reads,
                writes=[*writes, *written],
                allocates=fresh,
                cost_ns=None if kernel else 0,
            )
        if short in _HOST_READS or _indexes_by_mask(short, args):
            device.hidden_wait(stream, name)
        return result

    def _on_host(
        self, name: str, inputs: list[torch.Tensor], func: Any, args: Any, kwargs: Any
    ) -> None:
        """Only pinned memory can be shared with a stream: the rest needs no look."""
        if any(self._device.is_pinned(tensor) for tensor in inputs):
            reads, writes = _reads_and_writes(func, args, kwargs)
            returns_alias = any(value.alias_info is not None for value in func._schema.returns)
            if writes or not returns_alias:
                self._device.operation(None, name, "host", reads=reads, writes=writes)

    def _copy(self, into: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        device = self._device
        to_device, from_device = device.holds(into), device.holds(source)
        stream = device.current_stream()
        if to_device and from_device:
            device.operation(stream, "copy d2d", "kernel", reads=[source], writes=[into])
        elif to_device:
            self._host_to_device(stream, into, source, non_blocking)
        elif from_device:
            self._device_to_host(stream, into, source, non_blocking)
        else:
            device.operation(None, "aten::copy_", "host", reads=[source], writes=[into])

    def _move(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`.to(device)` and `.cpu()`: the copy, and the memory it makes."""
        device, stream, source = self._device, self._device.current_stream(), args[0]
        result = func(*args, **kwargs)
        if self._device.call.moving == "to device":
            device.operation(stream, "allocation", "kernel", allocates=[result], cost_ns=0)
            self._host_to_device(stream, result, source, self._device.call.non_blocking)
        else:
            self._device_to_host(stream, result, source, self._device.call.non_blocking)
        return result

    def _host_to_device(
        self, stream: FakeStream, into: torch.Tensor, source: torch.Tensor, non_blocking: bool
    ) -> None:
        device, pinned = self._device, self._device.is_pinned(source)
        reads = [source] if pinned else []
        device.operation(stream, "copy h2d", "copy", reads=reads, writes=[into])
        # From pageable memory the driver takes the bytes before the call returns.
        if not pinned and source.dim() > 0:
            device.hidden_wait(stream, "copy from pageable memory")
        elif not non_blocking and source.dim() > 0:
            device.hidden_wait(stream, "blocking copy")

    def _device_to_host(
        self, stream: FakeStream, into: torch.Tensor, source: torch.Tensor, non_blocking: bool
    ) -> None:
        device, pinned = self._device, self._device.is_pinned(into)
        writes = [into] if pinned else []
        device.operation(stream, "copy d2h", "copy", reads=[source], writes=writes)
        if not pinned or not non_blocking:
            device.hidden_wait(stream, "blocking copy" if pinned else "copy to pageable memory")

    def _makes_device_memory(self, inputs: list[torch.Tensor]) -> bool:
        """A factory inside a device call, or inside a backward node, makes device memory."""
        return not inputs and (self._device.call.on_device or autograd.in_node())

    def _refuse_mixed(
        self, short: str, inputs: list[torch.Tensor], on_device: list[torch.Tensor]
    ) -> None:
        if not on_device or len(on_device) == len(inputs) or short in _MAY_MIX:
            return
        strays = [t for t in inputs if t.dim() > 0 and not self._device.holds(t)]
        if strays:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, "
                f"{self._device} and cpu: aten::{short} was given a host tensor of shape "
                f"{tuple(strays[0].shape)} (move it with .to(device.torch_device), inside the "
                "`with device:` block)"
            )


def _reads_and_writes(
    func: Any, args: Any, kwargs: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors an operation reads and those it writes in place, by its schema."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        value = _argument(args, kwargs, position, argument.name)
        if argument.alias_info is None:
            reads += _tensors(value)
        elif argument.alias_info.is_write:
            writes += _tensors(value)
    return reads, writes


def _argument(args: Any, kwargs: Any, position: int, name: str) -> Any:
    return args[position] if position < len(args) else kwargs.get(name)


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _storage_key(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def _indexes_by_mask(short: str, args: Any) -> bool:
    """`x[mask]`: the host must count the mask before it knows the result's size."""
    if short not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    masks = (torch.bool, torch.uint8)
    return any(isinstance(index, torch.Tensor) and index.dtype in masks for index in args[1])


def _is_here(target: Any, device: FakeDevice) -> bool:
    if target is None or isinstance(target, int):
        return False
    return torch.device(target) == device.torch_device


def _device_from_cpp() -> bool:
    """Whether `.to` was called by library code that asked C++ where its tensors lie. C++ says
    "cpu" of the fake device's tensors, so such a call does not mean the host."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_FRAMES):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_ASKS_CPP)


def _parse_to(device: FakeDevice, args: Any, kwargs: Any) -> tuple[Any, Any, bool, Any]:
    """What `.to(…)` was asked for; `.to(other)` means the other's device and type."""
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, torch.Tensor):
        target = device.torch_device if device.holds(other) else other.device
        return target, other.dtype, bool(_argument(args, kwargs, 1, "non_blocking")), None
    kwargs = {key: value for key, value in kwargs.items() if key != "copy"}
    parsed = torch._C._nn._parse_to(*args, **kwargs)
    return parsed[0], parsed[1], parsed[2], parsed[3]
