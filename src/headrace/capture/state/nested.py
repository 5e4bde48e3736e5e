"""Nested values that a captured function returns: their parts, and copies of their tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from headrace.data import flatten_batch, rebuild_batch
from headrace.errors import StepError


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """A nested value (as batches are nested) with changed tensors. Raises `StepError` for a part
    whose tensors cannot be reached."""
    odd = next((part for part in parts_of(tree) if not isinstance(part, _PLAIN)), None)
    if odd is not None:
        raise StepError(
            f"a {type(odd).__name__} was returned, and tensors in it cannot be copied: expected "
            "tensors, in tuples, lists, dicts or dataclasses"
        )
    return rebuild_batch(tree, [change(leaf) for leaf in flatten_batch(tree)])


def parts_of(tree: Any) -> Iterator[Any]:
    """What a nested value consists of, depth first: tensors and all else that has no parts."""
    if isinstance(tree, Mapping):
        parts: Iterable[Any] = tree.values()
    elif isinstance(tree, list | tuple):
        parts = tree
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        parts = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    else:
        yield tree
        return
    for part in parts:
        yield from parts_of(part)


_PLAIN = (torch.Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
