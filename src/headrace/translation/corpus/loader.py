"""Loads the batches of a plan: sampler, dataset and DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from headrace.lifecycle import ignore_foreign_sigterm
from headrace.plan import LoaderPlan
from headrace.translation.corpus.division import Batching, BatchSpec, Division, EpochPlan
from headrace.translation.corpus.encoded import IdPairs


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
