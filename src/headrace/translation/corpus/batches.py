"""Which sentence pairs make up which batch: a pure function of (seed, epoch).

Pairs of like length go together, by sentences (30 a batch) or by target tokens. With `shapes`,
every batch has one of a few shapes, so that each can be captured as a graph; without, a batch is as
long as its longest sentence. Nothing depends on workers, on what was loaded before or on where a
run was interrupted: batch k of an epoch is found by looking it up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from headrace.data import Buckets
from headrace.errors import PlanError
from headrace.plan import LoaderPlan
from headrace.runs import ignore_foreign_sigterm
from headrace.translation.corpus.encoded import IdPairs

Whole = NDArray[np.int64]
# Pairs are sorted by length within pools of so many batches: enough for little padding, and the
# batches still differ from epoch to epoch.
_POOL_BATCHES = 100


@dataclass(frozen=True)
class BatchSpec:
    """One batch: which pairs, and the lengths (source, target) they are padded to."""

    indices: Whole
    edges: tuple[int, int]


class EpochBatches:
    """The batches of one epoch, in order. `waste` is the share of padding in all their tokens."""

    def __init__(self, order: Whole, ends: Whole, edges: Whole, lengths: Whole) -> None:
        self._order, self._ends, self._edges = order, ends, edges
        rows = np.diff(ends, prepend=0)
        padded = int((rows * edges.sum(axis=1)).sum()) if len(ends) else 0
        self.waste = 1 - int(lengths[order].sum()) / padded if padded else 0.0
        self.shapes = len({(int(n), *map(int, e)) for n, e in zip(rows, edges, strict=True)})

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, batch: int) -> BatchSpec:
        start = int(self._ends[batch - 1]) if batch else 0
        source, target = self._edges[batch]
        return BatchSpec(self._order[start : self._ends[batch]], (int(source), int(target)))


class BatchPlan:
    """How a corpus is cut into batches.

    `lengths` is (pairs, 2), in tokens with their markers. Batches have `sentences` pairs, or at
    most `tokens` target tokens if that is given. `shapes` bounds how many shapes full batches have.
    """

    def __init__(
        self,
        lengths: Whole,
        *,
        sentences: int = 30,
        tokens: int | None = None,
        shapes: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        for name, value in (("sentences", sentences), ("tokens", tokens), ("shapes", shapes)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise PlanError(f"{name} = {value!r}: expected a whole number, 1 or more")
        self._lengths = np.asarray(lengths, dtype=np.int64).reshape(-1, 2)
        longest = int(self._lengths[:, 1].max(initial=0))
        if tokens is not None and tokens < longest:
            raise PlanError(
                f"tokens = {tokens}: expected {longest} or more, the length of the longest target"
            )
        self._sentences, self._tokens, self._seed = sentences, tokens, seed
        self._shuffle = shuffle
        self.buckets: Buckets | None = None
        if shapes is not None and len(self._lengths):
            self.buckets = Buckets.choose(self._lengths, max_buckets=shapes)

    def epoch(self, epoch: int) -> EpochBatches:
        random = np.random.default_rng([self._seed, epoch])
        if self.buckets is not None:
            order, ends, edges = self._by_bucket(self.buckets, random)
        else:
            order, ends, edges = self._by_length(random)
        if self._shuffle and len(ends):
            order, ends, edges = _reordered(order, ends, edges, random.permutation(len(ends)))
        return EpochBatches(order, ends, edges, self._lengths)

    def _by_length(self, random: np.random.Generator) -> tuple[Whole, Whole, Whole]:
        count = len(self._lengths)
        order = random.permutation(count) if self._shuffle else np.arange(count)
        pool = self._sentences * _POOL_BATCHES
        if self._tokens is not None:
            mean = max(1.0, float(self._lengths[:, 1].mean())) if count else 1.0
            pool = max(1, int(self._tokens / mean)) * _POOL_BATCHES
        rank = np.arange(count) // pool
        sides = self._lengths[order]
        order = order[np.lexsort((sides[:, 0], sides[:, 1], rank))]
        ends = self._cut(self._lengths[order, 1])
        starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        edges = np.zeros((len(ends), 2), dtype=np.int64)
        if len(ends):
            edges = np.maximum.reduceat(self._lengths[order], starts, axis=0)
        return order, ends, edges

    def _by_bucket(
        self, buckets: Buckets, random: np.random.Generator
    ) -> tuple[Whole, Whole, Whole]:
        bucket_of = buckets.of(self._lengths)
        orders, ends, edges, start = [], [], [], 0
        for bucket, edge in enumerate(buckets.edges):
            members = np.flatnonzero(bucket_of == bucket)
            if self._shuffle:
                random.shuffle(members)
            rows = self._sentences if self._tokens is None else max(1, self._tokens // edge[1])
            cuts = np.minimum(np.arange(rows, len(members) + rows, rows), len(members))
            orders.append(members)
            ends.append(cuts + start)
            edges.append(np.tile(np.array(edge, dtype=np.int64), (len(cuts), 1)))
            start += len(members)
        return np.concatenate(orders), np.concatenate(ends), np.concatenate(edges)

    def _cut(self, targets: Whole) -> Whole:
        """Where batches end, over target lengths in the order they come."""
        count = len(targets)
        if self._tokens is None:
            cuts = np.arange(self._sentences, count + self._sentences, self._sentences)
            return np.minimum(cuts, count)
        ends, total = [], 0
        for at, length in enumerate(targets):
            if total + length > self._tokens:
                ends.append(at)
                total = 0
            total += int(length)
        return np.array([*ends, count] if count else [], dtype=np.int64)


def _reordered(
    order: Whole, ends: Whole, edges: Whole, batches: Whole
) -> tuple[Whole, Whole, Whole]:
    starts = np.concatenate([[0], ends[:-1]])
    pieces = [order[starts[batch] : ends[batch]] for batch in batches]
    return np.concatenate(pieces), np.cumsum([len(piece) for piece in pieces]), edges[batches]


class PlannedSampler(Sampler[BatchSpec]):
    """Gives a DataLoader the batches of an epoch, from the `start`-th on: of each the `share`
    (rank, ranks) of its pairs, every ranks-th one. Those of all ranks make up the batch that one
    process alone would have, at the same lengths.

    The engine calls `set_epoch`; `start_at` is for the epoch that a run goes on with, no other.
    """

    def __init__(self, plan: BatchPlan, share: tuple[int, int] = (0, 1)) -> None:
        self._plan = plan
        self._share = share
        self._epoch = 0
        self._start = 0
        self.batches = plan.epoch(0)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._start = epoch, 0
            self.batches = self._plan.epoch(epoch)

    def start_at(self, batch: int) -> None:
        self._start = batch

    def __iter__(self) -> Iterator[BatchSpec]:
        batches = self.batches
        return (self._own(batches[at]) for at in range(self._start, len(batches)))

    def _own(self, batch: BatchSpec) -> BatchSpec:
        rank, ranks = self._share
        return BatchSpec(batch.indices[rank::ranks], batch.edges)

    def __len__(self) -> int:
        return len(self.batches) - self._start


class PaddedBatches(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Makes the tensors of a batch: source and target ids, (rows, edge) each, 0 where padded. One
    without pairs, a rank's share of a small batch, has a row of padding, which counts nothing."""

    def __init__(self, pairs: IdPairs) -> None:
        self._pairs = pairs

    def __getitem__(self, spec: BatchSpec) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [self._pairs[int(index)] for index in spec.indices]
        shapes = [(max(1, len(rows)), edge) for edge in spec.edges]
        source, target = (np.zeros(shape, dtype=np.int64) for shape in shapes)
        for row, (src, trg) in enumerate(rows):
            source[row, : len(src)] = src
            target[row, : len(trg)] = trg
        return torch.from_numpy(source), torch.from_numpy(target)


def make_loader(
    pairs: IdPairs,
    plan: BatchPlan,
    loader: LoaderPlan,
    *,
    pin: bool,
    timeout_s: float = 0,
    share: tuple[int, int] = (0, 1),
) -> DataLoader[Any]:
    """A DataLoader over a plan's batches. Workers, if any, live as long as it does."""
    workers = loader.workers or 0
    return DataLoader(
        PaddedBatches(pairs),
        sampler=PlannedSampler(plan, share),
        batch_size=None,
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=loader.prefetch_factor if workers else None,
        persistent_workers=workers > 0,
        timeout=timeout_s if workers else 0,
        worker_init_fn=ignore_foreign_sigterm,
        # Its own: a worker's seed must not be drawn from the generator that dropout uses.
        generator=torch.Generator().manual_seed(0),
    )
