"""What the peers have in common."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from headrace.bench.endless_batches import EndlessBatches
from headrace.bench.trainable import Timing
from headrace.bench.works.training import ModelTraining
from headrace.bench.works.work import Workload, seed_all
from headrace.device import Device
from headrace.errors import BenchError

_LEAD_IN = 3


class _BatchDataset(IterableDataset[Any]):
    """A dataset of whole batches, which a DataLoader passes on unchanged."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def batch_loader(batches: Iterable[Any]) -> DataLoader[Any]:
    return DataLoader(_BatchDataset(batches), batch_size=None)


class PeerTrainable(abc.ABC):
    """Base of the peers. `_train(batches, lead_in, steps)` trains on `lead_in` batches, then times
    `steps` more, and returns all losses as tensors on the device."""

    compiles = False
    lead_in = 0

    def __init__(self, work: Workload, device: Device, precision: str | None, seed: int) -> None:
        self._device, self._precision, self._seed = device, precision, seed
        made = work.make(device, seed=seed, pin=True)
        if not isinstance(made, ModelTraining) or made.carry is not None:
            raise BenchError(
                f"{work.name} does not return (model, optimizer, loss, loader), which is all that "
                "peers can train: leave out --peers"
            )
        self._made: ModelTraining | None = made
        self._batches = EndlessBatches(self._made.loader, work.name)
        self.trained, self._seed_next = 0, False

    def run(self, steps: int) -> Timing:
        # The first batches are those that the loader's workers have prefetched.
        lead_in = max(_LEAD_IN, self._batches.ahead)
        with self._device.numerics(self._precision):
            timing, _ = self._train(self._batches.take(lead_in + steps), lead_in, steps)
        return timing

    def losses(self, batches: Sequence[Any]) -> tuple[float, ...]:
        self._seed_next = True
        with self._device.numerics(self._precision):
            _, losses = self._train(batches, 0, len(batches))
        return self._read(losses)

    def graphs(self) -> dict[str, Any] | None:
        return None

    def compiled(self) -> dict[str, Any] | None:
        return None

    def close(self) -> None:
        self._batches.close()
        self._made = None

    def count_step(self) -> None:
        """A step has been trained."""
        self.trained += 1

    @abc.abstractmethod
    def _train(
        self, batches: Iterable[Any], lead_in: int, steps: int
    ) -> tuple[Timing, list[torch.Tensor]]: ...

    def _loss(self, model: Any, batch: Any) -> torch.Tensor:
        assert self._made is not None
        if self._seed_next:  # only now: a library's loader may draw from the same generator
            self._seed_next = False
            seed_all(self._seed)
        returned = self._made.loss(model, batch)
        loss = returned if isinstance(returned, torch.Tensor) else returned["loss"]
        assert isinstance(loss, torch.Tensor)
        return loss

    def _read(self, losses: list[torch.Tensor]) -> tuple[float, ...]:
        stacked = torch.stack([loss.float() for loss in losses])
        on_host = torch.empty(stacked.shape, dtype=stacked.dtype, device="cpu")
        with self._device.ledger.waiting("bench"):
            on_host.copy_(stacked)
        self._device.synchronize("bench")
        return tuple(self._device.read_host(on_host.unsqueeze(0))[0])
