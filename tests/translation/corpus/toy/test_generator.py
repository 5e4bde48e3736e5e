"""The built-in corpus: deterministic, distinct, held apart, and right on both sides."""

from __future__ import annotations

import datetime
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import CorpusError
from headrace.translation import Corpus
from headrace.translation.corpus.corpus import clean
from headrace.translation.corpus.toy import lexicon as lx
from headrace.translation.corpus.toy import sentences
from headrace.translation.corpus.toy.generator import builtin_corpus, sentence
from headrace.translation.corpus.toy.lexicon import (
    article,
    chinese_number,
    counted,
    english_number,
)
from headrace.translation.corpus.toy.sentences import quantity


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return builtin_corpus()


def test_the_size_is_as_asked_and_the_splits_share_no_sentence(corpus: Corpus) -> None:
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


def test_the_same_seed_is_the_same_corpus() -> None:
    assert builtin_corpus(3, 500) == builtin_corpus(3, 500)
    assert builtin_corpus(3, 500) != builtin_corpus(4, 500)
    # Spelled out, so that a change of the sentences cannot go by without a new GRAMMAR_VERSION.
    assert [sentence(random.Random(seed)) for seed in (1, 2, 3)] == FIRST


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
    for noun in lx.NOUNS:
        numeral = "[一两三四五六七八九十几这那]"
        measures = {*(n.measure for n in lx.NOUNS)} - {"块", "把", "头", "顶"}
        found = re.findall(rf"{numeral}([{''.join(measures)}]){noun.zh}", text)
        right = {n.measure for n in lx.NOUNS if n.zh.startswith(noun.zh)}
        assert set(found) <= right, (noun.zh, set(found))
    assert not re.search("二[本张把件条只个辆支](?!\\d)", re.sub("十二|百二", "", text))


@pytest.mark.parametrize(
    ("zh", "measure", "one", "many"),
    [
        ("书", "本", "book", "books"),
        ("词典", "本", "dictionary", "dictionaries"),
        ("围巾", "条", "scarf", "scarves"),
        ("刀", "把", "knife", "knives"),
        ("鱼", "条", "fish", "fish"),
        ("羊", "只", "sheep", "sheep"),
        ("马", "匹", "horse", "horses"),
        ("公共汽车", "辆", "bus", "buses"),
        ("盒子", "个", "box", "boxes"),
        ("三明治", "个", "sandwich", "sandwiches"),
        ("土豆", "个", "potato", "potatoes"),
        ("照片", "张", "photo", "photos"),
        ("手表", "块", "watch", "watches"),
        ("故事", "个", "story", "stories"),
    ],
)
def test_nouns(zh: str, measure: str, one: str, many: str) -> None:
    (noun,) = [noun for noun in lx.NOUNS if noun.zh == zh]
    assert (noun.measure, noun.one, noun.many) == (measure, one, many)
    phrases = {quantity(random.Random(seed), noun, 3) for seed in range(60)}
    plain = {phrase.zh: phrase.en for phrase in phrases}
    assert plain[f"一{measure}{zh}"] == article(one)
    assert plain[f"两{measure}{zh}"] == f"two {many}"
    assert plain[f"三{measure}{zh}"] == f"three {many}"


@pytest.mark.parametrize(
    ("number", "zh", "en"),
    [
        (2, "二", "two"),
        (10, "十", "ten"),
        (12, "十二", "twelve"),
        (20, "二十", "twenty"),
        (21, "二十一", "twenty-one"),
        (99, "九十九", "ninety-nine"),
        (100, "一百", "one hundred"),
        (105, "一百零五", "one hundred and five"),
        (110, "一百一十", "one hundred and ten"),
        (212, "两百一十二", "two hundred and twelve"),
        (999, "九百九十九", "nine hundred and ninety-nine"),
    ],
)
def test_numbers(number: int, zh: str, en: str) -> None:
    assert (chinese_number(number), english_number(number)) == (zh, en)
    assert counted(2) == "两"


def test_no_two_numbers_are_written_alike() -> None:
    numbers = range(1, 1000)
    assert len({chinese_number(n) for n in numbers}) == len(numbers)
    assert len({english_number(n) for n in numbers}) == len(numbers)


@settings(deadline=None)
@given(seed=st.integers(0, 10**9))
def test_dates_are_of_the_calendar(seed: int) -> None:
    zh, en = sentences.date(random.Random(seed))
    month, day = map(int, re.search(r"(\d+)月(\d+)日", zh).groups())  # type: ignore[union-attr]
    assert f"{lx.MONTHS[month - 1]} {day}" in en
    year = re.search(r"(\d{4})年", zh)
    if year:
        date = datetime.date(int(year[1]), month, day)
        assert f"{day}, {year[1]}" in en
        weekday = re.search("星期(.)", zh)
        if weekday:
            assert "一二三四五六天".index(weekday[1]) == date.weekday()
            assert en.endswith(lx.WEEKDAYS[date.weekday()])


@settings(deadline=None)
@given(seed=st.integers(0, 10**9))
def test_times_name_the_same_minute(seed: int) -> None:
    zh, en = sentences.clock(random.Random(seed))
    numbers = {chinese_number(n): n for n in range(1, 60)} | {"两": 2}
    hour, rest = re.search("[早上下晚][上午]([^点]+)点(一刻|半|三刻|零?[^分]+分)?", zh).groups()  # type: ignore[union-attr]
    minute = {"一刻": 15, "半": 30, "三刻": 45, None: 0}.get(rest, -1)
    if minute < 0:
        minute = numbers[rest.removeprefix("零").removesuffix("分")]
    words = {english_number(n): n for n in range(1, 60)}
    said = re.search(r"(?:(half|a quarter|[a-z-]+) (past|to) )?([a-z]+)(?: o'clock)? in the", en)
    assert said is not None
    found = words[said[3]] * 60
    if said[2]:
        minutes = {"half": 30, "a quarter": 15}.get(said[1]) or words[said[1]]
        found += minutes if said[2] == "past" else -minutes
    assert found % 720 == (numbers[hour] * 60 + minute) % 720, (zh, en)


def test_either_direction_and_no_other_language() -> None:
    forth, back = builtin_corpus(size=100), builtin_corpus(size=100, src="en", trg="ch")
    assert [(en, zh) for zh, en in forth.splits["train"]] == back.splits["train"]
    with pytest.raises(CorpusError, match="the built-in corpus is Chinese and English"):
        builtin_corpus(src="de", trg="en")


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(CorpusError, match="size = 3: expected at least 30"):
        builtin_corpus(size=3)


FIRST = [
    ("他爸爸每天早上画三匹马。", "His father draws three horses every morning."),
    ("我妈妈学了两个月俄语。", "My mother studied Russian for two months."),
    ("张伟每个星期天看一本小说。", "Zhang Wei reads a novel every Sunday."),
]
