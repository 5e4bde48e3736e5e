"""Deals sentence pairs to batches that are nearly equally full on both sides."""

from __future__ import annotations

import math

import numpy as np

from headrace.translation.corpus.division import IntArray

# If pairs are left over, an additional batch takes them. Pairs of the others fill it up to this
# share of the mean. How many are tried, as a multiple of those that are needed, is limited.
_EVEN, _MOVES_TRIED = 0.97, 4


def pack(window: IntArray, sizes: IntArray, parts: int, room: IntArray) -> list[IntArray]:
    """The pairs of a window in `parts` batches, or in more if they do not fit, all nearly equally
    full."""
    part_of = deal(sizes[window], parts)
    batches, left_over = [], []
    for batch in _split(window, part_of, parts):
        batch = batch[np.argsort(-sizes[batch].sum(axis=1), kind="stable")]
        fits = (np.cumsum(sizes[batch], axis=0) <= room).all(axis=1)
        batches.append(batch[fits])
        left_over += [int(index) for index in batch[~fits]]
    return _place(left_over, [batch for batch in batches if len(batch)], sizes, room)


def deal(sizes: IntArray, parts: int) -> IntArray:
    """Assign pairs of these sizes, (pairs, 2), to parts with nearly the same tokens on each side.

    Pairs of similar size, as many as there are parts, are dealt at a time, the large ones first. At
    the beginning they are dealt like cards, back and forth. Then the pair that has most goes to the
    part that has least, of size (source plus target) or of skew (source minus target), whichever
    differs more between parts so far. Returns the part of each pair.
    """
    shares = sizes / np.maximum(1, sizes.sum(axis=0))
    measures = np.stack((shares[:, 0] + shares[:, 1], shares[:, 0] - shares[:, 1]))
    by_size = np.argsort(-measures[0], kind="stable")
    part_of = np.empty(len(sizes), dtype=np.int64)
    rounds = len(sizes) // parts
    # Enough balanced rounds at the end to make up for the unbalanced ones, which are faster.
    cards = max(0, rounds - 64 - 4 * math.isqrt(rounds)) // 2 * 2 * parts
    forth = np.arange(parts)
    part_of[by_size[:cards]] = np.tile(np.append(forth, forth[::-1]), cards // (2 * parts))
    dealt = measures[:, by_size[:cards]].reshape(2, -1, parts)
    sums = dealt[:, ::2].sum(axis=1) + dealt[:, 1::2, ::-1].sum(axis=1)
    for start in range(cards, len(sizes), parts):
        group = by_size[start : start + parts]
        measure = int(np.argmax(np.ptp(sums, axis=1)))
        neediest = np.argsort(sums[measure], kind="stable")[: len(group)]
        group = group[np.argsort(-measures[measure, group], kind="stable")]
        part_of[group] = neediest
        sums[:, neediest] += measures[:, group]
    return part_of


def _place(
    pairs: list[int], batches: list[IntArray], sizes: IntArray, room: IntArray
) -> list[IntArray]:
    """The batches with more `pairs` in them: each goes to the first batch where it fits, the
    largest pair first. New batches take the rest, and pairs of the others, to be as full."""
    if not pairs:
        return batches
    lists = [list(map(int, batch)) for batch in batches]
    used = np.array([sizes[batch].sum(axis=0) for batch in batches]).reshape(-1, 2)
    for pair in sorted(pairs, key=lambda pair: -int(sizes[pair].sum())):
        fits = np.flatnonzero((used + sizes[pair] <= room).all(axis=1))
        if len(fits):
            lists[fits[0]].append(pair)
            used[fits[0]] += sizes[pair]
        else:
            lists.append([pair])
            used = np.vstack((used, sizes[pair]))
    placed = [np.array(batch, dtype=np.int64) for batch in lists]
    return _even_out(placed, len(batches), used, sizes, room)


def _even_out(
    batches: list[IntArray], full: int, used: IntArray, sizes: IntArray, room: IntArray
) -> list[IntArray]:
    """The batches, with pairs moved from the first `full` of them to the others, so that these are
    nearly as full on both sides. `used` has the tokens of each batch, (batches, 2).

    A batch gives no pair if it then were emptier than the one that takes it. So if only a few pairs
    fit in a batch, some batches stay emptier than others.
    """
    mean = np.maximum(1, used.mean(axis=0))
    fills = used / mean
    missing = np.maximum(0, _EVEN - fills[full:]).sum()
    if not full or not missing:
        return batches
    pairs = np.concatenate(batches)
    batch_of = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
    shares = sizes[pairs] / mean
    movable = int(np.searchsorted(batch_of, full))
    # Each batch has its pairs in the order of size. So every n-th pair is from all batches, and
    # they are short and long.
    stride = max(1, int(shares[:movable].sum() / missing))
    starts = range(min(stride, _MOVES_TRIED))
    for at in np.concatenate([np.arange(start, movable, stride) for start in starts]):
        emptiest = full + int(np.argmin(fills[full:].min(axis=1)))
        lacking = int(np.argmin(fills[emptiest]))
        if fills[emptiest, lacking] >= _EVEN:
            break
        giver, size, share = batch_of[at], sizes[pairs[at]], shares[at]
        if (
            share[lacking] < share[1 - lacking]
            or (fills[giver] - share).min() < fills[emptiest, lacking]
            or (used[emptiest] + size > room).any()
        ):
            continue
        batch_of[at] = emptiest
        fills[giver] -= share
        fills[emptiest] += share
        used[emptiest] += size
    return _split(pairs, batch_of, len(batches))


def _split(pairs: IntArray, part_of: IntArray, parts: int) -> list[IntArray]:
    """The pairs of each part, in order."""
    ends = np.cumsum(np.bincount(part_of, minlength=parts))
    return np.split(pairs[np.argsort(part_of, kind="stable")], ends[:-1])
