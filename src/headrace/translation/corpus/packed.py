"""Packed batches: sentences end to end, all batches of one shape, almost no padding.

A batch is a pure function of (seed, epoch) and its number, as in `batches.py`. The sentences of an
epoch are shuffled, cut into windows of many batches, and dealt to the batches of their window so
that all have nearly the same number of source and of target tokens. So one shape fits all of them,
and each batch has short and long sentences in the proportion of the corpus.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from torch.utils.data import Dataset

from headrace.errors import PlanError
from headrace.text_table import counted
from headrace.translation.attention import BLOCK
from headrace.translation.corpus.division import BatchSpec, IntArray
from headrace.translation.corpus.encoded import IdPairs, Longs
from headrace.translation.corpus.packed_batch import PackedBatch, PackedBatches
from headrace.translation.corpus.packing import deal, pack

# A window has this many batches, or more if batches are so small that they make up fewer sentences.
_WINDOW_BATCHES, _WINDOW_SENTENCES = 64, 1 << 16
# Dealt batches differ by a few tokens: room for them in the shape.
_ROOM_SHARE, _ROOM_TOKENS = 0.004, 4
# If an epoch takes this share of batches more than if all were full, smaller shapes are tried. One
# is taken if it saves this share of an epoch's tokens, padding included.
_OVERFLOW, _WORTH_LESS, _SHAPES_TRIED = 0.01, 0.005, 4
_SAMPLE_SENTENCES, _SAMPLE_BATCHES = 1 << 14, 64
# From this many target tokens on, sizes are multiples of flex_attention's block. With fewer,
# rounding would waste more than 2 %.
_LARGE = 64 * BLOCK


class PackedSize(NamedTuple):
    """The shape of a packed batch, in tokens. The last source token is always padding: target
    padding has something to attend to."""

    src: int
    trg: int  # without the last token of each sentence, which the decoder does not read

    def __str__(self) -> str:
        return f"{self.src:,} source and {self.trg:,} target tokens"


def packed_size(lengths: Longs, tokens: int, longest: int | tuple[int, int]) -> PackedSize:
    """The shape for batches of at most `tokens` target tokens; if the longest sentence has more, of
    as many as that, rounded up.

    `lengths` is (pairs, 2), in tokens including bos and eos. In the shape returned, the batches of
    an epoch are nearly equally full, also the last one, unless only a few pairs fit in a batch or
    many have a long source and a short target, or the reverse. If pairs are left over, the epoch
    has a batch more, and all are a little emptier: the number of batches may differ by epoch.
    `longest` is how many tokens the longest source and the longest target take, or one number for
    both: they fit, too.

    Lengths may not fill a shape: of sentences of 60 tokens, one fits into 100. So some batches are
    packed, and if they leave room, smaller shapes are tried.
    """
    totals = pair_sizes(lengths).sum(axis=0)
    longest_src, longest_trg = (longest, longest) if isinstance(longest, int) else longest
    unit = _unit(tokens)
    limit = max(_multiple(longest_trg, unit), tokens // unit * unit)
    room = 1 + _ROOM_SHARE
    batches = max(1, -(-int(totals[1] * room) // max(1, limit - _ROOM_TOKENS)))
    sample = _sample(lengths, batches)
    best, least_tokens = PackedSize(0, 0), math.inf
    for _ in range(_SHAPES_TRIED):
        src, trg = (int(total / batches * room) + _ROOM_TOKENS for total in totals)
        size = PackedSize(
            _multiple(max(src, longest_src) + 1, unit), _multiple(max(trg, longest_trg), unit)
        )
        plan = PackedPlan(sample, size)
        needed = len(plan.epoch(0))
        if needed * sum(size) < (1 - _WORTH_LESS) * least_tokens:
            best, least_tokens = size, needed * sum(size)
        if needed <= (1 + _OVERFLOW) * plan.least_batches:
            break
        batches = math.ceil(batches * needed / plan.least_batches)
    return best


class PackedEpoch:
    """The batches of one epoch, in order. `fills` is the share of source and of target tokens that
    are not padding."""

    shapes = 1

    def __init__(self, batches: list[IntArray], size: PackedSize, sizes: IntArray) -> None:
        self._batches, self._size = batches, size
        tokens = sizes.sum(axis=0) / max(1, len(batches))
        self.fills = (float(tokens[0]) / size.src, float(tokens[1]) / size.trg)
        self.padding_share = 1 - float(tokens.sum()) / sum(size) if batches else 0.0

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, batch: int) -> BatchSpec:
        return BatchSpec(self._batches[batch], (self._size.src, self._size.trg))

    def __str__(self) -> str:
        src, trg = self.fills
        return (
            f"{counted(len(self), 'packed batch', 'packed batches')} per epoch, {self._size}, "
            f"{src:.1%} and {trg:.1%} filled"
        )


class PackedPlan:
    """Packs a corpus into batches of one shape, for any epoch.

    `lengths` is (pairs, 2), in tokens including bos and eos.
    """

    def __init__(
        self,
        lengths: Longs,
        size: PackedSize,
        *,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self._sizes = pair_sizes(lengths)
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._room = np.array([size.src - 1, size.trg])
        self._longest = self._sizes.max(axis=0, initial=0)
        if (self._longest > self._room).any():
            raise PlanError(
                f"a sentence pair has {self._longest[0]} source and {self._longest[1]} target "
                f"tokens: expected at most those of a packed batch, {size}"
            )

    def epoch(self, epoch: int) -> PackedEpoch:
        """The batches of this epoch."""
        random = np.random.default_rng([self._seed, epoch])
        count = len(self._sizes)
        order = random.permutation(count) if self._shuffle else np.arange(count)
        batches: list[IntArray] = []
        for window, parts in self._windows(order):
            batches += pack(window, self._sizes, parts, self._room)
        if self._shuffle:
            batches = [batches[number] for number in random.permutation(len(batches))]
        return PackedEpoch(batches, self._size, self._sizes)

    @property
    def least_batches(self) -> int:
        """How many batches an epoch has if all are full. If lengths do not fit together, it has
        more."""
        return int(np.ceil(self._sizes.sum(axis=0) / self._room).max())

    def for_validation(self, lengths: Longs) -> PackedPlan:
        """A plan for other pairs, in the same shape and the same order in every epoch."""
        return PackedPlan(lengths, self._size, shuffle=False)

    def share(self, batch: BatchSpec, rank: int, ranks: int) -> BatchSpec:
        """The part of a batch that this rank trains on. All ranks together have the batch."""
        if ranks == 1:
            return batch
        sizes = self._sizes[batch.indices]
        mine = np.flatnonzero(deal(sizes, ranks) == rank)
        # Dealt parts differ by less than a sentence, but for corpora of very unusual lengths.
        room = -(-self._room // ranks) + self._longest
        src, trg = map(int, np.maximum(room, sizes[mine].sum(axis=0)))
        unit = _unit(trg)
        return BatchSpec(batch.indices[mine], (_multiple(src + 1, unit), _multiple(trg, unit)))

    def dataset(self, pairs: IdPairs) -> Dataset[PackedBatch]:
        return PackedBatches(pairs)

    def _windows(self, order: IntArray) -> list[tuple[IntArray, int]]:
        """Consecutive parts of `order`, with the number of batches that each is for."""
        if not len(order):
            return []
        batches = self.least_batches
        per_batch = len(order) / batches
        window = max(_WINDOW_BATCHES, int(_WINDOW_SENTENCES / per_batch))
        count = -(-batches // window)
        parts = [len(part) for part in np.array_split(np.arange(batches), count)]
        # Cut where the tokens are in proportion to the batches.
        tokens = np.cumsum(self._sizes[order].sum(axis=1))
        cuts = np.searchsorted(tokens, tokens[-1] * np.cumsum(parts)[:-1] / batches)
        return list(zip(np.split(order, cuts), parts, strict=True))


def _sample(lengths: Longs, batches: int) -> Longs:
    """The lengths of enough pairs to see how they fill a batch, of a corpus of so many batches."""
    count = max(_SAMPLE_SENTENCES, _SAMPLE_BATCHES * len(lengths) // batches)
    if count >= len(lengths):
        return lengths
    chosen = np.random.default_rng(0).choice(len(lengths), count, replace=False)
    sample: Longs = lengths[chosen]
    return sample


def pair_sizes(lengths: Longs) -> IntArray:
    """The tokens that each pair takes up on both sides: (pairs, 2)."""
    sizes: IntArray = np.asarray(lengths, dtype=np.int64).reshape(-1, 2) - np.array([0, 1])
    return sizes


def _unit(tokens: int) -> int:
    """What sizes are multiples of, in batches of so many target tokens."""
    return BLOCK if tokens >= _LARGE else 8


def _multiple(tokens: int, unit: int) -> int:
    return -(-tokens // unit) * unit
