"""The grammar of the built-in corpus: words, numbers, dates, times, and how they agree."""

from __future__ import annotations

import datetime
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.translation.corpus.toy.grammar import (
    GrammarRow,
    NoMatchingRowError,
    Phrase,
    chinese_number,
    draw_row,
    draw_sentence,
    english_number,
    number_row,
    tables,
)

MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def sentence_with(slot: str, seed: int) -> tuple[str, str]:
    """A sentence of a template that has this slot."""
    rng = random.Random(seed)
    rows = [row for row in tables()["sentence"] if slot in row.cells["zh"]]
    return draw_sentence(rng, rng.choice(rows))


@pytest.mark.parametrize("row", tables()["sentence"], ids=lambda row: row.cells["zh"])
def test_every_template_gives_different_sentences(row: GrammarRow) -> None:
    drawn = {draw_sentence(random.Random(seed), row) for seed in range(20)}
    assert len(drawn) > 5
    for zh, en in drawn:
        assert not set("{}|") & set(zh + en), (zh, en)
        assert "  " not in en
        assert " ." not in en
        assert " ?" not in en


class TestSlots:
    def test_one_slot_is_one_word(self) -> None:
        row = GrammarRow({"en": "{noun}/{noun.many}"}, {})
        noun, many = Phrase(row, random.Random(0)).text("en").split("/")
        assert (noun, many) in {(row.cells["en"], row.cells["many"]) for row in tables()["noun"]}

    def test_a_second_word_is_another_one(self) -> None:
        row = GrammarRow({"en": "{this}/{this2}"}, {})
        drawn = set()
        for seed in range(20):
            try:
                drawn.add(Phrase(row, random.Random(seed)).text("en"))
            except NoMatchingRowError:
                drawn.add("drawn again")
        assert drawn == {"this/that", "that/this", "drawn again"}

    def test_a_kind_restricts_the_rows(self) -> None:
        rng = random.Random(0)
        drawn = {draw_row(rng, "when", "habit").cells["en"][:5] for _ in range(50)}
        assert drawn == {"every"}
        with pytest.raises(NoMatchingRowError):
            draw_row(rng, "noun", "unheard-of")

    def test_a_column_of_another_word_restricts_them(self) -> None:
        for seed in range(50):
            row = GrammarRow({"en": "{verb}/{noun}"}, {"noun": "verb.takes", "verb": "habit"})
            phrase = Phrase(row, random.Random(seed))
            try:
                verb, noun = phrase.text("en").split("/")
            except NoMatchingRowError:
                continue  # nothing that one drinks is a noun: there are cups of it
            (takes,) = (r.cells["takes"] for r in tables()["verb"] if r.cells["en"] == verb)
            (kinds,) = (r.cells["kinds"] for r in tables()["noun"] if r.cells["en"] == noun)
            assert set(takes.split()) & set(kinds.split()), (verb, noun)

    @pytest.mark.parametrize(
        ("who", "expected"),
        [("我", "I am"), ("你", "you are"), ("他", "he is"), ("他们", "they are")],
    )
    def test_verbs_agree_with_their_subject(self, who: str, expected: str) -> None:
        (kinds,) = {row.cells["kinds"] for row in tables()["who"] if row.cells["zh"] == who}
        row = GrammarRow({"zh": "{who}", "en": "{who} {be.who}"}, {"who": kinds})
        said = {Phrase(row, random.Random(seed)).text("en") for seed in range(200)}
        assert expected in said


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
def test_nouns_have_their_measure_word_and_plural(
    zh: str, measure: str, one: str, many: str
) -> None:
    (noun,) = [row.cells for row in tables()["noun"] if row.cells["zh"] == zh]
    assert (noun["measure"], noun["en"], noun["many"]) == (measure, one, many)


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
    assert number_row(number).cells == {"zh": "两" if number == 2 else zh, "en": en}


def test_different_numbers_are_written_differently() -> None:
    numbers = range(1, 1000)
    assert len({chinese_number(n) for n in numbers}) == len(numbers)
    assert len({english_number(n) for n in numbers}) == len(numbers)


@settings(deadline=None)
@given(seed=st.integers(0, 10**9))
def test_dates_have_the_right_weekday(seed: int) -> None:
    zh, en = sentence_with("{date", seed)
    month, day = map(int, re.search(r"(\d+)月(\d+)日", zh).groups())  # type: ignore[union-attr]
    assert f"{MONTHS[month - 1]} {day}" in en
    year = re.search(r"(\d{4})年", zh)
    if year:
        date = datetime.date(int(year[1]), month, day)
        assert f"{day}, {year[1]}" in en
        weekday = re.search("星期(.)", zh)
        if weekday:
            assert "一二三四五六天".index(weekday[1]) == date.weekday()
            assert en.endswith(f"{WEEKDAYS[date.weekday()]}.")


@settings(deadline=None)
@given(seed=st.integers(0, 10**9))
def test_times_mean_the_same_minute_in_both_languages(seed: int) -> None:
    zh, en = sentence_with("{clock}", seed)
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
