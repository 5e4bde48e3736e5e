"""`signature`: what a batch, or the arguments of a call, must have in common to share a graph."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Hashable, Iterable, Mapping
from numbers import Number
from typing import Any

import torch

from headrace.data import flatten_batch, moves_itself, other_attributes
from headrace.device import Device
from headrace.errors import CaptureError

# Batches may hold a few values on the host, such as lengths. They are compared before each replay.
_MAX_HOST_VALUES = 1000
# Kinds of values that do not change, and have no equality of their own.
_EQUAL_TO_THEMSELVES = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    type,
    type(None),
    type(...),
    torch.dtype,
    torch.layout,
    torch.memory_format,
)
# Containers that have nothing besides their items.
_WITHOUT_ATTRIBUTES = (tuple, list, dict)


def signature(batch: Any, device: Device) -> Hashable:
    """The key of a batch's graph. Batches with equal signatures can share a graph.

    It consists of the nesting, each tensor's shape, dtype and strides, and every value that is not
    on the device, since a graph freezes those. Raises `CaptureError` for values that cannot be
    compared.
    """
    if type(batch) is torch.Tensor:
        if batch.requires_grad:
            raise CaptureError(
                "a batch holds a tensor that requires a gradient, which a graph would give to a "
                "copy of its own: call detach().requires_grad_() on it inside the step"
            )
        if batch.is_nested:
            raise CaptureError(
                "a batch holds a nested tensor, whose rows may have other sizes in each batch: pad "
                "them, and pass a mask"
            )
        if batch.layout is not torch.strided:
            raise CaptureError(
                "a batch holds a sparse tensor, whose memory changes from batch to batch: pass a "
                "dense one, or keep what uses it out of the graph"
            )
        strides = None if batch.is_contiguous() else batch.stride()
        values = None if device.holds(batch) else _host_values(batch, device)
        return (batch.shape, batch.dtype, strides, values)
    if moves_itself(batch):
        raise CaptureError(
            f"a batch holds a {type(batch).__name__}, which moves itself with .to(), and a graph "
            "needs its tensors: let the loader return them in a tuple or dict"
        )
    items: Iterable[Any] | None = None
    if isinstance(batch, Mapping):
        items = ((key, signature(value, device)) for key, value in batch.items())
    elif isinstance(batch, tuple | list):
        items = (signature(one, device) for one in batch)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = dataclasses.fields(batch)
        items = (signature(getattr(batch, field.name), device) for field in fields)
    if type(batch) in _WITHOUT_ATTRIBUTES:  # most are, and this runs before each replay
        return (type(batch), *(items or ()))
    if items is not None:
        return (type(batch), *items, *_attribute_signatures(batch, device))
    if not _is_comparable(batch):
        raise CaptureError(
            f"a batch holds a {type(batch).__name__}, which cannot be compared from batch to "
            "batch: return it as a tensor, a number or a string, or leave it out"
        )
    # A number as text, too: -0.0 equals 0.0.
    return (type(batch), batch, repr(batch) if isinstance(batch, Number) else None)


def _attribute_signatures(batch: Any, device: Device) -> Iterable[Hashable]:
    """What a container has besides its items, by name."""
    for name, value in other_attributes(batch).items():
        if flatten_batch(value):
            raise CaptureError(
                f"a batch holds a {type(batch).__name__} with a tensor in its attribute {name!r}, "
                "which no graph gets a copy of: make it a field or an item"
            )
        yield name, signature(value, device)


def _is_comparable(value: Any) -> bool:
    """Whether two values that are equal will do for each other. An object that equals only itself
    may have other attributes in each batch."""
    if isinstance(value, _EQUAL_TO_THEMSELVES):
        return True
    try:
        hash(value)
    except TypeError:
        return False
    own_hash: Any = type(value).__hash__
    return own_hash is not object.__hash__


def _host_values(tensor: torch.Tensor, device: Device) -> Hashable:
    """The values of a tensor on the host, as text: NaN equals NaN."""
    if tensor.numel() > _MAX_HOST_VALUES:
        raise CaptureError(
            f"a batch holds {tensor.numel():,} values on the host, and a graph would repeat those "
            "that it was captured with: move them to the device first"
        )
    return repr(device.read_host(tensor.detach().reshape(1, -1)))
