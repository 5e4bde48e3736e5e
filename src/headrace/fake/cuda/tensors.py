"""Tensors on the fake CUDA device: `.cuda()`, `.to(0)`, `is_cuda`, `device="cuda"`, generators."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _device as default_device

from headrace.fake.cuda import state
from headrace.fake.cuda.random import is_cuda_generator
from headrace.fake.function_mode import FunctionMode, holder

if TYPE_CHECKING:
    from headrace.fake.cuda.device import FakeCuda


_IS_CUDA: Any = torch._C.TensorBase.is_cuda
_IS_CPU: Any = torch._C.TensorBase.is_cpu
_ARRAY: Any = vars(torch.Tensor)["__cuda_array_interface__"]


def is_cuda(tensor: torch.Tensor) -> bool:
    """The property of tensors, inside a mode as outside."""
    return holder(tensor) is not None or bool(_IS_CUDA.__get__(tensor))


def is_cpu(tensor: torch.Tensor) -> bool:
    """The property of tensors, inside a mode as outside."""
    return holder(tensor) is None and bool(_IS_CPU.__get__(tensor))


class CudaFunctionMode(FunctionMode):
    """Teaches PyTorch's calls that tensors of the fake device are on `cuda:0`."""

    _device: FakeCuda

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        device, kwargs = self._device, kwargs or {}
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if tensor is not None:
            name = getattr(func, "__name__", "")
            if name == "__get__":
                read = getattr(func, "__self__", None)
                if read is _ARRAY and device.holds(tensor):
                    raise state.not_emulated("__cuda_array_interface__ (CuPy, Numba)")
            rewrite = _METHODS.get(name)
            if rewrite is not None:
                func, args, kwargs = rewrite(device, func, tensor, args, kwargs)
        elif func in default_device._device_constructors() and kwargs.get("device") is None:
            # PyTorch's mode for a default device comes after this one, which has to know it.
            default = _default_device()
            if default is not None:
                kwargs = {**kwargs, "device": default}
        elif args and isinstance(args[0], int) and _takes_device(func):
            if func is torch.device:
                return torch.device("cuda", args[0])
            args = (torch.device("cuda", args[0]), *args[1:])
        if kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": _checked_generator(device, tensor, kwargs)}
        rate = kwargs.get("lr")
        if isinstance(rate, float) and getattr(func, "__name__", "").startswith("_fused_"):
            # CUDA's fused optimizers compute with this precision, those of the CPU with another.
            kwargs = {**kwargs, "lr": ctypes.c_float(rate).value}
        if isinstance(kwargs.get("device"), int):
            kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except RuntimeError as problem:
            if "DefaultCPUAllocator: can't allocate memory" not in str(problem):
                raise
            raise torch.OutOfMemoryError(f"CUDA out of memory (fake): {problem}") from problem


def _takes_device(func: Any) -> bool:
    """Whether a number as the first argument is a device: `torch.device(0)`, `Module.to(0)`."""
    return func is torch.device or getattr(func, "__name__", "") == "_parse_to"


def _default_device() -> torch.device | None:
    """The device of `torch.set_default_device` or `with torch.device(…):` in this thread."""
    if torch._C._len_torch_function_stack():
        bottom = torch._C._get_function_stack_at(0)
        if isinstance(bottom, default_device.DeviceContext):
            found: torch.device = bottom.device
            return found
    return None


def _checked_generator(device: FakeCuda, tensor: torch.Tensor | None, kwargs: Any) -> Any:
    """The generator, if it belongs to the device that the random numbers are for."""
    generator, target = kwargs["generator"], kwargs.get("device")
    if target is not None:
        on_device = device.is_named_by(target)
    else:
        on_device = tensor is not None and device.holds(tensor)
    expected, found = (
        "cuda" if one else "cpu" for one in (on_device, is_cuda_generator(generator))
    )
    if expected != found:
        raise RuntimeError(f"Expected a '{expected}' device type for generator but found '{found}'")
    return None if generator is device.generator else generator


# --- methods that are rewritten: to another function and other arguments --------------------------


def _to_call(
    target: torch.device, tensor: torch.Tensor, dtype: torch.dtype | None, non_blocking: bool
) -> tuple[Any, Any, Any]:
    arguments = (tensor, target) if dtype is None else (tensor, target, dtype)
    return torch.Tensor.to, arguments, {"non_blocking": non_blocking}


def _cuda(device: FakeCuda, func: Any, tensor: Any, args: Any, kwargs: Any) -> Any:
    target = args[1] if len(args) > 1 else kwargs.get("device")
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    state.check_index(target)
    func, args, options = _to_call(device.torch_device, tensor, None, non_blocking)
    if kwargs.get("memory_format") is not None:
        options["memory_format"] = kwargs["memory_format"]
    return func, args, options


def _to(device: FakeCuda, func: Any, tensor: Any, args: Any, kwargs: Any) -> Any:
    """`.to(0)`: PyTorch reads a number as a device only if it has one."""
    if len(args) > 1 and isinstance(args[1], int) and not isinstance(args[1], bool):
        args = (tensor, torch.device("cuda", args[1]), *args[2:])
    return func, args, kwargs


def _get_device(device: FakeCuda, func: Any, tensor: Any, args: Any, kwargs: Any) -> Any:
    if not device.holds(tensor):
        return func, args, kwargs
    return lambda *_: 0, (tensor,), {}


def _type(device: FakeCuda, func: Any, tensor: Any, args: Any, kwargs: Any) -> Any:
    """`.type()` and `.type("torch.cuda.FloatTensor")`."""
    wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
    if isinstance(wanted, torch.dtype):
        return func, args, kwargs
    if wanted is None:
        if not device.holds(tensor):
            return func, args, kwargs
        return lambda one: func(one).replace("torch.", "torch.cuda.", 1), (tensor,), {}
    if not isinstance(wanted, str):
        wanted = f"{wanted.__module__}.{wanted.__name__}"
    dtype = getattr(torch, wanted.rpartition(".")[2]).dtype
    target = device.torch_device if ".cuda." in wanted else torch.device("cpu")
    return _to_call(target, tensor, dtype, bool(kwargs.get("non_blocking", False)))


_METHODS: dict[str, Callable[..., Any]] = {
    "cuda": _cuda,
    "to": _to,
    "get_device": _get_device,
    "type": _type,
}
