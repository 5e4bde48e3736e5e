"""Word-for-word translation, the least that a translation model must beat.

IBM model 1 learns which target word each source word stands for: every target word of a pair comes
from one of its source words, or from none, and a few rounds of EM find the probabilities. Each
source word is then replaced by its most probable target word. The order stays; a word that training
has not seen is copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

_NONE = ""  # the source word of target words that have no other
# Han characters count one by one: Chinese has no spaces between words.
_WORD = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]|[^\W\u3400-\u4dbf\u4e00-\u9fff]+|[^\w\s]")


class WordForWord:
    """A dictionary from source to target words, learnt from sentence pairs."""

    def __init__(self, pairs: Sequence[tuple[str, str]], *, rounds: int = 5) -> None:
        src, trg = _Numbers(), _Numbers()
        none = src.number(_NONE)
        sources, targets, places, place = [], [], [], 0
        for source, target in pairs:
            src_words = np.array([none, *map(src.number, words_of(source))])
            trg_words = np.array([*map(trg.number, words_of(target))], dtype=np.int64)
            sources.append(np.tile(src_words, len(trg_words)))
            targets.append(np.repeat(trg_words, len(src_words)))
            # A place is one target word in one pair; its probabilities sum to 1.
            places.append(np.repeat(place + np.arange(len(trg_words)), len(src_words)))
            place += len(trg_words)
        links = np.concatenate(sources) * len(trg) + np.concatenate(targets)
        entries, entry_of_link = np.unique(links, return_inverse=True)
        entry_src, entry_trg = np.divmod(entries, len(trg))
        place_of_link = np.concatenate(places)
        p = np.ones(len(entries))  # of the target word, given the source word
        for _ in range(rounds):
            p_link = p[entry_of_link]
            p_link /= np.bincount(place_of_link, p_link)[place_of_link]
            p = np.bincount(entry_of_link, p_link)
            p /= np.bincount(entry_src, p)[entry_src]
        best = np.lexsort((-p, entry_src))  # each source word's most probable entry comes first
        first = np.unique(entry_src[best], return_index=True)[1]
        words = trg.words
        self.dictionary = {
            src.words[entry_src[at]]: words[entry_trg[at]]
            for at in best[first]
            if entry_src[at] != none
        }

    def translate(self, sentences: Iterable[str]) -> list[str]:
        return [
            " ".join(self.dictionary.get(word, word) for word in words_of(sentence))
            for sentence in sentences
        ]


def words_of(sentence: str) -> list[str]:
    """Words and punctuation marks. BLEU's tokenizer separates punctuation, too."""
    return _WORD.findall(sentence)


class _Numbers:
    """Numbers words in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    @property
    def words(self) -> list[str]:
        return list(self._numbers)

    def number(self, word: str) -> int:
        return self._numbers.setdefault(word, len(self._numbers))

    def __len__(self) -> int:
        return len(self._numbers)
