"""Buckets: sequences padded to a few shapes. Each shape needs a CUDA graph of its own.

    buckets = Buckets.choose(lengths, max_buckets=16)   # lengths: (n,), or (n, 2) for src and trg
    batches = BucketBatches(lengths, buckets, batch_size=30)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=PadToBuckets(buckets))

A sample has one or more sides (src and trg, say). A bucket has an edge for each side: the length to
which it is padded. Of the buckets that a sample fits in, it goes to the smallest: the one with the
least sum of edges. Waste is the share of padding among the tokens of all sides: 1 - real / padded.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch.utils.data import Sampler

from headrace.data.bucket_search import GridSearch, IntArray, LineSearch, grow
from headrace.errors import PlanError
from headrace.schema import require_whole
from headrace.text_table import text_table

_MAX_LENGTH = 2**31 - 1  # a sum over 2**31 samples still fits in an int64


@dataclass(frozen=True)
class Buckets:
    """The shapes that samples are padded to. Buckets with the same edges are equal."""

    edges: tuple[tuple[int, ...], ...]
    """(buckets, sides): the padded length of each side, in tokens; sorted."""
    waste: float = field(default=math.nan, compare=False)
    """Share of padding, 0 to 1, for the lengths in `choose`; nan if the edges were set by hand."""

    def __post_init__(self) -> None:
        edges = np.unique(_checked("edges", self.edges), axis=0)
        object.__setattr__(self, "edges", tuple(tuple(map(int, edge)) for edge in edges))

    @classmethod
    def choose(
        cls,
        lengths: ArrayLike,
        max_buckets: int = 16,
        waste: float | None = None,
    ) -> Buckets:
        """Choose up to `max_buckets` buckets for `lengths`, (n,) or (n, sides), with little waste.

        With `waste`, choose as few buckets as keep the waste at or under that share; raise
        `PlanError` if `max_buckets` are too few. With one side the choice is optimal; with more, it
        is what a greedy search with exchanges finds. It does not depend on the order of `lengths`.
        """
        table = _checked("lengths", lengths)
        require_whole("max_buckets", max_buckets, 1, PlanError)
        if waste is not None and not 0 <= waste <= 1:
            raise PlanError(f"waste: {waste!r}; expected a share from 0 to 1")
        search = LineSearch(table[:, 0]) if table.shape[1] == 1 else GridSearch(table)
        grow(search, max_buckets)
        found = _tight(search.edges(len(search.padded)), table)
        if waste is not None and found.waste > waste:
            enough = table.sum() / (1 - waste)
            grow(search, 4 * max_buckets, enough)
            outcome = "would be enough" if search.padded[-1] <= enough else "would not be enough"
            raise PlanError(
                f"waste: {waste:g} cannot be reached with max_buckets={max_buckets}, which waste "
                f"{found.waste:.4f}; {len(search.padded)} buckets {outcome}"
            )
        if waste is not None:
            counts = range(1, len(search.padded))
            fewest = 1 + bisect_left(
                counts, True, key=lambda count: _tight(search.edges(count), table).waste <= waste
            )
            found = _tight(search.edges(fewest), table)
        return found

    def of(self, lengths: ArrayLike) -> IntArray:
        """The bucket of each sample as an index into `edges`, (n,)."""
        table, edges = _checked("lengths", lengths), np.array(self.edges)
        if table.shape[1] != edges.shape[1]:
            raise PlanError(f"lengths: {table.shape[1]} per sample; expected {edges.shape[1]}")
        bucket = _cheapest(edges, table)
        if (bucket < 0).any():
            index = int(np.argmax(bucket < 0))
            raise PlanError(f"lengths: sample {index} is {self._too_long(table[index])}")
        return bucket

    def _too_long(self, lengths: IntArray) -> str:
        edges = np.array(self.edges)
        # Only the buckets that fit in no other.
        largest = " or ".join(_shown(e) for e in edges if (e <= edges).all(axis=1).sum() == 1)
        return f"{_shown(lengths)} long, which fits in no bucket; expected at most {largest}"

    def __str__(self) -> str:
        sides = [f"side {number}" for number in range(1, len(self.edges[0]) + 1)]
        rows = [[index, *edge, sum(edge)] for index, edge in enumerate(self.edges)]
        table = text_table(["bucket", *sides, "tokens"], rows)
        return table if math.isnan(self.waste) else f"{table}\n waste: {self.waste:.1%}"


class BucketBatches(Sampler[list[int]]):
    """A batch sampler whose batches each come from one bucket: `DataLoader(batch_sampler=...)`.

    Every sample comes once an epoch. A bucket's last batch may be smaller; `drop_last` leaves it
    out. The order depends on seed and epoch only; the engine calls `set_epoch`.
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
        require_whole("batch_size", batch_size, 1, PlanError)
        require_whole("seed", seed, 0, PlanError)
        self.batch_size, self.drop_last = batch_size, drop_last
        self.seed, self.epoch, self.shuffle = seed, 0, shuffle
        self._bucket = buckets.of(lengths)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0, for the next iteration."""
        require_whole("epoch", epoch, 0, PlanError)
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng((self.seed, self.epoch))
        order = np.arange(len(self._bucket))
        if self.shuffle:
            rng.shuffle(order)
        order = order[np.argsort(self._bucket[order], kind="stable")]
        batches: list[IntArray] = []
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
    """A collate function that pads a list of samples to the smallest bucket that they all fit in.

    A sample is a sequence of ids (a 1-d tensor, an array, a list), or with several sides a tuple of
    them. Returns a (batch, edge) tensor, or a tuple of one for each side. A batch from
    `BucketBatches` always gets the shape of its bucket.
    """

    buckets: Buckets
    pad: int = 0

    def __call__(self, samples: Sequence[Any]) -> torch.Tensor | tuple[torch.Tensor, ...]:
        sides = len(self.buckets.edges[0])
        rows = [
            [torch.as_tensor(ids, device="cpu") for ids in ((s,) if sides == 1 else s)]
            for s in samples
        ]
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
            real = torch.arange(edge, device="cpu") < torch.from_numpy(lengths[:, side, None])
            full = torch.full(real.shape, self.pad, dtype=ids.dtype, device="cpu")
            padded.append(full.masked_scatter_(real, ids))
        return padded[0] if sides == 1 else tuple(padded)


def _tight(edges: IntArray, table: IntArray) -> Buckets:
    """Shrink each bucket to the longest of its samples, and leave out those without samples."""
    before = None
    while before is None or not np.array_equal(edges, before):
        before, bucket = edges, _cheapest(edges, table)
        held = [table[bucket == index].max(axis=0) for index in np.unique(bucket)]
        edges = np.unique(np.stack(held), axis=0)
    padded = edges.sum(axis=1)[bucket].sum()
    return Buckets(tuple(map(tuple, edges)), 1 - int(table.sum()) / int(padded))


def _cheapest(edges: IntArray, table: IntArray) -> IntArray:
    """For each row of `table`, the index of the smallest of `edges` that it fits in, or -1."""
    bucket = np.full(len(table), -1)
    # From the largest to the smallest: the last one that a sample fits in counts.
    for index in np.argsort(edges.sum(axis=1), kind="stable")[::-1]:
        bucket[(table <= edges[index]).all(axis=1)] = index
    return bucket


def _checked(name: str, lengths: ArrayLike) -> IntArray:
    """Check `lengths` and return them as an (n, sides) table."""
    try:
        table = np.asarray(lengths)
    except ValueError as error:
        raise PlanError(f"{name}: rows of different length; expected (n,) or (n, sides)") from error
    if table.ndim not in (1, 2) or table.size == 0:
        raise PlanError(f"{name}: shape {table.shape}; expected (n,) or (n, sides), and n > 0")
    if table.dtype.kind not in "iu":
        raise PlanError(f"{name}: of type {table.dtype}; expected whole numbers")
    table = table.reshape(len(table), -1)
    wrong = ((table < 1) | (table > _MAX_LENGTH)).any(axis=1)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise PlanError(f"{name}[{at}]: {_shown(table[at])}; expected 1 to {_MAX_LENGTH:,}")
    return table.astype(np.int64)


def _shown(lengths: IntArray) -> str:
    """7, or (7, 9)."""
    return str(lengths[0]) if len(lengths) == 1 else f"({', '.join(map(str, lengths))})"
