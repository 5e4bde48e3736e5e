"""Captured tensors by the memory that they share, which copies of them must share, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch

from headrace.errors import CaptureError

# Above this many elements, tensors whose memory overlaps in part count as one and the same.
_MAX_COMPARED = 1 << 26


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """A range of captured memory, and the captured tensors in it by their number. `begin` is its
    offset in the storage; -1: there is one tensor, which is dense."""

    memory: torch.Tensor
    begin: int
    numbers: tuple[int, ...]

    def copy_into(self, made: list[Any], captured: list[torch.Tensor]) -> None:
        """Put copies of these tensors into `made`, by number."""
        memory = self.memory.clone()
        if self.begin < 0:
            (number,) = self.numbers
            made[number] = memory
            return
        for number in self.numbers:
            one = captured[number]
            # `.data`: a view would not let its caller write to it in place.
            made[number] = memory.as_strided(
                one.size(), one.stride(), one.storage_offset() - self.begin
            ).data


def ranges_of(tensors: list[torch.Tensor], differentiable: list[bool]) -> list[MemoryRange]:
    """The tensors by the memory that they share."""
    by_storage: dict[int, list[int]] = {}
    for number, one in enumerate(tensors):
        by_storage.setdefault(one.untyped_storage()._cdata, []).append(number)
    ranges = []
    for numbers in by_storage.values():
        first = tensors[numbers[0]]
        if len(numbers) == 1 and _is_dense(first):
            ranges.append(MemoryRange(first, -1, (numbers[0],)))
            continue
        with_gradient = [tensors[number] for number in numbers if differentiable[number]]
        for at, one in enumerate(with_gradient):
            if any(_overlap(one, other) for other in with_gradient[:at]):
                raise CaptureError(
                    "the model returns two tensors that share memory and both have a gradient, and "
                    "copies of them could not be written in place: return a clone of one"
                )
        begin = min(int(tensors[number].storage_offset()) for number in numbers)
        end = max(map(_end, (tensors[number] for number in numbers)))
        memory = first.as_strided((end - begin,), (1,), begin)
        if len({tensors[number].dtype for number in numbers}) > 1:
            raise CaptureError(
                "the model returns tensors of several dtypes that share memory: return a clone"
            )
        ranges.append(MemoryRange(memory, begin, tuple(numbers)))
    return ranges


def _end(tensor: torch.Tensor) -> int:
    begin = int(tensor.storage_offset())
    if not tensor.numel():
        return begin
    extents = ((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    return begin + int(sum(extents)) + 1


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether `clone()` gives a tensor the same strides."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    end = max(_end(one), _end(other))
    begin = min(int(one.storage_offset()), int(other.storage_offset()))
    if one.storage_offset() >= _end(other) or other.storage_offset() >= _end(one):
        return False
    if end - begin > _MAX_COMPARED:
        return True
    marks = numpy.zeros(end - begin, dtype=numpy.bool_)
    _elements(marks, one, begin)[...] = True
    return bool(_elements(marks, other, begin).any())


def _elements(marks: Any, tensor: torch.Tensor, begin: int) -> Any:
    return numpy.lib.stride_tricks.as_strided(
        marks[tensor.storage_offset() - begin :], tuple(tensor.size()), tensor.stride()
    )
