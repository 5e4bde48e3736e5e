"""A script's moves of host tensors to a device: `x.to(device)` and `x.cuda()`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from headrace.capture import is_inside_a_module
from headrace.data import is_plain_tensor
from headrace.device import Device, cuda_namespace
from headrace.replacing import replaced

#: Larger tensors are no batch's, and would keep as much pinned memory.
_MAX_BYTES = 256 << 20
#: From pinned memory the device copies itself. The host waits for it, unless the tensor is so small
#: that the host copies it aside in less time.
_MAX_PINNED_BYTES = 1 << 20


class Move(NamedTuple):
    """A tensor of the host, and where the script moves it. `waits`: the host waits for the copy."""

    tensor: torch.Tensor
    device: Device
    waits: bool


@contextmanager
def watch_moves(
    device_for: Callable[[torch.device], Device | None],
    take: Callable[[Move], torch.Tensor | None],
) -> Iterator[None]:
    """Call `take` for each move in the block that nothing but its result matters of. If it returns
    a tensor, this is the result."""
    tensor_type: Any = torch.Tensor
    to, cuda = tensor_type.to, tensor_type.cuda

    @functools.wraps(to)
    def to_device(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or is_inside_a_module()
            or type(self) is not torch.Tensor
            or not self.is_cpu
        ):
            return to(self, *args, **kwargs)
        found = taken(self, args, kwargs, None)
        return to(self, *args, **kwargs) if found is None else found

    @functools.wraps(cuda)
    def to_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or is_inside_a_module()
            or type(self) is not torch.Tensor
            or not self.is_cpu
        ):
            return cuda(self, *args, **kwargs)
        found = taken(self, args, kwargs, "cuda")
        return cuda(self, *args, **kwargs) if found is None else found

    def taken(
        tensor: torch.Tensor, args: Any, kwargs: Any, default: str | None
    ) -> torch.Tensor | None:
        where = _target(args, kwargs, default)
        device = None if where is None else device_for(where)
        if device is None or not _may_be_taken(tensor, device):
            return None
        return take(Move(tensor, device, not kwargs.get("non_blocking")))

    with replaced(tensor_type, "to", to_device), replaced(tensor_type, "cuda", to_cuda):
        yield


def _target(args: Any, kwargs: Any, default: str | None) -> torch.device | None:
    """The device that the arguments of `.to` or `.cuda` name, if they name nothing else."""
    if len(args) > 1 or not kwargs.keys() <= {"device", "non_blocking"}:
        return None
    named = args[0] if args else kwargs.get("device", default)
    if named is None and default is not None:
        named = default
    if isinstance(named, int) and not isinstance(named, bool):
        named = torch.device("cuda", named)
    if not isinstance(named, str | torch.device):
        return None
    try:
        where = torch.device(named)
    except RuntimeError:  # as the move itself will say
        return None
    if where.type != "cuda":
        return None
    if where.index is None:
        return torch.device("cuda", cuda_namespace().current_device())
    return where


def _may_be_taken(tensor: torch.Tensor, device: Device) -> bool:
    return (
        not tensor.requires_grad
        and is_plain_tensor(tensor)
        and 0 < tensor.nbytes <= _MAX_BYTES
        and torch._C._functorch.peek_interpreter_stack() is None
        and not device.is_capturing()
    )


def copy_aside(move: Move) -> torch.Tensor | None:
    """The result of a move for which the host does not wait: it copies the tensor to pinned memory,
    and the device copies that. None if the move itself is as good."""
    tensor, device = move.tensor, move.device
    is_pinned = device.is_pinned(tensor)
    if is_pinned and (not move.waits or tensor.nbytes > _MAX_PINNED_BYTES):
        return None
    # As `.to` lays it out: with the tensor's strides if it is dense, else contiguous.
    found = torch.empty_like(tensor, device=device.torch_device)
    buffer = device.pinned.take(tensor.nbytes)
    staged = buffer.view((tensor.numel(),), tensor.dtype)
    staged = staged.as_strided(tensor.shape, found.stride())
    staged.copy_(tensor)
    device.copy(found, staged, known_pinned=True)
    done = device.event()
    done.record()
    buffer.release(after=done)
    return found
