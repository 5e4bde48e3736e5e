"""Which rows of a tensor an indexing operator touches.

A cache of blocks, a replay buffer or an embedding table is one tensor of which two streams may use
different rows at the same time. PyTorch computes at once, so the row numbers are at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch

from headrace.races.operators import Operation

# Beyond this many row numbers, or runs of neighboring rows, the whole tensor counts as touched.
_MAX_NUMBERS = 4096
_MAX_RUNS = 64
# Operators with arguments (tensor, dim, index, …), of which they touch the named rows only. Those
# that write have no other result: `index_add` without `_` copies the whole tensor.
_ALONG_A_DIMENSION = (
    *("index_select", "gather"),
    *("index_copy_", "index_add_", "index_fill_", "index_reduce_"),
    *("scatter_", "scatter_add_", "scatter_reduce_"),
)
_OF_ELEMENTS = ("take", "put_")
_BY_INDICES = ("index", "_unsafe_index", "index_put_", "_index_put_impl_")
_INDEXING = frozenset((*_ALONG_A_DIMENSION, *_OF_ELEMENTS, *_BY_INDICES, "embedding"))
_MASKS = (torch.bool, torch.uint8)


def touched_parts(operation: Operation, touched: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that an operation reads, or those that it writes, with the rows that it names in
    place of the tensor that it indexes."""
    indexed: Any = operation.args[0] if operation.args else None
    if operation.short not in _INDEXING or not any(tensor is indexed for tensor in touched):
        return touched
    parts = _parts(operation, indexed) if indexed.dim() and not indexed.is_nested else None
    if parts is None:
        return touched
    return [*(tensor for tensor in touched if tensor is not indexed), *parts]


def _parts(operation: Operation, indexed: Any) -> list[torch.Tensor] | None:
    args, name = operation.args, operation.short
    if name in _ALONG_A_DIMENSION:
        return _rows(indexed, args[1], args[2])
    if name == "embedding":
        return _rows(indexed, 0, args[1])
    if name in _OF_ELEMENTS:
        return _rows(indexed.view(-1), 0, args[1]) if indexed.is_contiguous() else None
    return _indexed(indexed, args[1])


def _indexed(
    tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]
) -> list[torch.Tensor] | None:
    """The rows of `tensor[indices]`: along the first dimension that has an index, or along all
    that follow it with one, if memory lets us see them as a single dimension."""
    dim = sum(1 for _ in takewhile(lambda index: index is None, indices))
    numbers: list[Any] = list(takewhile(lambda index: index is not None, indices[dim:]))
    # CUDA stores a number through a mask by rewriting all elements.
    if not numbers or numbers[0].dtype in _MASKS:
        return None
    if any(index.dtype in _MASKS for index in numbers):
        return _rows(tensor, dim, numbers[0])
    try:
        flat = tensor.view(*tensor.shape[:dim], -1, *tensor.shape[dim + len(numbers) :])
    except RuntimeError:  # its memory is not in one piece
        return _rows(tensor, dim, numbers[0])
    together: Any = 0
    for index, size in zip(numbers, tensor.shape[dim:], strict=False):
        together = together * size + index % max(1, size)
    return _rows(flat, dim, together)


def _rows(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> list[torch.Tensor] | None:
    """The rows that `index` names, as few views; None if there are too many."""
    if index.numel() > _MAX_NUMBERS:
        return None
    numbers = (index.flatten().long() % max(1, tensor.shape[dim])).unique().tolist()
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, number + 1])
    if len(runs) > _MAX_RUNS:
        return None
    return [tensor.narrow(dim, start, end - start) for start, end in runs]
