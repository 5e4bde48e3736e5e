"""Finds good buckets: the best for one side, good ones for several."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int64]


_GRID_CORNERS = 2**13  # for samples with several sides; with two sides, a grid of 90 × 90


class LineSearch:
    """The optimal buckets for one side, by dynamic programming over its distinct lengths.

    Let e[1] < e[2] < ... be the lengths, and c[j] the number of samples no longer than e[j]. Then k
    buckets for those samples cost best[j] tokens, the minimum over i < j of
    best[i] with k - 1 buckets + e[j] * (c[j] - c[i]). The best i never falls as j grows, so each is
    searched for between those of its neighbors: O(n log n) for each bucket.
    """

    def __init__(self, lengths: IntArray) -> None:
        self.values, counts = np.unique(lengths, return_counts=True)
        self.upto: IntArray = np.concatenate([[0], np.cumsum(counts)])
        self.best: IntArray = np.concatenate([[0], self.values * self.upto[1:]])
        self.starts: list[IntArray] = [np.zeros_like(self.best)]
        self.padded = [int(self.best[-1])]  # tokens with one bucket, with two, ...

    def grow(self) -> bool:
        """Allow one more bucket. Returns False if it would not help."""
        last = len(self.values)
        if len(self.starts) == last:
            return False
        best, start = np.zeros_like(self.best), np.zeros(last + 2, dtype=np.int64)
        start[last + 1] = last
        half = 1 << (last.bit_length() - 1)
        while half:  # at once, all j that are halfway between two known ones
            j = np.arange(half, last + 1, 2 * half)
            low = start[j - half]
            size = np.minimum(start[np.minimum(j + half, last + 1)], j - 1) - low + 1
            first = np.cumsum(size) - size
            i = np.arange(size.sum()) + np.repeat(low - first, size)
            edge = self.values[j - 1]
            cost = self.best[i] - np.repeat(edge, size) * self.upto[i]
            least = np.minimum.reduceat(cost, first)
            hits = np.flatnonzero(cost == np.repeat(least, size))
            start[j] = i[hits[np.searchsorted(hits, first)]]
            best[j] = least + edge * self.upto[j]
            half //= 2
        self.best = best
        self.starts.append(start)
        self.padded.append(int(best[-1]))
        return True

    def edges(self, count: int) -> IntArray:
        """The edges of `count` buckets, (count, 1)."""
        at, found = len(self.values), []
        for start in reversed(self.starts[:count]):
            found.append(self.values[at - 1])
            at = int(start[at])
        return np.array(found)[:, None]


class GridSearch:
    """Good buckets for several sides: added one by one, each where it saves the most padding.

    Candidates are the corners of a grid over the lengths. What a corner saves is a sum over the
    samples that fit in it; cumulative sums give this for all corners at once.
    """

    def __init__(self, table: IntArray) -> None:
        limit = max(2, round(_GRID_CORNERS ** (1 / table.shape[1])))
        self.axes = [_ticks(side, limit) for side in table.T]
        nodes = [np.searchsorted(axis, side) for axis, side in zip(self.axes, table.T, strict=True)]
        shape = tuple(map(len, self.axes))
        flat = np.ravel_multi_index(nodes, shape)
        self.samples = np.bincount(flat, minlength=math.prod(shape)).reshape(shape)
        self.price: IntArray = sum(np.ix_(*self.axes), start=np.zeros((), dtype=np.int64))
        corner, padded = self._best_corner([])
        self.corners, self.padded = [corner], [padded]

    def grow(self) -> bool:
        """Add one more bucket. Returns False if it would not help."""
        corner, padded = self._best_corner(self.corners)
        if padded == self.padded[-1]:
            return False
        self.corners.append(corner)
        self.padded.append(padded)
        return True

    def edges(self, count: int) -> IntArray:
        """The edges of `count` buckets, (count, sides), each moved to its best corner."""
        corners, padded, before = self.corners[:count], self.padded[count - 1], math.inf
        while padded < before:
            before = padded
            for index in range(count):
                corner, cost = self._best_corner(corners[:index] + corners[index + 1 :])
                if cost < padded:
                    corners[index], padded = corner, cost
        return np.array([[axis[i] for axis, i in zip(self.axes, c, strict=True)] for c in corners])

    def _best_corner(self, others: list[tuple[int, ...]]) -> tuple[tuple[int, ...], int]:
        """The best corner for a bucket in addition to `others`, and the padded tokens with it."""
        others = sorted(others, key=lambda corner: -self.price[corner])
        holder = np.zeros(self.samples.shape, dtype=np.int64)  # 0: fits in no other
        for number, corner in enumerate(others, 1):
            holder[tuple(slice(at + 1) for at in corner)] = number
        below = np.zeros((len(others) + 1, *self.samples.shape), dtype=np.int64)
        np.put_along_axis(below, holder[None], self.samples[None], axis=0)
        for axis in range(1, below.ndim):
            np.cumsum(below, axis=axis, out=below)
        total = below.reshape(len(below), -1)[:, -1]
        padded = total[0] * self.price
        for number, corner in enumerate(others, 1):
            old = self.price[corner]
            padded += total[number] * old - below[number] * np.maximum(old - self.price, 0)
        # This bucket must hold all samples that fit in no other.
        padded[below[0] < total[0]] = np.iinfo(np.int64).max
        best = np.unravel_index(int(np.argmin(padded)), padded.shape)
        return tuple(map(int, best)), int(padded[best])


def grow(search: LineSearch | GridSearch, limit: int, enough: float = 0) -> None:
    """Add buckets until there are `limit`, or until they need no more than `enough` tokens."""
    while len(search.padded) < limit and search.padded[-1] > enough and search.grow():
        pass


def _ticks(lengths: IntArray, limit: int) -> IntArray:
    """At most `limit` of the distinct lengths: all of them, or a choice with about the same number
    of tokens between neighbors."""
    values, counts = np.unique(lengths, return_counts=True)
    upto = np.cumsum(values * counts)
    at = np.searchsorted(upto, upto[-1] / limit * np.arange(1, limit))
    return values if len(values) <= limit else values[np.unique([*at, -1 + len(values)])]
