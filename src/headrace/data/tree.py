"""Nested batches: tuples, dicts, named tuples, dataclasses and objects that hold tensors.

A batch is flattened into leaves, and rebuilt around new leaves. Leaves are its tensors, and objects
with a `.to()` of their own: such an object knows which of its parts must stay on the CPU, as the
`batch_sizes` of a `PackedSequence` must. Everything else stays as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

_TENSORS = {torch.Tensor}
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def is_plain_tensor(leaf: Any) -> bool:
    """Whether a leaf is an ordinary dense tensor, which a copy of its bytes reproduces.

    Subclasses, sparse and quantized tensors, and those in an autograd graph need `.to()`.
    """
    return (
        type(leaf) in _PLAIN_TYPES
        and leaf.layout is torch.strided
        and not leaf.requires_grad
        and not leaf.is_quantized
    )


def moves_itself(part: object) -> bool:
    """Whether a part of a batch is a leaf: a tensor, or an object with `.to()`, even if it is also
    a container."""
    return isinstance(part, torch.Tensor) or callable(getattr(part, "to", None))


def batch_leaves(batch: Any) -> Iterator[Any]:
    """The leaves of a batch, depth first: everything that can move to a device."""
    if moves_itself(batch):
        yield batch
        return
    for part in _parts(batch):
        yield from batch_leaves(part)


def flatten_batch(batch: Any) -> list[Any]:
    """The leaves of a batch, as a list."""
    if _is_flat(batch):
        return list(batch)
    return list(batch_leaves(batch))


def batch_tensors(batch: Any) -> list[torch.Tensor]:
    """The tensors among the leaves."""
    return [leaf for leaf in batch_leaves(batch) if isinstance(leaf, torch.Tensor)]


def rebuild_batch(batch: Any, new_leaves: Iterable[Any]) -> Any:
    """The same batch with new leaves, in the order of `batch_leaves`."""
    if _is_flat(batch):
        return type(batch)(new_leaves)
    supply = iter(new_leaves)
    return _rebuild(batch, lambda leaf: next(supply))


def other_attributes(batch: Any) -> dict[str, Any]:
    """What a container has besides its items: the attributes of a subclass, and those of a
    dataclass that are no fields."""
    found = _attributes(batch)
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        return {name: one for name, one in found.items() if not _may_keep_items(one)}
    if dataclasses.is_dataclass(batch):
        fields = {field.name for field in dataclasses.fields(batch)}
        return {name: one for name, one in found.items() if name not in fields}
    return found


def measure_leaves(leaves: Iterable[Any]) -> tuple[int, int]:
    """The bytes of a batch's tensors, and the number of its samples: the size of the first
    dimension of the first tensor that has one, or 1."""
    nbytes = samples = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            nbytes += leaf.nbytes
            if not samples and leaf.dim() > 0:
                samples = leaf.shape[0]
    return nbytes, samples or 1


def describe_batch(batch: Any) -> str:
    """The shapes of a batch's tensors and its size, as text."""
    leaves = flatten_batch(batch)
    shapes = [f"{tuple(leaf.shape)}" for leaf in leaves if isinstance(leaf, torch.Tensor)]
    more = f" and {len(shapes) - 4} more" if len(shapes) > 4 else ""
    nbytes, _ = measure_leaves(leaves)
    return f"{', '.join(shapes[:4])}{more} ({nbytes / 1e6:,.1f} MB)"


def _is_flat(batch: Any) -> bool:
    """Whether it is a plain tuple or list of tensors. Most batches are, and this is fast."""
    return type(batch) in (tuple, list) and set(map(type, batch)) == _TENSORS


def _parts(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, list | tuple):
        return batch
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return ()


def _rebuild(batch: Any, change: Callable[[Any], Any]) -> Any:
    if moves_itself(batch):
        return change(batch)
    if isinstance(batch, Mapping):
        return _rebuild_mapping(batch, change)
    if isinstance(batch, list | tuple):
        return _rebuild_sequence(batch, [_rebuild(part, change) for part in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        # Not dataclasses.replace: it refuses fields with init=False and runs __post_init__ again.
        twin = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(twin, field.name, _rebuild(getattr(batch, field.name), change))
        return twin
    return batch


def _rebuild_sequence(batch: Any, parts: list[Any]) -> Any:
    if type(batch) is list:
        return parts
    if isinstance(batch, list):  # a subclass may have another constructor and further attributes
        twin: Any = copy.copy(batch)
        twin[:] = parts
        return twin
    twin = type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if hasattr(batch, "__dict__"):
        vars(twin).update(vars(batch))
    return twin


def _rebuild_mapping(batch: Mapping[Any, Any], change: Callable[[Any], Any]) -> Any:
    changed = {key: _rebuild(value, change) for key, value in batch.items()}
    if type(batch) is dict:
        return changed
    # A subclass may have another constructor and further attributes: copy the object.
    twin: Any = copy.copy(batch)
    if not isinstance(batch, dict) and not hasattr(type(batch), "__copy__"):
        for name, one in _attributes(batch).items():
            if _may_keep_items(one):
                object.__setattr__(twin, name, copy.copy(one))
    for key, value in changed.items():
        twin[key] = value
    return twin


def _attributes(batch: Any) -> dict[str, Any]:
    """The attributes that an object keeps in its `__dict__` and in slots."""
    found = dict(getattr(batch, "__dict__", {}))
    kind: Any = type(batch)
    for name in _slots(kind):
        if hasattr(batch, name):
            found[name] = getattr(batch, name)
    return found


@functools.lru_cache(maxsize=256)
def _slots(kind: type) -> tuple[str, ...]:
    members = [item for one in kind.__mro__ for item in vars(one).items()]
    return tuple(name for name, one in members if isinstance(one, types.MemberDescriptorType))


def _may_keep_items(attribute: object) -> bool:
    """Whether a mapping that is no dict may keep its items in this attribute."""
    return isinstance(attribute, Mapping | list)
