"""Moves between host and device, and pinned memory, as calls ask for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from headrace.fake import autograd, patches
from headrace.races.frames import calling_site
from headrace.races.operators import tensors

if TYPE_CHECKING:
    from headrace.fake.device import FakeDevice


def to(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    target, dtype, non_blocking, memory_format = parse_to(device, args[1:], kwargs)
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
        return run_call(device, torch.Tensor.to, (tensor, dtype or tensor.dtype), {})
    options = {"dtype": dtype or tensor.dtype}
    if memory_format is not None:
        options["memory_format"] = memory_format
    if here == there:
        return run_call(device, torch.Tensor.to, (tensor,), {**options, "copy": copied})
    return move(device, tensor, "to device" if there else "to host", non_blocking, options)


def to_cpu(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    if not device.holds(tensor):
        return func(*args, **kwargs)
    return move(device, tensor, "to host", False, {"dtype": tensor.dtype})


def move(
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
        back = move(ctx.device, gradient, ctx.back, False, {"dtype": ctx.dtype})
        return back, None, None, None, None


def _copy_over(
    device: FakeDevice, tensor: torch.Tensor, way: str, non_blocking: bool, options: dict[str, Any]
) -> torch.Tensor:
    moving = device.call.changed(moving=way, non_blocking=non_blocking)
    with moving, torch._C.DisableTorchFunction():
        return tensor.to(**options, copy=True)


def pinned(device: FakeDevice, tensor: torch.Tensor) -> torch.Tensor:
    if device.holds(tensor):
        raise RuntimeError(f"cannot pin a tensor on {device}; only host memory can be pinned")
    device.mark_pinned(tensor)
    return tensor


def pin_memory(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    if device.is_pinned(tensor):
        return tensor
    with torch.no_grad():
        return pinned(device, tensor if device.holds(tensor) else tensor.detach().clone())


def is_pinned(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    return device.is_pinned(tensor)


def converted(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """`torch.tensor(x, device=…)`, `torch.as_tensor(x, device=…)` and such: to the host, a copy."""
    target = kwargs.get("device")
    if target is None or device.is_named_by(target) or not device.holds(tensor):
        return run_call(device, func, args, kwargs)
    source = tensor.detach() if func.__name__ == "tensor" else tensor
    return move(device, source, "to host", False, {"dtype": kwargs.get("dtype") or tensor.dtype})


def parse_to(device: FakeDevice, args: Any, kwargs: Any) -> tuple[Any, Any, bool, Any]:
    """Target, dtype, non_blocking and memory format of a call of `.to(…)`."""
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, torch.Tensor):
        target = other.device
        non_blocking = args[1] if len(args) > 1 else kwargs.get("non_blocking")
        return target, other.dtype, bool(non_blocking), None
    kwargs = {key: value for key, value in kwargs.items() if key != "copy"}
    parsed = torch._C._nn._parse_to(*args, **kwargs)
    return parsed[0], parsed[1], parsed[2], parsed[3]


def run_call(
    device: FakeDevice, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
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
    with call.changed(named=named, inside=inside):
        result = func(*args, **kwargs)
    if named == "device" and isinstance(result, torch.Tensor) and not device.holds(result):
        # torch.tensor(numbers, device=…): PyTorch makes it on the host, unseen, and copies it.
        return move(device, result, "to device", False, {"dtype": result.dtype})
    if inside == "device" and torch.is_grad_enabled():
        autograd.tag(tensors(result), device.current_stream(), calling_site())
    return result


def _any_held(device: FakeDevice, values: Any) -> bool:
    """Whether a tensor in nested arguments lies on the device."""
    with torch._C.DisableTorchFunction():
        return bool(device.checker.held(tensors(values)))
