"""The built-in corpus: a small Chinese-English grammar, so that training can be tried with no data.

Every pair is generated, from the words and rules beside this file. No person wrote or said these
sentences: they are correct, plain and much alike. A model trained on them has learned this
grammar, and its score says nothing about translating real text.
"""

from __future__ import annotations

import random

from headrace.errors import CorpusError
from headrace.translation.corpus.corpus import Corpus, SplitCounts
from headrace.translation.corpus.sources import Pair
from headrace.translation.corpus.toy import sentences

# Changes whenever the sentences do, so that nothing prepared from older ones is taken for them.
GRAMMAR_VERSION = 1
LANGUAGES = ("zh", "en")
HELD_OUT = 500
_MOST_WORDS = 14

# How often each kind of sentence is tried. Those with fewer variations run dry sooner.
_KINDS = {
    sentences.told: 30,
    sentences.asked: 16,
    sentences.modal: 14,
    sentences.progressive: 8,
    sentences.going: 6,
    sentences.there_is: 6,
    sentences.date: 5,
    sentences.clock: 4,
    sentences.price: 7,
    sentences.quality: 4,
    sentences.comparison: 5,
    sentences.people_compared: 5,
    sentences.age: 3,
    sentences.weather: 2,
    sentences.duration: 3,
    sentences.request: 3,
    sentences.identity: 2,
}


def builtin_sides(src: str, trg: str) -> tuple[str, str]:
    """The languages that are meant; an error if the corpus has others."""
    sides = {"ch": "zh"}.get(src, src), {"ch": "zh"}.get(trg, trg)
    if set(sides) != set(LANGUAGES):
        raise CorpusError(
            f"src = {src!r} and trg = {trg!r}: the built-in corpus is Chinese and English; "
            "expected 'zh' and 'en', in either order"
        )
    return sides


def builtin_corpus(
    seed: int = 0, size: int = 30_000, *, src: str = "zh", trg: str = "en"
) -> Corpus:
    """`size` generated pairs, no sentence twice on either side, the same for the same seed.

    500 of them (or a tenth, of fewer than 5,000) are held out as valid, as many as test.
    """
    sides = builtin_sides(src, trg)
    if size < 30:
        raise CorpusError(f"size = {size}: expected at least 30 pairs of the built-in corpus")
    pairs = _distinct(random.Random(seed), size)
    if sides[0] == "en":
        pairs = [(en, zh) for zh, en in pairs]
    held = min(HELD_OUT, size // 10)
    splits = {
        "train": pairs[2 * held :],
        "valid": pairs[:held],
        "test": pairs[held : 2 * held],
    }
    counts = {
        split: SplitCounts(read=len(found), pairs=len(found)) for split, found in splits.items()
    }
    return Corpus(splits, counts)


def sentence(rng: random.Random) -> Pair:
    """One sentence, Chinese and English."""
    build = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
    zh, en = build(rng)
    end_zh, end_en = ("", "?") if zh.endswith("？") else ("。", ".")
    return zh + end_zh, en[0].upper() + en[1:] + end_en


def _distinct(rng: random.Random, size: int) -> list[Pair]:
    pairs: list[Pair] = []
    sources: set[str] = set()
    targets: set[str] = set()
    for _ in range(60 * size):
        zh, en = sentence(rng)
        if zh in sources or en in targets or len(en.split()) > _MOST_WORDS:
            continue
        sources.add(zh)
        targets.add(en)
        pairs.append((zh, en))
        if len(pairs) == size:
            return pairs
    raise CorpusError(
        f"size = {size:,}: the built-in grammar gave {len(pairs):,} different pairs; ask for fewer"
    )
