"""Many tensors in one block of memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

_ALIGNMENT = 64


# Tensors are copied as integers of their element size: `_foreach_copy_` does not take every dtype,
# and a float copy might change the bits of a NaN.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """Offset, dtype and shape of each tensor in one block of `nbytes` bytes."""

    offsets: dict[str, tuple[int, torch.dtype, tuple[int, ...]]]
    nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> MemoryLayout:
        offsets, end = {}, 0
        for name, tensor in tensors.items():
            offsets[name] = (end, tensor.dtype, tuple(tensor.shape))
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        return cls(offsets, end)

    def bytes_of(self, name: str, memory: torch.Tensor) -> torch.Tensor:
        """The bytes of a tensor in `memory`."""
        begin, dtype, shape = self.offsets[name]
        return memory[begin : begin + math.prod(shape) * dtype.itemsize]

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors as views of `memory`."""
        return {
            name: self.bytes_of(name, memory).view(dtype).view(shape)
            for name, (_, dtype, shape) in self.offsets.items()
        }


def clone_into(
    memory: torch.Tensor, tensors: Mapping[str, torch.Tensor], layout: MemoryLayout
) -> None:
    """Copy the tensors to `memory` with few kernel launches: a model has hundreds of tensors."""
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for name, source in tensors.items():
        target = layout.bytes_of(name, memory)
        if not source.is_contiguous():
            target.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)
        elif source.numel():
            dtype = _INTEGERS[source.element_size()]
            targets, sources = by_dtype.setdefault(dtype, ([], []))
            targets.append(target.view(dtype))
            sources.append(source.view(-1).view(dtype))
    for targets, sources in by_dtype.values():
        torch._foreach_copy_(targets, sources)
