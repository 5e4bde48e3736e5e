"""Packed batches as tensors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from headrace.translation.attention import Packing
from headrace.translation.corpus.division import BatchSpec
from headrace.translation.corpus.encoded import IdPairs, Ints, Longs


class PackedBatch(NamedTuple):
    """A packed batch as int32 tensors. There are only two, because receiving a tensor from a loader
    process takes the training process 0.3 ms or more."""

    source: Tensor  # (3, source tokens): ids, positions, sentences, as `Packing` has them
    # (4, target tokens): the ids that the decoder reads, from bos on; positions; sentences; and
    # the id that follows each of those ids, up to eos.
    target: Tensor

    def inputs(self) -> tuple[Tensor, Tensor, Packing]:
        """The model's arguments: ids of source and target, (1, tokens), and their packing."""
        source, target = self.source, self.target
        return source[:1], target[:1], Packing(source[1:2], target[1:2], source[2], target[2])

    def targets(self) -> Tensor:
        """The ids to predict: (1, target tokens), int64."""
        return self.target[3:].long()


class PackedBatches(Dataset[PackedBatch]):
    """Turns a `BatchSpec` into a `PackedBatch`. A rank's share may have no pairs: it is all padding
    then, with weight 0."""

    def __init__(self, pairs: IdPairs) -> None:
        self._pairs = pairs

    def __getitem__(self, spec: BatchSpec) -> PackedBatch:
        source_tokens, target_tokens = spec.lengths
        (src, src_lengths), (trg, trg_lengths) = self._pairs.end_to_end(spec.indices)
        ends = np.cumsum(trg_lengths)
        is_first, is_last = np.zeros((2, len(trg)), dtype=bool)
        is_first[ends - trg_lengths] = is_last[ends - 1] = True
        source = _rows(3, source_tokens, src_lengths)
        target = _rows(4, target_tokens, trg_lengths - 1)
        source[0, : len(src)] = src
        read, predicted = trg[~is_last], trg[~is_first]
        target[0, : len(read)], target[3, : len(predicted)] = read, predicted
        return PackedBatch(torch.from_numpy(source), torch.from_numpy(target))


def _rows(rows: int, tokens: int, lengths: Longs) -> Ints:
    """An array (rows, tokens) for sentences of these lengths, end to end: row 1 has the position of
    each token in its sentence, row 2 the number of its sentence; the others are 0."""
    found = np.zeros((rows, tokens), dtype=np.int32)
    total = int(lengths.sum())
    found[1, :total] = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    found[2, :total] = np.repeat(np.arange(len(lengths)), lengths)
    found[2, total:] = len(lengths)
    return found
