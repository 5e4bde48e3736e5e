"""The mode above autograd: it sees calls as the user wrote them.

It makes `device=`, `.to()`, `.cpu()` and pinning work for a device that PyTorch does not
know, and stores in each new autograd node the stream it was made on.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from headrace.device import host_copy
from headrace.fake import patches
from headrace.fake.moves import converted, is_pinned, pin_memory, pinned, run_call, to, to_cpu
from headrace.fake.patches import Replacement
from headrace.fake.unseen_calls import note_numbers, pickle, read, resize_storage, sharing, to_numpy
from headrace.races.operators import dispatches_itself
from headrace.source_lines import HEADRACE, TORCH

if TYPE_CHECKING:
    from headrace.fake.device import FakeDevice

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
#: Groups the tensors of an optimizer by device and dtype.
_GROUPING = "_group_tensors_by_device_and_dtype"


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
            note_numbers(device, args[:1])
        if kwargs.pop("pin_memory", False):
            return pinned(device, run_call(device, func, args, kwargs))
        return run_call(device, func, args, kwargs)


# --- moving ---------------------------------------------------------------------------------------


# --- pinned memory --------------------------------------------------------------------------------


# --- calls that the dispatch mode does not see ----------------------------------------------------


def _as_tensor(device: FakeDevice, func: Any, args: Any, kwargs: Any) -> Any:
    note_numbers(device, args[:1])
    result = run_call(device, func, args, kwargs)
    if isinstance(result, torch.Tensor):
        device.shares(result)
    return result


def _deepcopy(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """Clone instead: PyTorch would copy the storage without the modes seeing it."""
    memo = args[1]
    if not device.holds(tensor) or not tensor.is_leaf or id(tensor) in memo:
        return func(*args, **kwargs)
    if dispatches_itself(type(tensor)):  # it copies the tensors inside
        return func(*args, **kwargs)
    copied = run_call(device, torch.Tensor.clone, (tensor.detach(),), {})
    memo[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        copied.grad = _deepcopy(device, func, tensor.grad, (tensor.grad, memo), kwargs)
    vars(copied).update(copy.deepcopy(vars(tensor), memo))
    return copied


def _new_tensor(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    note_numbers(device, args[1:2])
    if device.holds(tensor) and kwargs.get("device") is None:
        kwargs = {**kwargs, "device": device.torch_device}
    return run_call(device, func, args, kwargs)


def _setitem(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    with device.call.changed(storing_number=not isinstance(args[2], torch.Tensor)):
        return run_call(device, func, args, kwargs)


def _ctc_loss(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """Pass lengths as lists: C++ would take those that lie on the host for device tensors. As on
    CUDA, those on the device are read first, and copies bring them all to the kernel."""

    def listed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return to_cpu(device, torch.Tensor.cpu, value, (value,), {}).tolist()
        return value

    if device.holds(tensor):
        kwargs = {
            name: listed(kwargs[name]) if "lengths" in name else kwargs[name] for name in kwargs
        }
        args = (*args[:2], *map(listed, args[2:]))
        device.note_obstacle(host_copy)
        device.hidden_wait(device.current_stream(), "copy from pageable memory")
    return run_call(device, func, args, kwargs)


def _one_hot(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """As on CUDA, do not check the classes, which makes the host wait. It waits once for their
    number if that is not given."""
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if not device.holds(tensor) or classes == 0 or tensor.numel() == 0:
        return run_call(device, func, args, kwargs)
    if classes < 0:
        classes = int(run_call(device, torch.Tensor.max, (tensor,), {})) + 1
    empty = run_call(device, torch.Tensor.new_zeros, (tensor, (*tensor.shape, classes)), {})
    return run_call(device, torch.Tensor.scatter_, (empty, -1, tensor.unsqueeze(-1), 1), {})


def _quantile(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    with device.call.changed(checking_values=device.holds(tensor)):
        return run_call(device, func, args, kwargs)


def _pad_packed(device: FakeDevice, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """Return the lengths on the host."""
    padded, lengths = run_call(device, func, args, kwargs)
    return padded, torch.tensor(lengths.tolist(), device="cpu")


_TENSOR_METHODS: dict[str, Callable[..., Any]] = {
    "to": to,
    "cpu": to_cpu,
    "pin_memory": pin_memory,
    "is_pinned": is_pinned,
    "tolist": read,
    "__repr__": read,
    "__format__": read,
    "numpy": to_numpy,
    "__array__": to_numpy,
    "__deepcopy__": _deepcopy,
    "new_tensor": _new_tensor,
    "tensor": converted,
    "as_tensor": converted,
    "asarray": converted,
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
    yield Replacement(torch.Tensor, "_reduce_ex_internal", pickle)
    yield Replacement(torch.UntypedStorage, "resize_", resize_storage)
    for name in ("from_numpy", "from_dlpack", "frombuffer"):
        yield Replacement(torch, name, sharing(name))
    yield Replacement(torch._C, _GROUPING, _grouped)
