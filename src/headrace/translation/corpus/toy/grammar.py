"""Draws random Chinese-English sentences from `grammar.txt`, which explains its own format."""

from __future__ import annotations

import datetime
import itertools
import random
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

_SLOT = re.compile(r"\{(\w+)(?:\.(\w+))?(?::([^}]+))?\}")
_FIRST_DATE, _DATES = datetime.date(1990, 1, 1), 14_975  # to the end of 2030
_DIGITS = "零一二三四五六七八九"
_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
    *("eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


class NoMatchingRowError(Exception):
    """No row of a table fits a slot, so this sentence cannot be finished."""


@dataclass(frozen=True, slots=True)
class GrammarRow:
    """A row of a table. `restrictions` has for each slot what it says after its colon."""

    cells: dict[str, str]
    restrictions: dict[str, str]

    def fits(self, kinds: str) -> bool:
        own = self.cells.get("kinds", "").split()
        return not own or not set(own).isdisjoint(kinds.split())


class Phrase:
    """A row, with a word drawn for each of its slots when it is first needed."""

    def __init__(self, row: GrammarRow, rng: random.Random, of: Phrase | None = None) -> None:
        self._row, self._rng = row, rng
        self._words = {} if of is None else {"of": of}

    def text(self, column: str) -> str:
        """The text of a column, with words in place of the slots."""
        cell = self._row.cells[column]
        return _SLOT.sub(lambda slot: self._fill(slot, column), cell) if "{" in cell else cell

    def _fill(self, slot: re.Match[str], column: str) -> str:
        word, column = self._word(slot[1]), slot[2] or column
        if column not in word._row.cells:  # then it is a slot, and the two words agree
            person = self._word(column).text("person")
            column = person if person in word._row.cells else "en"
        return word.text(column)

    def _word(self, slot: str) -> Phrase:
        if slot not in self._words:
            word = self._draw(slot)
            first = self._words.get(slot.removesuffix("2"))
            if first is not None and first.text("zh") == word.text("zh"):
                raise NoMatchingRowError(slot)
            self._words[slot] = word
        return self._words[slot]

    def _draw(self, slot: str) -> Phrase:
        table, wanted, of = slot.removesuffix("2"), self._row.restrictions.get(slot), None
        name, _, column = (wanted or "").partition(".")
        if name == "of" or name in tables():
            of = self._word(name)
            wanted = of.text(column) if column else None
        if table == "number":
            low, high = (wanted or "").split("-")
            return Phrase(number_row(self._rng.randint(int(low), int(high))), self._rng)
        if table == "date":
            day = _FIRST_DATE + datetime.timedelta(self._rng.randrange(_DATES))
            return Phrase(date_row(day), self._rng)
        return Phrase(draw_row(self._rng, table, wanted), self._rng, of)


def draw_sentence(rng: random.Random, row: GrammarRow | None = None) -> tuple[str, str]:
    """A random sentence, Chinese and English: of any kind, or of this `row` of "sentence"."""
    while True:
        phrase = Phrase(row or draw_row(rng, "sentence"), rng)
        try:
            zh, en = phrase.text("zh"), phrase.text("en")
        except NoMatchingRowError:
            continue
        en = re.sub(r" +(?=[ .?])", "", en)  # the spaces around slots that are empty
        en = re.sub(r"\ba (?=[aeiou])", "an ", en)
        return zh, en[0].upper() + en[1:]


def draw_row(rng: random.Random, table: str, kinds: str | None = None) -> GrammarRow:
    """A random row of a table: one of these kinds, if they are given."""
    rows, cumulative_weights = _matching(table, kinds)
    if not rows:
        raise NoMatchingRowError(table)
    return rng.choices(rows, cum_weights=cumulative_weights)[0]


@cache
def tables() -> dict[str, list[GrammarRow]]:
    """The tables of `grammar.txt`, by name."""
    found: dict[str, list[GrammarRow]] = {}
    text = resources.files(__package__).joinpath("grammar.txt").read_text(encoding="utf-8")
    rows: list[GrammarRow] = []
    columns: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith("["):
            rows, columns = found.setdefault(line.strip("[]"), []), []
        elif not columns:
            columns = cells
        elif line and line[0] != "#":
            restrictions = {slot: limit for slot, _, limit in _SLOT.findall(line) if limit}
            rows.append(GrammarRow(dict(zip(columns, cells, strict=True)), restrictions))
    return found


@cache
def _matching(table: str, kinds: str | None) -> tuple[list[GrammarRow], list[int]]:
    rows = [row for row in tables()[table] if kinds is None or row.fits(kinds)]
    return rows, list(itertools.accumulate(int(row.cells.get("weight", 1)) for row in rows))


def number_row(value: int) -> GrammarRow:
    """A number from 1 to 999 in words. Before a measure word, 2 is 两."""
    zh = "两" if value == 2 else chinese_number(value)
    return GrammarRow({"zh": zh, "en": english_number(value)}, {})


def chinese_number(value: int) -> str:
    hundreds, tens, ones = value // 100, value // 10 % 10, value % 10
    text = ("两" if hundreds == 2 else _DIGITS[hundreds]) + "百" if hundreds else ""
    if tens:
        text += ("" if value < 20 else _DIGITS[tens]) + "十"
    elif hundreds and ones:
        text += "零"
    return text + (_DIGITS[ones] if ones else "")


def english_number(value: int) -> str:
    if value < 20:
        return _ONES[value]
    if value < 100:
        return _TENS[value // 10] + (f"-{_ONES[value % 10]}" if value % 10 else "")
    rest = f" and {english_number(value % 100)}" if value % 100 else ""
    return f"{_ONES[value // 100]} hundred{rest}"


def date_row(day: datetime.date) -> GrammarRow:
    """A date with its year and, as `day_…`, without; and its day of the week."""
    month, weekday = tables()["month"][day.month - 1], tables()["weekday"][day.weekday()]
    day_zh, day_en = f"{month.cells['zh']}{day.day}日", f"{month.cells['en']} {day.day}"
    cells = {"zh": f"{day.year}年{day_zh}", "en": f"{day_en}, {day.year}"}
    cells |= {"day_zh": day_zh, "day_en": day_en}
    cells |= {"weekday_zh": weekday.cells["zh"], "weekday_en": weekday.cells["en"]}
    return GrammarRow(cells, {})
