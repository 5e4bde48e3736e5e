"""Tensors of a checkpoint whose parts lie in several files, read by the part that is wanted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from headrace.checkpoint.tensor_file import StoredEntry, read_entries, read_span
from headrace.errors import CheckpointError

Box = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor, in a file under the tensor's name: where it begins in the whole."""

    file: Path
    entry: StoredEntry
    offset: Box


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on the disk. `part` reads no more of it than the rows that it needs."""

    name: str
    shape: Box
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def whole(self) -> torch.Tensor:
        return self.part((0,) * len(self.shape), self.shape)

    def part(self, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """The elements from `offset` on, `shape` of them, in memory of their own on the host."""
        result = torch.empty(tuple(shape), dtype=self.dtype, device="cpu")
        found = 0
        for piece in self.pieces:
            begin = tuple(map(max, offset, piece.offset))
            end = tuple(
                min(mine + size, its + other)
                for mine, size, its, other in zip(
                    offset, shape, piece.offset, piece.entry.shape, strict=True
                )
            )
            if all(first < last for first, last in zip(begin, end, strict=True)):
                found += self._copy(piece, result, begin, end, offset)
        if found != result.numel():
            raise CheckpointError(
                f"{self.name}: its files hold {found} of the {result.numel()} elements from "
                f"{tuple(offset)} on"
            )
        return result

    def _copy(
        self, piece: Piece, result: torch.Tensor, begin: Box, end: Box, offset: Sequence[int]
    ) -> int:
        """Copy the elements from `begin` to `end`, in the whole's coordinates."""
        if not begin:
            result.copy_(read_span(piece.file, piece.entry, 0, 1).reshape(()))
            return 1
        # Rows lie one behind the other; within them all is read.
        row = math.prod(piece.entry.shape[1:])
        first, last = begin[0] - piece.offset[0], end[0] - piece.offset[0]
        rows = read_span(piece.file, piece.entry, first * row, last * row)
        rows = rows.view(last - first, *piece.entry.shape[1:])
        inside = (slice(None), *_slices(begin[1:], end[1:], piece.offset[1:]))
        target = result[_slices(begin, end, offset)]
        target.copy_(rows[inside])
        return target.numel()


def _slices(begin: Sequence[int], end: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(first - zero, last - zero)
        for first, last, zero in zip(begin, end, origin, strict=True)
    )


class StoredTensors(Mapping[str, Any]):
    """The tensors of a checkpoint of several ranks by name. With `parts` those that may be sharded
    are `StoredTensor`s. The same name gives the same object."""

    def __init__(self, files: Sequence[Path], content: Mapping[str, Any], *, parts: bool) -> None:
        self._files = list(files)
        self._whole: dict[str, int] = content["whole"]
        self._sharded: dict[str, Any] = content["sharded"]
        self._parts = parts
        self._entries = cache(read_entries)
        self._known: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            stored = self._find(name)
            # Random states and counters are small, and nobody wants a part of one.
            weights = stored.dtype.is_floating_point and len(stored.shape) > 0
            self._known[name] = stored if self._parts and weights else stored.whole()
        return self._known[name]

    def _find(self, name: str) -> StoredTensor:
        if name in self._whole:
            file = self._files[self._whole[name]]
            entry = self._entries(file)[name]
            origin = (0,) * len(entry.shape)
            return StoredTensor(name, entry.shape, entry.dtype, (Piece(file, entry, origin),))
        told = self._sharded[name]
        pieces = []
        for number, offset in told["pieces"]:
            file = self._files[number]
            pieces.append(Piece(file, self._entries(file)[name], tuple(offset)))
        return StoredTensor(name, tuple(told["shape"]), pieces[0].entry.dtype, tuple(pieces))

    def __iter__(self) -> Iterator[str]:
        yield from (*self._whole, *self._sharded)

    def __len__(self) -> int:
        return len(self._whole) + len(self._sharded)
