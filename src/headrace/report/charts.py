"""Bars and tables: what `templates/parts.html` lays out.

Bars are inline SVG whose lengths are percentages of the chart's width; text is HTML or unscaled SVG
text. So a chart fits any width, prints, and needs no script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from headrace.report.figures import number, tick, ticks


@dataclass(frozen=True, slots=True)
class Badge:
    """A word in a small frame behind a name. `title` is shown on hover."""

    text: str
    look: str = ""
    title: str | None = None


@dataclass(frozen=True, slots=True)
class Meter:
    """A small bar in a table's cell. `width` is its share of the cell as an SVG length."""

    width: str
    look: str


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table, or the label of a bar: its text, and the exact value behind it.

    `look` is a class of style.css.
    """

    text: str
    value: float | str | None = None
    look: str = ""
    badges: Sequence[Badge] = ()
    meter: Meter | None = None

    @property
    def exact(self) -> str | None:
        return repr(float(self.value)) if isinstance(self.value, int | float) else self.value


@dataclass(frozen=True, slots=True)
class Column:
    """The heading of a column, with a smaller note behind it."""

    name: str
    note: str = ""
    look: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose first column heads its rows."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    look: str = ""


#: A row of a table; plain text becomes a cell.
Cells = Sequence[Cell | str]


def table(
    caption: str,
    columns: Iterable[Column | str],
    rows: Iterable[Cells],
    *,
    look: str = "",
) -> Table:
    """A table in which columns of numbers are aligned right, headings and dashes included."""
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    heads = [head if isinstance(head, Column) else Column(head) for head in columns]
    for at, head in enumerate(heads):
        if any(isinstance(row[at].value, int | float) for row in cells):
            heads[at] = replace(head, look="number")
    return Table(caption, heads, cells, look)


def figure(value: float | None, written: Callable[[float | None], str] = number) -> Cell:
    """A number in a table."""
    return Cell(written(value), value)


def meter(
    value: float | None,
    share: float | None,
    written: Callable[[float | None], str],
    look: str = "compute",
) -> Cell:
    """A number in a table with a small bar before it that is filled to `share`, from 0 to 1."""
    if value is None or share is None:
        return Cell("–", look="unknown")
    return Cell(written(value), value, meter=Meter(percent(min(1.0, max(0.0, share)), 1), look))


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar. `look` names its fill in style.css."""

    value: float
    look: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar with a label before it, and a value and a note behind it.

    A whisker spans `low` to `high`. `tip` is shown on hover and focus. `look` is the row's class.
    """

    label: Cell
    segments: Sequence[Segment]
    value: str
    tip: str
    note: str = ""
    low: float | None = None
    high: float | None = None
    look: str = ""


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars on one scale from 0 to `top`."""

    label: str
    bars: Sequence[Bar]
    top: float
    unit: str
    long_labels: bool = False

    def at(self, value: float) -> str:
        """Where a value is on the scale, as an SVG length."""
        return percent(value, self.top if self.top > 0 else 1.0)

    def fills(self, bar: Bar) -> Iterator[tuple[str, str, str]]:
        """Start, width and look of each part of a bar."""
        start = 0.0
        for segment in bar.segments:
            if segment.value > 0:
                yield self.at(start), self.at(segment.value), segment.look
                start += segment.value

    def has_whisker(self, bar: Bar) -> bool:
        return bar.low is not None and bar.high is not None and bar.high > bar.low

    @property
    def ticks(self) -> list[tuple[str, str, str]]:
        """Place, text anchor and text of each mark on the axis."""
        top = self.top if self.top > 0 else 1.0
        scale, unit = (1e3, "µs") if self.unit == "ms" and top < 0.1 else (1.0, self.unit)
        return [
            (
                self.at(value),
                "start" if value == 0 else "end" if value > top * 0.97 else "middle",
                f"{tick(value * scale)} {unit}" if value else "0",
            )
            for value in ticks(0, top, 4)
        ]


def percent(value: float, whole: float) -> str:
    """A share of `whole` as a length in SVG."""
    share = 100 * value / whole if whole else 0.0
    return f"{min(max(share, -1e6), 1e6):.3f}".rstrip("0").rstrip(".") + "%"
