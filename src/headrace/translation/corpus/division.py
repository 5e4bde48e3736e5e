"""What a batch and an epoch of them are, whoever decides about them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from headrace.text_table import counted
from headrace.translation.corpus.encoded import IdPairs

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class BatchSpec:
    """One batch: the indices of its pairs, and the lengths (src, trg) they are padded to."""

    indices: IntArray
    lengths: tuple[int, int]


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
