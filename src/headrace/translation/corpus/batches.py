"""Decides which sentence pairs make up which batch: a pure function of (seed, epoch).

Pairs of similar length go together, a number of sentences or of target tokens per batch. With
`shapes`, all batches have one of a few shapes, so that each can be captured as a graph; without it,
a batch is padded to its longest sentence. Batches do not depend on workers, nor on where a run was
interrupted: batch k of an epoch can be looked up directly.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import Dataset

from headrace.data import Buckets
from headrace.errors import PlanError
from headrace.text_table import counted
from headrace.translation.corpus.division import BatchSpec, IntArray
from headrace.translation.corpus.encoded import IdPairs
from headrace.translation.corpus.loader import PaddedBatches

# Pairs are sorted by length within pools of this many batches: large enough for little padding,
# small enough for batches that differ from epoch to epoch.
_POOL_BATCHES = 100


class EpochBatches:
    """The batches of one epoch, in order. `padding_share` is the share of their tokens that is
    padding, `shapes` how many different shapes they have."""

    def __init__(
        self, order: IntArray, ends: IntArray, padded_lengths: IntArray, lengths: IntArray
    ) -> None:
        self._order, self._ends, self._lengths = order, ends, padded_lengths
        rows = np.diff(ends, prepend=0)
        padded = int((rows * padded_lengths.sum(axis=1)).sum()) if len(ends) else 0
        self.padding_share = 1 - int(lengths[order].sum()) / padded if padded else 0.0
        self.shapes = len(
            {(int(n), *map(int, e)) for n, e in zip(rows, padded_lengths, strict=True)}
        )

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, batch: int) -> BatchSpec:
        start = int(self._ends[batch - 1]) if batch else 0
        source, target = self._lengths[batch]
        return BatchSpec(self._order[start : self._ends[batch]], (int(source), int(target)))

    def __str__(self) -> str:
        return (
            f"{counted(len(self), 'batch', 'batches')} per epoch, {counted(self.shapes, 'shape')}, "
            f"{self.padding_share:.1%} padding"
        )


class BatchPlan:
    """Cuts a corpus into batches, for any epoch.

    `lengths` is (pairs, 2), in tokens including bos and eos. A batch has `sentences` pairs or, if
    `tokens` is given, at most that many target tokens. `shapes` limits how many different shapes
    full batches have.
    """

    def __init__(
        self,
        lengths: IntArray,
        *,
        sentences: int = 30,
        tokens: int | None = None,
        shapes: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self._lengths = np.asarray(lengths, dtype=np.int64).reshape(-1, 2)
        longest = int(self._lengths[:, 1].max(initial=0))
        if tokens is not None and tokens < longest:
            raise PlanError(
                f"tokens = {tokens}: expected at least {longest}, the length of the longest "
                "target. A smaller max_length drops long pairs"
            )
        self._sentences, self._tokens, self._seed = sentences, tokens, seed
        self._shuffle = shuffle
        self.buckets: Buckets | None = None
        if shapes is not None and len(self._lengths):
            self.buckets = Buckets.choose(self._lengths, max_buckets=shapes)

    def epoch(self, epoch: int) -> EpochBatches:
        """The batches of this epoch."""
        random = np.random.default_rng([self._seed, epoch])
        if self.buckets is not None:
            order, ends, padded = self._by_bucket(self.buckets, random)
        else:
            order, ends, padded = self._by_length(random)
        if self._shuffle and len(ends):
            order, ends, padded = _reorder(order, ends, padded, random.permutation(len(ends)))
        return EpochBatches(order, ends, padded, self._lengths)

    def share(self, batch: BatchSpec, rank: int, ranks: int) -> BatchSpec:
        """The part of a batch that this rank trains on: every n-th pair, padded to the same
        lengths. All ranks together have the batch."""
        return BatchSpec(batch.indices[rank::ranks], batch.lengths)

    def dataset(self, pairs: IdPairs) -> Dataset[tuple[torch.Tensor, torch.Tensor]]:
        return PaddedBatches(pairs)

    def _by_length(self, random: np.random.Generator) -> tuple[IntArray, IntArray, IntArray]:
        """Pair indices in batch order, where each batch ends, and the lengths it is padded to."""
        count = len(self._lengths)
        order = random.permutation(count) if self._shuffle else np.arange(count)
        pool = self._sentences * _POOL_BATCHES
        if self._tokens is not None:
            mean = max(1.0, float(self._lengths[:, 1].mean())) if count else 1.0
            pool = max(1, int(self._tokens / mean)) * _POOL_BATCHES
        pool_of = np.arange(count) // pool
        sides = self._lengths[order]
        order = order[np.lexsort((sides[:, 0], sides[:, 1], pool_of))]
        ends = self._cut(self._lengths[order, 1])
        starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        padded = np.zeros((len(ends), 2), dtype=np.int64)
        if len(ends):
            padded = np.maximum.reduceat(self._lengths[order], starts, axis=0)
        return order, ends, padded

    def _by_bucket(
        self, buckets: Buckets, random: np.random.Generator
    ) -> tuple[IntArray, IntArray, IntArray]:
        """The same arrays, for batches whose pairs are all of one bucket."""
        bucket_of = buckets.of(self._lengths)
        orders, ends, padded, start = [], [], [], 0
        for bucket, lengths in enumerate(buckets.edges):
            members = np.flatnonzero(bucket_of == bucket)
            if self._shuffle:
                random.shuffle(members)
            rows = self._sentences if self._tokens is None else max(1, self._tokens // lengths[1])
            cuts = np.minimum(np.arange(rows, len(members) + rows, rows), len(members))
            orders.append(members)
            ends.append(cuts + start)
            padded.append(np.tile(np.array(lengths, dtype=np.int64), (len(cuts), 1)))
            start += len(members)
        return np.concatenate(orders), np.concatenate(ends), np.concatenate(padded)

    def _cut(self, targets: IntArray) -> IntArray:
        """Where each batch ends, given the target lengths in order."""
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


def _reorder(
    order: IntArray, ends: IntArray, padded: IntArray, batches: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    starts = np.concatenate([[0], ends[:-1]])
    pieces = [order[starts[batch] : ends[batch]] for batch in batches]
    return np.concatenate(pieces), np.cumsum([len(piece) for piece in pieces]), padded[batches]
