"""Few shapes for a loader of sequences: a CUDA graph is captured per shape, so shapes are dear.

    buckets = Buckets.choose(lengths, most=16)          # lengths: (n,), or (n, 2) for src and trg
    batches = BucketBatches(lengths, buckets, batch_size=30)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=PadToBuckets(buckets))

A bucket is an edge per side. A sample goes to the cheapest that holds it: the least sum of edges.
Waste is the share of padding in the tokens of all sides: 1 - real / padded.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

from headrace.errors import PlanError
from headrace.text_table import text_table

Whole: TypeAlias = NDArray[np.int64]

_LONGEST = 2**31 - 1  # so that a sum over as many samples still is an int64
_GRID_NODES = 2**13  # corners looked at where a sample has several sides: 90 × 90 of two


@dataclass(frozen=True)
class Buckets:
    """The shapes samples are padded to. Two with the same edges are equal."""

    edges: tuple[tuple[int, ...], ...]
    """(buckets, sides): the padded length of each side, in tokens; sorted."""
    waste: float = field(default=math.nan, compare=False)
    """Share of padding, 0 to 1, on the lengths they were chosen for; nan for edges made by hand."""

    def __post_init__(self) -> None:
        edges = np.unique(_checked("edges", self.edges), axis=0)
        object.__setattr__(self, "edges", tuple(tuple(map(int, edge)) for edge in edges))

    @classmethod
    def choose(cls, lengths: ArrayLike, most: int = 16, waste: float | None = None) -> Buckets:
        """Choose at most `most` buckets for `lengths`, (n,) or (n, sides), with little waste.

        With `waste`, as few buckets as reach that share; PlanError where `most` do not. With one
        side the choice is the best there is; with more, the best that a search by exchange finds.
        The same lengths give the same buckets, in whatever order they stand.
        """
        table = _checked("lengths", lengths)
        _check_whole("most", most, least=1)
        if waste is not None and not 0 <= waste <= 1:
            raise PlanError(f"waste: {waste!r}; expected a share from 0 to 1")
        search = _Line(table[:, 0]) if table.shape[1] == 1 else _Grid(table)
        _grow(search, most)
        found = _tight(search.edges(len(search.padded)), table)
        if waste is not None and found.waste > waste:
            enough = table.sum() / (1 - waste)
            _grow(search, 4 * most, enough)
            does = "would do" if search.padded[-1] <= enough else "do not either"
            raise PlanError(
                f"waste: {waste:g} is out of reach with most={most}, which come to "
                f"{found.waste:.4f}; {len(search.padded)} {does}"
            )
        if waste is not None:
            counts = range(1, len(search.padded))
            fewest = 1 + bisect_left(
                counts, True, key=lambda count: _tight(search.edges(count), table).waste <= waste
            )
            found = _tight(search.edges(fewest), table)
        return found

    def of(self, lengths: ArrayLike) -> Whole:
        """The bucket of each sample, as indices into `edges`, (n,); of equals, the first."""
        table, edges = _checked("lengths", lengths), np.array(self.edges)
        if table.shape[1] != edges.shape[1]:
            raise PlanError(f"lengths: {table.shape[1]} a sample; expected {edges.shape[1]}")
        bucket = _cheapest(edges, table)
        if (bucket < 0).any():
            index = int(np.argmax(bucket < 0))
            raise PlanError(f"lengths: sample {index} is {self._too_long(table[index])}")
        return bucket

    def _too_long(self, lengths: Whole) -> str:
        edges = np.array(self.edges)
        # A bucket that fits in another holds nothing more.
        most = " or ".join(_shown(e) for e in edges if (e <= edges).all(axis=1).sum() == 1)
        return f"{_shown(lengths)} long, and no bucket holds that; expected at most {most}"

    def __str__(self) -> str:
        sides = [f"side {number}" for number in range(1, len(self.edges[0]) + 1)]
        rows = [[index, *edge, sum(edge)] for index, edge in enumerate(self.edges)]
        table = text_table(["bucket", *sides, "tokens"], rows)
        return table if math.isnan(self.waste) else f"{table}\n waste: {self.waste:.1%}"


class BucketBatches(Sampler[list[int]]):
    """Batches of sample indices, each from one bucket: `DataLoader(batch_sampler=...)`.

    Every sample comes once an epoch. A bucket's last batch may be smaller; `drop_last` leaves it
    out. The order is a function of (seed, epoch) alone; the engine calls `set_epoch`.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        buckets: Buckets,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        _check_whole("batch_size", batch_size, least=1)
        _check_whole("seed", seed, least=0)
        self.batch_size, self.drop_last = batch_size, drop_last
        self.seed, self.epoch, self.shuffle = seed, 0, shuffle
        self._bucket = buckets.of(lengths)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is, from 0."""
        _check_whole("epoch", epoch, least=0)
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng((self.seed, self.epoch))
        order = np.arange(len(self._bucket))
        if self.shuffle:
            rng.shuffle(order)
        order = order[np.argsort(self._bucket[order], kind="stable")]
        batches: list[Whole] = []
        for group in np.split(order, np.cumsum(np.bincount(self._bucket))[:-1]):
            end = len(group) - len(group) % self.batch_size if self.drop_last else len(group)
            batches += [group[at : at + self.batch_size] for at in range(0, end, self.batch_size)]
        for index in rng.permutation(len(batches)) if self.shuffle else range(len(batches)):
            yield [int(sample) for sample in batches[index]]

    def __len__(self) -> int:
        spare = 0 if self.drop_last else self.batch_size - 1
        return int(((np.bincount(self._bucket) + spare) // self.batch_size).sum())


@dataclass(frozen=True)
class PadToBuckets:
    """A collate function: pads a list of samples to the cheapest bucket that holds them all.

    A sample is a sequence of ids (a 1-d tensor, an array, a list), or with several sides a tuple
    of them. Gives a (batch, edge) tensor, or a tuple of one per side. A batch from `BucketBatches`
    always gets the shape of its bucket.
    """

    buckets: Buckets
    pad: int = 0

    def __call__(self, samples: Sequence[Any]) -> torch.Tensor | tuple[torch.Tensor, ...]:
        sides = len(self.buckets.edges[0])
        rows = [[torch.as_tensor(ids) for ids in ((s,) if sides == 1 else s)] for s in samples]
        for index, row in enumerate(rows):
            shapes = [tuple(ids.shape) for ids in row]
            if len(row) != sides or any(len(shape) != 1 for shape in shapes):
                raise PlanError(f"sample {index}: shapes {shapes}; expected {sides} × (length,)")
        lengths = _checked("lengths", [[len(ids) for ids in row] for row in rows])
        longest = lengths.max(axis=0)
        bucket = int(_cheapest(np.array(self.buckets.edges), longest[None])[0])
        if bucket < 0:
            raise PlanError(f"the batch is up to {self.buckets._too_long(longest)}")
        padded = []
        for side, edge in enumerate(self.buckets.edges[bucket]):
            ids = torch.cat([row[side] for row in rows])
            real = torch.arange(edge) < torch.from_numpy(lengths[:, side, None])
            full = torch.full(real.shape, self.pad, dtype=ids.dtype)
            padded.append(full.masked_scatter_(real, ids))
        return padded[0] if sides == 1 else tuple(padded)


class _Line:
    """The best buckets for one side, by dynamic programming over its distinct lengths.

    With the lengths e[1] < e[2] < ... and c[j] samples up to e[j], k buckets for those cost
    best[j] = min over i < j of (best[i] of k - 1 buckets) + e[j] * (c[j] - c[i]). The best i only
    grows with j, so each is looked for between its neighbours': O(n log n) a bucket.
    """

    def __init__(self, lengths: Whole) -> None:
        self.values, counts = np.unique(lengths, return_counts=True)
        self.upto: Whole = np.concatenate([[0], np.cumsum(counts)])
        self.best: Whole = np.concatenate([[0], self.values * self.upto[1:]])
        self.starts: list[Whole] = [np.zeros_like(self.best)]
        self.padded = [int(self.best[-1])]  # tokens, with one bucket, two, ...

    def grow(self) -> bool:
        """Allow one bucket more; False if there is no use for it."""
        last = len(self.values)
        if len(self.starts) == last:
            return False
        best, start = np.zeros_like(self.best), np.zeros(last + 2, dtype=np.int64)
        start[last + 1] = last
        half = 1 << (last.bit_length() - 1)
        while half:  # all j halfway between two that are known, at once
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

    def edges(self, count: int) -> Whole:
        """The edges of `count` buckets, (count, 1)."""
        at, found = len(self.values), []
        for start in reversed(self.starts[:count]):
            found.append(self.values[at - 1])
            at = int(start[at])
        return np.array(found)[:, None]


class _Grid:
    """Good buckets for several sides: place one after the other, each where it saves most.

    Edges lie on the corners of a grid over the lengths. All corners are weighed at once: what one
    saves is a sum over the samples below it, and those are counted by cumulative sums.
    """

    def __init__(self, table: Whole) -> None:
        most = max(2, round(_GRID_NODES ** (1 / table.shape[1])))
        self.axes = [_ticks(side, most) for side in table.T]
        nodes = [np.searchsorted(axis, side) for axis, side in zip(self.axes, table.T, strict=True)]
        shape = tuple(map(len, self.axes))
        flat = np.ravel_multi_index(nodes, shape)
        self.samples = np.bincount(flat, minlength=math.prod(shape)).reshape(shape)
        self.price: Whole = sum(np.ix_(*self.axes), start=np.zeros((), dtype=np.int64))
        corner, padded = self._best_corner([])
        self.corners, self.padded = [corner], [padded]

    def grow(self) -> bool:
        """Place one bucket more; False if there is no use for it."""
        corner, padded = self._best_corner(self.corners)
        if padded == self.padded[-1]:
            return False
        self.corners.append(corner)
        self.padded.append(padded)
        return True

    def edges(self, count: int) -> Whole:
        """The edges of `count` buckets, (count, sides), each moved to where it is best."""
        corners, padded, before = self.corners[:count], self.padded[count - 1], math.inf
        while padded < before:
            before = padded
            for index in range(count):
                corner, cost = self._best_corner(corners[:index] + corners[index + 1 :])
                if cost < padded:
                    corners[index], padded = corner, cost
        return np.array([[axis[i] for axis, i in zip(self.axes, c, strict=True)] for c in corners])

    def _best_corner(self, others: list[tuple[int, ...]]) -> tuple[tuple[int, ...], int]:
        """Where to put a bucket beside `others`, and the padded tokens with it."""
        others = sorted(others, key=lambda corner: -self.price[corner])
        holder = np.zeros(self.samples.shape, dtype=np.int64)  # 0: no other holds it
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
        # What no other holds, this one must.
        padded[below[0] < total[0]] = np.iinfo(np.int64).max
        best = np.unravel_index(int(np.argmin(padded)), padded.shape)
        return tuple(map(int, best)), int(padded[best])


def _grow(search: _Line | _Grid, most: int, enough: float = 0) -> None:
    """Look for more buckets, until there are `most` or they need no more than `enough` tokens."""
    while len(search.padded) < most and search.padded[-1] > enough and search.grow():
        pass


def _ticks(lengths: Whole, most: int) -> Whole:
    """The distinct lengths, or `most` of them with about as many tokens between each two."""
    values, counts = np.unique(lengths, return_counts=True)
    upto = np.cumsum(values * counts)
    at = np.searchsorted(upto, upto[-1] / most * np.arange(1, most))
    return values if len(values) <= most else values[np.unique([*at, -1 + len(values)])]


def _tight(edges: Whole, table: Whole) -> Buckets:
    """Buckets no longer than the samples that go there; those nobody goes to are left out."""
    before = None
    while before is None or not np.array_equal(edges, before):
        before, bucket = edges, _cheapest(edges, table)
        held = [table[bucket == index].max(axis=0) for index in np.unique(bucket)]
        edges = np.unique(np.stack(held), axis=0)
    padded = edges.sum(axis=1)[bucket].sum()
    return Buckets(tuple(map(tuple, edges)), 1 - int(table.sum()) / int(padded))


def _cheapest(edges: Whole, table: Whole) -> Whole:
    """The cheapest of `edges` that holds each row of `table`; the first of equals; -1 for none."""
    bucket = np.full(len(table), -1)
    # From the dearest to the cheapest: the last that holds a sample has it.
    for index in np.argsort(edges.sum(axis=1), kind="stable")[::-1]:
        bucket[(table <= edges[index]).all(axis=1)] = index
    return bucket


def _checked(name: str, lengths: ArrayLike) -> Whole:
    """The lengths as an (n, sides) table of whole numbers."""
    try:
        table = np.asarray(lengths)
    except ValueError as error:
        raise PlanError(f"{name}: rows of different length; expected (n,) or (n, sides)") from error
    if table.ndim not in (1, 2) or table.size == 0:
        raise PlanError(f"{name}: shape {table.shape}; expected (n,) or (n, sides), and n > 0")
    if table.dtype.kind not in "iu":
        raise PlanError(f"{name}: of type {table.dtype}; expected whole numbers")
    table = table.reshape(len(table), -1)
    wrong = ((table < 1) | (table > _LONGEST)).any(axis=1)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise PlanError(f"{name}[{at}]: {_shown(table[at])}; expected 1 to {_LONGEST:,}")
    return table.astype(np.int64)


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PlanError(f"{name}: {value!r}; expected a whole number from {least}")


def _shown(lengths: Whole) -> str:
    """7, or (7, 9)."""
    return str(lengths[0]) if len(lengths) == 1 else f"({', '.join(map(str, lengths))})"
