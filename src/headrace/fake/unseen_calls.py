"""Calls that the dispatch mode does not see: what they read is noted here."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch

from headrace.fake import numpy_views, patches
from headrace.fake.moves import to_cpu
from headrace.races.operators import tensors

if TYPE_CHECKING:
    from headrace.fake.device import FakeDevice

_SAVE = torch.serialization._save.__code__
_SHALLOW_COPY = copy.copy.__code__  # of a tensor, it shares the storage


def read(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """`tolist()`, `print(tensor)` and such."""
    if func.__name__ == "__format__" and tensor.dim() == 0:
        return func(*args, **kwargs)  # it calls `item()`, which is seen
    _note_read(device, tensor, func.__name__.strip("_"))
    return func(*args, **kwargs)


def pickle(tensor: torch.Tensor, protocol: int) -> Any:
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


def to_numpy(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    if device.holds(tensor) and func.__name__ == "numpy" and (kwargs.get("force") or args[1:]):
        return to_cpu(device, func, tensor.detach(), (), {}).numpy()
    if device.holds(tensor):
        raise TypeError(
            f"can't convert {device} device type tensor to numpy. Use Tensor.cpu() to copy the "
            "tensor to host memory first."
        )
    if func.__name__ == "numpy" and device.is_pinned(tensor):
        return numpy_views.watch(device, tensor, func(*args, **kwargs))
    device.operation(None, "numpy", "host", reads=[tensor])
    return func(*args, **kwargs)


def resize_storage(storage: torch.UntypedStorage, nbytes: int) -> Any:
    """Replaces `UntypedStorage.resize_`: 0 frees the memory, and to grow is to allocate."""
    result = patches.originals["resize_"](storage, nbytes)
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        tensor = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    for device in patches.devices:
        device.resized(tensor)
    return result


def sharing(name: str) -> Callable[..., Any]:
    """Replaces a function that makes a tensor of memory it is handed, which may be watched."""

    def make(*args: Any, **kwargs: Any) -> Any:
        result = patches.originals[name](*args, **kwargs)
        for device in patches.devices:
            device.shares(result)
        return result

    return make


def note_numbers(device: FakeDevice, data: Any) -> None:
    """`torch.tensor([loss, …])` reads each tensor in a list, unseen by the dispatch mode."""
    for value in data:
        if isinstance(value, list | tuple):
            with torch._C.DisableTorchFunction():
                found = device.checker.held(tensors(value))
            for tensor in found:
                _note_read(device, tensor, "aten::_local_scalar_dense")
