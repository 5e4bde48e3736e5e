"""Nested batches: tuples, dicts, named tuples, dataclasses and objects that hold tensors.

A batch is flattened into leaves, and rebuilt around new leaves. Leaves are its tensors, and objects
with a `.to()` of their own: such an object knows which of its parts must stay on the CPU, as the
`batch_sizes` of a `PackedSequence` must. Everything else stays as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

_TENSORS = {torch.Tensor}


class _Ordinary:
    """An instance of a class like this has its state in its `__dict__` alone."""


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
    if isinstance(part, torch.Tensor):
        return True
    return callable(getattr(part, "to", None)) and not isinstance(part, type)


def is_plain_object(part: object) -> bool:
    """Whether a part is an instance of an ordinary class, of which nothing more is known: all that
    it holds is in its `__dict__`."""
    kind: Any = type(part)
    return _is_ordinary(kind) and not moves_itself(part)


def batch_leaves(batch: Any) -> Iterator[Any]:
    """The leaves of a batch, depth first: everything that can move to a device."""
    return _leaves(batch, None)


def flatten_batch(batch: Any, *, objects: bool = False) -> list[Any]:
    """The leaves of a batch, as a list. With `objects` also those in plain objects, each of which
    is looked into once."""
    if _is_flat(batch):
        return list(batch)
    return list(_leaves(batch, set() if objects else None))


def batch_tensors(batch: Any) -> list[torch.Tensor]:
    """The tensors among the leaves."""
    return [leaf for leaf in batch_leaves(batch) if isinstance(leaf, torch.Tensor)]


def rebuild_batch(batch: Any, new_leaves: Iterable[Any], *, objects: bool = False) -> Any:
    """The same batch with new leaves, in the order of `flatten_batch`. With `objects` its plain
    objects are new ones, too."""
    if _is_flat(batch):
        return type(batch)(new_leaves)
    supply = iter(new_leaves)
    return _rebuild(batch, lambda leaf: next(supply), {} if objects else None)


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


def _leaves(batch: Any, seen: set[int] | None) -> Iterator[Any]:
    """`seen` are the plain objects that were looked into; None to look into none."""
    if moves_itself(batch):
        yield batch
        return
    parts = _parts(batch)
    if seen is not None and is_plain_object(batch) and id(batch) not in seen:
        seen.add(id(batch))
        parts = vars(batch).values()
    for part in parts:
        yield from _leaves(part, seen)


def _rebuild(batch: Any, change: Callable[[Any], Any], twins: dict[int, Any] | None) -> Any:
    """`twins` are the plain objects that were made; None to make none."""
    if moves_itself(batch):
        return change(batch)
    if isinstance(batch, Mapping):
        return _rebuild_mapping(batch, change, twins)
    if isinstance(batch, list | tuple):
        return _rebuild_sequence(batch, [_rebuild(part, change, twins) for part in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        # Not dataclasses.replace: it refuses fields with init=False and runs __post_init__ again.
        twin = copy.copy(batch)
        for field in dataclasses.fields(batch):
            part = _rebuild(getattr(batch, field.name), change, twins)
            object.__setattr__(twin, field.name, part)
        return twin
    if twins is not None and is_plain_object(batch):
        return _rebuild_object(batch, change, twins)
    return batch


def _rebuild_object(batch: Any, change: Callable[[Any], Any], twins: dict[int, Any]) -> Any:
    if id(batch) not in twins:
        twins[id(batch)] = twin = object.__new__(type(batch))
        for name, part in vars(batch).items():
            vars(twin)[name] = _rebuild(part, change, twins)
    return twins[id(batch)]


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


def _rebuild_mapping(
    batch: Mapping[Any, Any], change: Callable[[Any], Any], twins: dict[int, Any] | None
) -> Any:
    changed = {key: _rebuild(value, change, twins) for key, value in batch.items()}
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


@functools.lru_cache(maxsize=256)
def _is_ordinary(kind: Any) -> bool:
    containers = (Mapping, list, tuple, torch.nn.Module, type, enum.Enum)
    return (
        kind.__basicsize__ == _Ordinary.__basicsize__
        and kind.__dictoffset__ == _Ordinary.__dictoffset__
        and kind.__new__ is object.__new__
        and not issubclass(kind, containers)
        and not dataclasses.is_dataclass(kind)
        and not hasattr(kind, "__del__")
        and not _slots(kind)
    )


def _may_keep_items(attribute: object) -> bool:
    """Whether a mapping that is no dict may keep its items in this attribute."""
    return isinstance(attribute, Mapping | list)
