"""Which bytes of a storage a tensor covers, and whether two tensors share any."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

# A tensor in more pieces than this is taken as one stretch from its first byte to its last.
_MOST_RUNS = 100_000


@dataclass(frozen=True)
class Layout:
    """A strided tensor's place in its storage, in bytes: `low` inclusive, `high` exclusive."""

    low: int
    high: int
    dims: tuple[tuple[int, int], ...]  # (size, stride in bytes), outermost first; none of size 1
    itemsize: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        itemsize = tensor.element_size()
        low = int(tensor.storage_offset()) * itemsize
        if tensor.numel() == 0:
            return cls(low, low, (), itemsize)
        dims = tuple(
            sorted(
                (
                    (size, stride * itemsize)
                    for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
                    if size > 1 and stride != 0
                ),
                key=lambda dim: -dim[1],
            )
        )
        return cls(low, low + sum((n - 1) * s for n, s in dims) + itemsize, dims, itemsize)

    @classmethod
    def whole(cls, nbytes: int) -> Layout:
        return cls(0, nbytes, ((nbytes, 1),) if nbytes > 1 else (), 1)

    def covers(self, other: Layout) -> bool:
        """Whether every byte of `other` is certainly one of these."""
        if self == other:
            return True
        within = self.low <= other.low and other.high <= self.high
        return within and self._exact and len(self.runs) == 1

    def overlaps(self, other: Layout) -> bool:
        if self.low >= other.high or other.low >= self.high or self._interleaves(other):
            return False
        mine, theirs = self.runs, other.runs
        at = beside = 0
        while at < len(mine) and beside < len(theirs):
            if mine[at][1] <= theirs[beside][0]:
                at += 1
            elif theirs[beside][1] <= mine[at][0]:
                beside += 1
            else:
                return True
        return False

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The covered bytes as (start, end) stretches in order."""
        if self.low == self.high:
            return ()
        if not self._exact:
            return ((self.low, self.high),)
        stretch, outer = self._pieces
        starts = [self.low]
        for size, stride in outer:
            starts = [start + step * stride for start in starts for step in range(size)]
        merged: list[tuple[int, int]] = []
        for start in sorted(starts):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], start + stretch))
            else:
                merged.append((start, start + stretch))
        return tuple(merged)

    @cached_property
    def _pieces(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """The bytes that lie together, and the dims by which such pieces are repeated."""
        stretch = self.itemsize
        outer: list[tuple[int, int]] = []
        for size, stride in reversed(self.dims):
            if not outer and stride == stretch:
                stretch *= size
            else:
                outer.append((size, stride))
        return stretch, tuple(outer)

    @cached_property
    def _exact(self) -> bool:
        return math.prod(size for size, _ in self._pieces[1]) <= _MOST_RUNS

    def _interleaves(self, other: Layout) -> bool:
        """Whether the two certainly pass each other by, as two columns of one matrix do: all
        pieces of each lie at the same place within a period that both share."""
        (mine, my_dims), (theirs, their_dims) = self._pieces, other._pieces
        period = math.gcd(*(stride for _, stride in (*my_dims, *their_dims)))
        ahead = (other.low - self.low) % period if period else 0
        return mine <= ahead and ahead + theirs <= period
