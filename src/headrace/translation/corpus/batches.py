"""Decides which sentence pairs make up which batch: a pure function of (seed, epoch).

Pairs of similar length go together, a number of sentences or of target tokens per batch. With
`shapes`, all batches have one of a few shapes, so that each can be captured as a graph; without it,
a batch is padded to its longest sentence. Batches do not depend on workers, nor on where a run was
interrupted: batch k of an epoch can be looked up directly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from headrace.data import Buckets
from headrace.errors import PlanError
from headrace.lifecycle import ignore_foreign_sigterm
from headrace.plan import LoaderPlan
from headrace.text_table import counted
from headrace.translation.corpus.encoded import IdPairs

IntArray = NDArray[np.int64]
# Pairs are sorted by length within pools of this many batches: large enough for little padding,
# small enough for batches that differ from epoch to epoch.
_POOL_BATCHES = 100


@dataclass(frozen=True)
class BatchSpec:
    """One batch: the indices of its pairs, and the lengths (src, trg) they are padded to."""

    indices: IntArray
    lengths: tuple[int, int]


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


class EpochPlan(Protocol):
    """The batches of one epoch, in order. As text, it says how many there are and how full."""

    @property
    def shapes(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, batch: int) -> BatchSpec: ...


class Batching(Protocol):
    """Decides about batches: a `BatchPlan`, or a `PackedPlan`."""

    def epoch(self, epoch: int) -> EpochPlan: ...

    def share(self, batch: BatchSpec, rank: int, ranks: int) -> BatchSpec: ...

    def dataset(self, pairs: IdPairs) -> Dataset[Any]: ...


class Division(NamedTuple):
    """Identifies how an epoch is divided into batches. A position in the epoch is only valid in the
    same division. It does not depend on the ranks that share the batches."""

    batches: int
    digest: str  # of the indices of all pairs, batch by batch

    @classmethod
    def of(cls, batches: EpochPlan) -> Division:
        digest = hashlib.blake2b(digest_size=8)
        for number in range(len(batches)):
            indices = batches[number].indices
            digest.update(len(indices).to_bytes(8, "little"))
            digest.update(indices.astype("<i8").tobytes())
        return cls(len(batches), digest.hexdigest())

    def __str__(self) -> str:
        return f"{counted(self.batches, 'batch', 'batches')} (digest {self.digest})"


class PlannedSampler(Sampler[BatchSpec]):
    """Gives a DataLoader the batches of an epoch.

    `share` is (rank, number of ranks). Together the ranks have the batch that a single process
    would have.

    The engine calls `set_epoch`. `start_at` sets the first batch of the current epoch only. In the
    middle of an epoch a thread begins to plan the next one, so that nobody has to wait for it. If
    the sampler `continues`, it then goes on with that epoch, without an end.
    """

    def __init__(
        self, plan: Batching, share: tuple[int, int] = (0, 1), *, continues: bool = False
    ) -> None:
        self._plan = plan
        self._share = share
        self._continues = continues
        self._epoch = 0
        self._start = 0
        self._has_epochs = False  # whether `set_epoch` is called at all
        self._planner = ThreadPoolExecutor(1, "planner")  # starts its thread when it is first used
        self._ahead: tuple[int, Future[EpochPlan]] | None = None
        self._division: Division | None = None
        self.batches = plan.epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self._has_epochs = True
        if epoch != self._epoch:
            self._epoch, self._start = epoch, 0
            self.batches, self._division = self._planned(epoch), None

    def start_at(self, batch: int) -> None:
        self._start = batch

    def __iter__(self) -> Iterator[BatchSpec]:
        return self._specs(self._epoch, self.batches, self._start)

    @property
    def position(self) -> tuple[int, int]:
        """The current epoch and its first batch."""
        return self._epoch, self._start

    @property
    def division(self) -> Division:
        """How the current epoch is divided into batches."""
        if self._division is None:
            self._division = Division.of(self.batches)
        return self._division

    def _specs(self, epoch: int, batches: EpochPlan, start: int) -> Iterator[BatchSpec]:
        while True:
            for at in range(start, len(batches)):
                if at >= len(batches) // 2 and self._has_epochs:
                    self._plan_ahead(epoch + 1)
                yield self._plan.share(batches[at], *self._share)
            if not (self._has_epochs and self._continues and len(batches)):
                return
            epoch, start = epoch + 1, 0
            batches = self._planned(epoch)

    def _plan_ahead(self, epoch: int) -> None:
        if self._ahead is None or self._ahead[0] != epoch:
            self._ahead = (epoch, self._planner.submit(self._plan.epoch, epoch))

    def _planned(self, epoch: int) -> EpochPlan:
        if self._ahead is not None and self._ahead[0] == epoch:
            return self._ahead[1].result()
        return self._plan.epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches) - self._start


class PaddedBatches(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Turns a `BatchSpec` into tensors: source and target ids, (rows, length) each, padded with 0.

    A rank's share of a small batch may have no pairs. It is one row of padding then, with weight 0.
    """

    def __init__(self, pairs: IdPairs) -> None:
        self._pairs = pairs

    def __getitem__(self, spec: BatchSpec) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [self._pairs[int(index)] for index in spec.indices]
        shapes = [(max(1, len(rows)), length) for length in spec.lengths]
        source, target = (np.zeros(shape, dtype=np.int64) for shape in shapes)
        for row, (src, trg) in enumerate(rows):
            source[row, : len(src)] = src
            target[row, : len(trg)] = trg
        return torch.from_numpy(source), torch.from_numpy(target)


class PlannedLoader(DataLoader[Any]):
    """A DataLoader over the batches of a plan. While an epoch ends, and while the trainer
    validates, its workers already load the first batches of the next one.

    Its sampler `continues`: the iterator of the workers goes from epoch to epoch, and `__iter__`
    yields one of them. Only a jump to another place begins a new one.
    """

    sampler: PlannedSampler

    def __init__(self, dataset: Dataset[Any], sampler: PlannedSampler, **options: Any) -> None:
        super().__init__(dataset, sampler=sampler, **options)
        self._position: tuple[int, int] | None = None  # where the workers' iterator is
        self._running: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        has_ended = self._iterator is None  # somebody has ended the workers
        if has_ended or self._position != self.sampler.position:
            self._running = super().__iter__()
        self._position = None  # unknown, until this epoch ends
        return self._one_epoch(self.sampler.position[0], len(self.sampler))

    def _one_epoch(self, epoch: int, batches: int) -> Iterator[Any]:
        for _ in range(batches):
            yield next(self._running)
        self._position = (epoch + 1, 0)


def make_loader(
    pairs: IdPairs,
    plan: Batching,
    loader: LoaderPlan,
    *,
    pin: bool,
    timeout_s: float = 0,
    share: tuple[int, int] = (0, 1),
) -> DataLoader[Any]:
    """A DataLoader over the batches of a plan, with workers that persist over epochs."""
    workers = loader.workers or 0
    sampler = PlannedSampler(plan, share, continues=workers > 0)
    kind = PlannedLoader if workers else DataLoader
    return kind(
        plan.dataset(pairs),
        sampler=sampler,
        batch_size=None,
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=loader.prefetch_factor if workers else None,
        persistent_workers=workers > 0,
        timeout=timeout_s if workers else 0,
        worker_init_fn=ignore_foreign_sigterm,
        # A generator of its own: seeding workers must not advance the one that dropout uses.
        generator=torch.Generator(device="cpu").manual_seed(0),
    )
