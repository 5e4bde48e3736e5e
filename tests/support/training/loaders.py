"""Loaders of many kinds: with a generator, with their own state, one batch ahead, prefetched."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from headrace.data import prefetch
from support.training.engines import data

BATCHES = 10


Loaders = Callable[[], Any]


class BoomError(Exception):
    pass


def pairs() -> TensorDataset:
    features, labels = (torch.cat([batch[at] for batch in data(BATCHES)]) for at in (0, 1))
    return TensorDataset(features, labels)


class Augmented(Dataset[Any]):
    """Draws from all of the host's generators, in the process that loads."""

    def __init__(self) -> None:
        self._pairs = pairs()

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, at: int) -> Any:
        features, label = self._pairs[at]
        noise = random.random() + numpy.random.randn() + torch.rand(())
        return features + 0.1 * float(noise), label


class OwnEpochs:
    """A loader that keeps its own state, and counts its epochs by itself."""

    def __init__(self) -> None:
        self.epoch = self.at = 0

    def __iter__(self) -> Iterator[Any]:
        draw = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(BATCHES, generator=draw).tolist()
        batches = data(BATCHES)
        while self.at < BATCHES:
            self.at += 1
            yield batches[order[self.at - 1]]
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


def own_generator() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(7)
    return DataLoader(pairs(), batch_size=5, shuffle=True, generator=draw)


def samplers_generator() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(8)
    return DataLoader(pairs(), batch_size=5, sampler=RandomSampler(pairs(), generator=draw))


def augmented() -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=5, shuffle=True)


def generated() -> Any:
    """A class that is no DataLoader, whose generator function draws random numbers."""

    class Drawn:
        def __iter__(self) -> Iterator[Any]:
            for features, labels in data(BATCHES):
                yield features + 0.1 * torch.randn(features.shape), labels

    return Drawn()


def ahead() -> Any:
    """A loader that works one batch ahead, as one prepared by Accelerate does to know its last
    batch. Its `state_dict` raises, since it keeps no state."""

    class Ahead:
        def __init__(self) -> None:
            self._loader = augmented()

        def __iter__(self) -> Iterator[Any]:
            batches = iter(self._loader)
            here = next(batches)
            for following in batches:
                yield here
                here = following
            yield here

        def state_dict(self) -> Any:
            raise BoomError

        def load_state_dict(self, state: Any) -> None:
            raise BoomError

    return Ahead()


def prefetched() -> Any:
    return prefetch(augmented(), "cpu")


LOADERS = [own_generator, samplers_generator, augmented, generated, ahead, prefetched, OwnEpochs]


class Stateful:
    """A loader that keeps its own state, as `StatefulDataLoader` does."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.at = batches, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def shuffled() -> DataLoader[Any]:
    features, labels = (torch.cat([batch[at] for batch in data(13)]) for at in (0, 1))
    return DataLoader(TensorDataset(features, labels), batch_size=5, shuffle=True)
