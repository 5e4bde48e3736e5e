"""The built-in corpus, so that training can be tried without data.

A program generates every pair from the word list and templates in `grammar.txt`. The sentences are
correct, plain and much alike: the score of a model trained on them says nothing about translating
real text.
"""

from __future__ import annotations

import random

from headrace.errors import CorpusError
from headrace.translation.corpus.corpus import Corpus
from headrace.translation.corpus.corpus_report import SplitCounts
from headrace.translation.corpus.languages import language_code
from headrace.translation.corpus.pair_files import Pair
from headrace.translation.corpus.toy.grammar import draw_sentence

# Part of the cache key of prepared data: raise it with every change of the sentences.
GRAMMAR_VERSION = 2
LANGUAGES = ("zh", "en")
HELD_OUT = 500
_MAX_WORDS = 14
_TRIES_PER_PAIR = 60


def builtin_sides(src: str, trg: str) -> tuple[str, str]:
    """The two languages as the built-in corpus names them; an error if it does not have them."""
    sides = language_code(src), language_code(trg)
    if set(sides) != set(LANGUAGES):
        raise CorpusError(
            f"src = {src!r} and trg = {trg!r}: the built-in corpus is Chinese and English; "
            "expected 'zh' and 'en', in either order"
        )
    return sides


def builtin_corpus(
    seed: int = 0, size: int = 30_000, *, src: str = "zh", trg: str = "en"
) -> Corpus:
    """`size` generated pairs. The same seed gives the same pairs, and no sentence occurs twice.

    500 pairs each are held out as valid and as test; a tenth each if `size` is below 5,000.
    """
    sides = builtin_sides(src, trg)
    if size < 30:
        raise CorpusError(f"size = {size}: expected at least 30 pairs of the built-in corpus")
    pairs = _distinct_pairs(random.Random(seed), size)
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


def _distinct_pairs(rng: random.Random, size: int) -> list[Pair]:
    """Pairs that share neither their Chinese nor their English with another pair."""
    pairs: list[Pair] = []
    seen_zh: set[str] = set()
    seen_en: set[str] = set()
    for _ in range(_TRIES_PER_PAIR * size):
        zh, en = draw_sentence(rng)
        if zh in seen_zh or en in seen_en or len(en.split()) > _MAX_WORDS:
            continue
        seen_zh.add(zh)
        seen_en.add(en)
        pairs.append((zh, en))
        if len(pairs) == size:
            return pairs
    raise CorpusError(
        f"size = {size:,}: the built-in grammar gave {len(pairs):,} different pairs; ask for fewer"
    )
