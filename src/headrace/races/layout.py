"""Which bytes of a storage a tensor covers, and whether two tensors share any."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

# A tensor in more pieces than this is taken as one piece, from its first byte to its last.
_MAX_RUNS = 100_000


class Layout(NamedTuple):
    """A strided tensor's place in its storage, in bytes: `low` inclusive, `high` exclusive.

    A tensor consists of pieces of `piece_bytes` adjacent bytes, repeated along `outer`: a (size,
    stride in bytes) for each dimension, the largest stride first. A contiguous tensor is one piece.
    """

    low: int
    high: int
    piece_bytes: int
    outer: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        if tensor.is_nested:
            return cls.whole(tensor.untyped_storage().nbytes())
        itemsize = tensor.element_size()
        low = int(tensor.storage_offset()) * itemsize
        if tensor.is_contiguous():
            return cls.whole(tensor.numel() * itemsize, low)
        outer = sorted(
            (
                (size, stride * itemsize)
                for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
                if size > 1 and stride != 0
            ),
            key=lambda dim: -dim[1],
        )
        high = low + sum((size - 1) * stride for size, stride in outer) + itemsize
        piece_bytes = itemsize
        while outer and outer[-1][1] == piece_bytes:
            piece_bytes *= outer.pop()[0]
        return cls(low, high, piece_bytes, tuple(outer))

    @classmethod
    def whole(cls, nbytes: int, low: int = 0) -> Layout:
        """One piece of `nbytes` bytes."""
        return cls(low, low + nbytes, nbytes)

    def moved(self, nbytes: int) -> Layout:
        """The same pieces, `nbytes` later."""
        return self._replace(low=self.low + nbytes, high=self.high + nbytes) if nbytes else self

    def covers(self, other: Layout) -> bool:
        """Whether every byte of `other` is certainly one of these."""
        if self == other:
            return True
        if self.low > other.low or other.high > self.high:
            return False
        return not self.outer or (self._is_exact() and len(self.runs) == 1)

    def overlaps(self, other: Layout) -> bool:
        if max(self.low, other.low) >= min(self.high, other.high):
            return False
        if not self.outer and not other.outer:
            return True
        if self._interleaves(other):
            return False
        answer = self._by_rows(other)
        if answer is not None:
            return answer
        mine, theirs = self.runs, other.runs
        i = j = 0
        while i < len(mine) and j < len(theirs):
            if mine[i][1] <= theirs[j][0]:
                i += 1
            elif theirs[j][1] <= mine[i][0]:
                j += 1
            else:
                return True
        return False

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The covered bytes as (start, end) ranges, in order."""
        return _runs(self)

    def _is_exact(self) -> bool:
        return math.prod(size for size, _ in self.outer) <= _MAX_RUNS

    def _by_rows(self, other: Layout) -> bool | None:
        """Whether the two overlap, if they can be compared row by row; else None. A row is what is
        left without the largest stride: two views of one matrix have the same rows, and of a piece
        against a matrix only the rows at its ends have to be looked at."""
        if not self.outer:
            return other._rows_overlap_piece(self)
        if not other.outer:
            return self._rows_overlap_piece(other)
        (rows, stride), (other_rows, other_stride) = self.outer[0], other.outer[0]
        first, mine = divmod(self.low, stride)
        other_first, theirs = divmod(other.low, stride)
        my_end, their_end = mine + self._row_bytes(), theirs + other._row_bytes()
        if stride != other_stride or my_end > stride or their_end > stride:
            return None  # a row may reach into the next one
        if max(first, other_first) >= min(first + rows, other_first + other_rows):
            return False
        row = Layout(mine, my_end, self.piece_bytes, self.outer[1:])
        return row.overlaps(Layout(theirs, their_end, other.piece_bytes, other.outer[1:]))

    def _rows_overlap_piece(self, piece: Layout) -> bool:
        (rows, stride), row_bytes = self.outer[0], self._row_bytes()
        # The rows that end after the piece begins, and begin before it ends.
        first = max(0, (piece.low - self.low - row_bytes) // stride + 1)
        last = min(rows - 1, (piece.high - 1 - self.low) // stride)
        inside = max(first, -((self.low - piece.low) // stride))  # the first to begin in the piece
        if inside <= last and self._row(inside).high <= piece.high:
            return True
        return any(self._row(number).overlaps(piece) for number in range(first, last + 1))

    def _row(self, number: int) -> Layout:
        low = self.low + number * self.outer[0][1]
        return Layout(low, low + self._row_bytes(), self.piece_bytes, self.outer[1:])

    def _row_bytes(self) -> int:
        rows, stride = self.outer[0]
        return self.high - self.low - (rows - 1) * stride

    def _interleaves(self, other: Layout) -> bool:
        """Whether the pieces of the two certainly alternate, as those of two columns of one matrix
        do: within a period that both share, each has its pieces at one offset only."""
        period = math.gcd(*(stride for _, stride in (*self.outer, *other.outer)))
        ahead = (other.low - self.low) % period if period else 0
        return self.piece_bytes <= ahead and ahead + other.piece_bytes <= period


@lru_cache(maxsize=8)  # few: one may hold 100,000 runs
def _runs(layout: Layout) -> tuple[tuple[int, int], ...]:
    if layout.low == layout.high:
        return ()
    if not layout._is_exact():
        return ((layout.low, layout.high),)
    starts = [layout.low]
    for size, stride in layout.outer:
        starts = [start + step * stride for start in starts for step in range(size)]
    merged: list[tuple[int, int]] = []
    for start in sorted(starts):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], start + layout.piece_bytes))
        else:
            merged.append((start, start + layout.piece_bytes))
    return tuple(merged)
