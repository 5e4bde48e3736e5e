"""Chooses the pairs that are held out from train, so that no sentence of theirs stays in it.

Corpora repeat sentences: one source with several translations, one translation of several sources.
If such a pair were held out alone, the model would have seen half of it in training, and its score
would be too good. So pairs that share a source or a target, directly or through other pairs, form a
group, and whole groups are held out.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from headrace.translation.corpus.pair_files import Pair

SHARE = 0.02
MAX_PAIRS = 1000
# Larger groups stay in train if smaller ones are enough: a few sentences would fill valid.
_MAX_GROUP_SHARE = 0.1
# Train gives up no more than this share, even if fewer pairs are held out than wanted.
_MAX_LOSS_SHARE = 0.1


def choose_held_out(train: Sequence[Pair]) -> tuple[list[Pair], set[Pair]]:
    """Choose about 2 % of these different pairs, at most about 1,000.

    Returns them, and the pairs that have to leave train with them because they share a sentence:
    none, unless almost all pairs are in one group. Both are empty if nothing can be held out.

    The choice is a hash of the text: the order of the files does not matter.
    """
    if len(train) < 2:
        return [], set()
    wanted = min(MAX_PAIRS, max(1, round(len(train) * SHARE)))
    max_pairs = max(wanted, int(len(train) * _MAX_LOSS_SHARE))
    digests = [_digest(pair) for pair in train]
    if all(len({pair[side] for pair in train}) == len(train) for side in (0, 1)):
        # The usual corpus: no sentence occurs twice.
        chosen = heapq.nsmallest(wanted, range(len(train)), key=digests.__getitem__)
    else:
        chosen = _choose_groups(train, _groups(train), digests, wanted, max_pairs)
    held = [train[at] for at in sorted(chosen, key=digests.__getitem__)]
    if 2 * len(held) < wanted:
        cut_out, relatives = _cut_out(train, digests, wanted, max_pairs)
        if len(cut_out) > len(held):
            return cut_out, relatives
    return held, set()


def count_shared(
    train: Iterable[Pair], scored: Mapping[str, Sequence[Pair]]
) -> tuple[int, dict[str, int]]:
    """How many pairs of train have a source or a target that stands in a scored split, and of each
    scored split how many have one that train has, too."""
    sources = {src for pairs in scored.values() for src, _ in pairs}
    targets = {trg for pairs in scored.values() for _, trg in pairs}
    in_train = [pair for pair in train if pair[0] in sources or pair[1] in targets]
    seen_sources, seen_targets = {src for src, _ in in_train}, {trg for _, trg in in_train}
    return len(in_train), {
        split: sum(src in seen_sources or trg in seen_targets for src, trg in pairs)
        for split, pairs in scored.items()
    }


def _digest(pair: Pair) -> bytes:
    return hashlib.blake2b("\n".join(pair).encode(), digest_size=16).digest()


def _groups(pairs: Sequence[Pair]) -> list[list[int]]:
    """The groups, as indices of pairs: union-find over shared sources and targets."""
    parent = list(range(len(pairs)))

    def root(at: int) -> int:
        while parent[at] != at:
            parent[at] = at = parent[parent[at]]
        return at

    for side in (0, 1):
        first: dict[str, int] = {}
        for at, pair in enumerate(pairs):
            earlier = first.setdefault(pair[side], at)
            if earlier != at:
                parent[root(at)] = root(earlier)
    groups: dict[int, list[int]] = defaultdict(list)
    for at in range(len(pairs)):
        groups[root(at)].append(at)
    return list(groups.values())


def _choose_groups(
    train: Sequence[Pair],
    groups: list[list[int]],
    digests: Sequence[bytes],
    wanted: int,
    max_pairs: int,
) -> list[int]:
    """Whole groups, together about `wanted` pairs, in the order of one digest each: so each pair is
    as likely to be held out as any other."""
    keyed = [(digests[min(group, key=train.__getitem__)], group) for group in groups]
    max_size = max(1, int(wanted * _MAX_GROUP_SHARE))
    chosen: list[int] = []
    for _, group in sorted(keyed):
        if len(chosen) >= wanted:
            return chosen
        if len(group) <= max_size:
            chosen += group
    if len(chosen) * 2 < wanted:
        for _, group in sorted(keyed, key=lambda one: (len(one[1]), one[0])):
            if len(chosen) >= wanted:
                break
            if len(group) > max_size and len(chosen) + len(group) <= max_pairs:
                chosen += group
    return chosen


def _cut_out(
    train: Sequence[Pair], digests: Sequence[bytes], wanted: int, max_pairs: int
) -> tuple[list[Pair], set[Pair]]:
    """Single pairs that share their sentences with few others, and these others. For corpora in
    which almost all pairs are in one group."""
    uses = [Counter(pair[side] for pair in train) for side in (0, 1)]
    related: list[dict[str, list[Pair]]] = [defaultdict(list), defaultdict(list)]
    for pair in train:
        for side in (0, 1):
            related[side][pair[side]].append(pair)
    order = sorted(
        range(len(train)),
        key=lambda at: (uses[0][train[at][0]] + uses[1][train[at][1]], digests[at]),
    )
    held: list[Pair] = []
    lost: set[Pair] = set()
    for at in order:
        pair = train[at]
        relatives = {*related[0][pair[0]], *related[1][pair[1]]} - {pair}
        left = (max_pairs if held else len(train) // 2) - len(held) - len(lost)
        if len(held) >= wanted or left <= len(relatives):
            break
        if pair not in lost and relatives.isdisjoint(held):
            held.append(pair)
            lost |= relatives
    return held, lost
