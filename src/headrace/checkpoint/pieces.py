"""Tensors of a checkpoint that several ranks wrote, read by parts.

A sharded tensor lies in several files, one piece in each. A rank that needs a part of it reads the
rows of that part only, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from headrace.checkpoint.tensor_file import MappedFile
from headrace.errors import CheckpointError

#: An index or a size for each dimension.
Box = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor in one file; `offset` is where it begins in the whole tensor."""

    file: MappedFile
    shape: Box
    offset: Box


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on the disk. `part` reads a part of it."""

    name: str
    shape: Box
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def whole(self) -> torch.Tensor:
        return self.part((0,) * len(self.shape), self.shape)

    def part(self, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """The part of size `shape` that begins at `offset`, in new host memory."""
        result = torch.empty(tuple(shape), dtype=self.dtype, device="cpu")
        found = 0
        for piece in self.pieces:
            # The overlap of the wanted part and the piece, in the whole tensor's indices.
            begin = tuple(map(max, offset, piece.offset))
            end = tuple(
                min(wanted + size, stored + stored_size)
                for wanted, size, stored, stored_size in zip(
                    offset, shape, piece.offset, piece.shape, strict=True
                )
            )
            if all(first < last for first, last in zip(begin, end, strict=True)):
                target = result[_slices(begin, end, offset)]
                target.copy_(piece.file.part(self.name, _slices(begin, end, piece.offset)))
                found += target.numel()
        if found != result.numel():
            raise CheckpointError(
                f"{self.name}: its files hold {found} of the {result.numel()} elements from "
                f"{tuple(offset)} on"
            )
        return result


def _slices(begin: Sequence[int], end: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(first - zero, last - zero)
        for first, last, zero in zip(begin, end, origin, strict=True)
    )


class StoredTensors(Mapping[str, Any]):
    """The tensors of a checkpoint that several ranks wrote, by name.

    With `parts`, those that may be sharded are `StoredTensor`s. A name always gives the same
    object.
    """

    def __init__(self, files: Sequence[Path], content: Mapping[str, Any], *, parts: bool) -> None:
        self._files = list(files)
        self._whole: dict[str, int] = content["whole"]
        self._sharded: dict[str, Any] = content["sharded"]
        self._parts = parts
        self._open = cache(MappedFile)
        self._known: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            stored = self._find(name)
            # Random states and counters are small and never sharded.
            may_be_sharded = stored.dtype.is_floating_point and len(stored.shape) > 0
            self._known[name] = stored if self._parts and may_be_sharded else stored.whole()
        return self._known[name]

    def _find(self, name: str) -> StoredTensor:
        if name in self._whole:
            piece = self._piece(name, self._whole[name])
            return StoredTensor(name, piece.shape, piece.file.dtype(name), (piece,))
        fields = self._sharded[name]
        pieces = tuple(
            self._piece(name, number, tuple(offset)) for number, offset in fields["pieces"]
        )
        return StoredTensor(name, tuple(fields["shape"]), pieces[0].file.dtype(name), pieces)

    def _piece(self, name: str, number: int, offset: Box | None = None) -> Piece:
        file = self._open(self._files[number])
        shape = file.shape(name)
        return Piece(file, shape, (0,) * len(shape) if offset is None else offset)

    def __iter__(self) -> Iterator[str]:
        yield from (*self._whole, *self._sharded)

    def __len__(self) -> int:
        return len(self._whole) + len(self._sharded)
