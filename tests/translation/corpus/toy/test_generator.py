"""The built-in corpus: deterministic, distinct, held apart, and right on both sides."""

from __future__ import annotations

import random
import re

import pytest

from headrace.errors import CorpusError
from headrace.translation import Corpus
from headrace.translation.corpus.corpus import clean
from headrace.translation.corpus.toy.generator import builtin_corpus
from headrace.translation.corpus.toy.grammar import draw_sentence, tables


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return builtin_corpus()


def test_it_has_the_given_size_and_splits_share_no_sentence(corpus: Corpus) -> None:
    assert {split: len(pairs) for split, pairs in corpus.splits.items()} == {
        "train": 29_000,
        "valid": 500,
        "test": 500,
    }
    pairs = [pair for split in corpus.splits.values() for pair in split]
    assert len({zh for zh, _ in pairs}) == len({en for _, en in pairs}) == 30_000
    assert {split: counts.pairs for split, counts in corpus.counts.items()} == {
        "train": 29_000,
        "valid": 500,
        "test": 500,
    }


def test_the_same_seed_gives_the_same_corpus() -> None:
    assert builtin_corpus(3, 500) == builtin_corpus(3, 500)
    assert builtin_corpus(3, 500) != builtin_corpus(4, 500)
    # Spelled out: whoever changes the sentences must also raise GRAMMAR_VERSION.
    assert [draw_sentence(random.Random(seed)) for seed in (1, 2, 3)] == FIRST


def test_it_is_small_enough_to_be_learned(corpus: Corpus) -> None:
    train = corpus.splits["train"]
    words = {word for _, en in train for word in re.findall(r"[\w'-]+", en)}
    characters = {character for zh, _ in train for character in zh}
    assert 400 < len(words) < 1000
    assert 200 < len(characters) < 600
    assert all(3 <= len(en.split()) <= 14 for _, en in train)
    held = {word for _, en in corpus.splits["test"] for word in re.findall(r"[a-z]+", en)}
    assert held <= {word for _, en in train for word in re.findall(r"[a-z]+", en)}


def test_sentences_are_well_formed(corpus: Corpus) -> None:
    for zh, en in corpus.splits["train"]:
        assert re.fullmatch(r"[\u4e00-\u9fff0-9]+[。？]", zh), zh
        assert re.fullmatch(r"[A-Z][A-Za-z0-9 ,'-]*[.?]", en), en
        assert zh.endswith("？") == en.endswith("?"), (zh, en)
        assert (zh, en) == (clean(zh), clean(en))
        assert "  " not in en
        assert not re.search(r" a [aeiou]| an [^aeiou]", en), en
        if zh.endswith("。"):
            assert not re.search(r"^(You|We|They) (is|was|does|has|goes|\w+s) ", en), en
            assert not re.search(r"^(He|She) (are|am|do|have|go|buy|eat|drink|read \w+ every) ", en)


def test_measure_words_agree(corpus: Corpus) -> None:
    """A counted noun stands after its own measure word, and in English in the right number."""
    text = "\n".join(zh for zh, _ in corpus.splits["train"])
    measure_of = {row.cells["zh"]: row.cells["measure"] for row in tables()["noun"]}
    measures = {*measure_of.values()} - {"块", "把", "头", "顶"}
    for noun in measure_of:
        found = re.findall(rf"[一两三四五六七八九十几这那]([{''.join(measures)}]){noun}", text)
        right = {measure for zh, measure in measure_of.items() if zh.startswith(noun)}
        assert set(found) <= right, (noun, set(found))
    assert not re.search("二[本张把件条只个辆支](?!\\d)", re.sub("十二|百二", "", text))


def test_either_direction_and_no_other_language() -> None:
    forth, back = builtin_corpus(size=100), builtin_corpus(size=100, src="en", trg="ch")
    assert [(en, zh) for zh, en in forth.splits["train"]] == back.splits["train"]
    with pytest.raises(CorpusError, match="the built-in corpus is Chinese and English"):
        builtin_corpus(src="de", trg="en")


def test_too_small_a_size_is_refused() -> None:
    with pytest.raises(CorpusError, match="size = 3: expected at least 30"):
        builtin_corpus(size=3)


FIRST = [
    (
        "你的老师明天晚上要在家修他的电脑。",
        "Your teacher is going to repair his computer at home tomorrow evening.",
    ),
    ("我妹妹学了十二个星期英语。", "My younger sister studied English for twelve weeks."),
    ("每天晚上我们在家洗一个西红柿。", "Every evening we wash a tomato at home."),
]
