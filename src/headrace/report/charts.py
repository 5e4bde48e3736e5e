"""Bars, legends and tables, as HTML with inline SVG.

Hand-made rather than plotly's: that would put 4.6 MB of script into every file, draws nothing
without it, and cannot be read by keyboard or screen reader. Here text is HTML or unscaled SVG text,
so it keeps its size from a phone to a wide screen; lengths are percentages of the chart's width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.report.figures import tick, ticks
from headrace.report.markup import Child, Markup, tag


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar. `look` is the name of a fill in style.css."""

    value: float
    look: str
    label: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar with its label before it and its value behind it. `low` and `high` are drawn as a
    whisker, `tip` is shown on hover and focus, `mark` is a class of the row."""

    label: Child
    segments: Sequence[Segment]
    value: Child
    tip: str
    low: float | None = None
    high: float | None = None
    mark: str | None = None


def bars(
    rows: Sequence[Bar], *, label: str, most: float, unit: str, long_labels: bool = False
) -> Markup:
    """Bars on one scale from 0 to `most`, with an axis below. `long_labels` gives labels more
    room."""
    most = most if most > 0 else 1.0
    axis = tag(
        "div",
        tag("span"),
        tag(
            "svg",
            [_tick(at, most, unit) for at in ticks(0, most, 4)],
            class_="axis",
            width="100%",
            height=22,
        ),
        tag("span"),
        class_="bar-axis",
        aria_hidden="true",
    )
    return tag(
        "div",
        [_bar_row(row, most) for row in rows],
        axis,
        class_="bars marks long" if long_labels else "bars marks",
        role="list",
        aria_label=label,
    )


def _bar_row(row: Bar, most: float) -> Markup:
    drawn: list[Markup] = [
        tag("line", x1=percent(at, most), x2=percent(at, most), y1=0, y2="100%", class_="grid")
        for at in ticks(0, most, 4)
    ]
    begins = 0.0
    for segment in row.segments:
        if segment.value > 0:
            drawn.append(
                tag(
                    "rect",
                    x=percent(begins, most),
                    y=3,
                    width=percent(segment.value, most),
                    height=20,
                    class_=f"fill {segment.look}",
                )
            )
            begins += segment.value
    if row.low is not None and row.high is not None and row.high > row.low:
        low, high = percent(row.low, most), percent(row.high, most)
        drawn += [
            tag("line", x1=low, x2=high, y1=13, y2=13, class_="whisker"),
            tag("line", x1=low, x2=low, y1=8, y2=18, class_="whisker"),
            tag("line", x1=high, x2=high, y1=8, y2=18, class_="whisker"),
        ]
    return tag(
        "div",
        tag("span", row.label, class_="bar-label"),
        tag("svg", drawn, class_="bar", width="100%", height=26, aria_hidden="true"),
        tag("span", row.value, class_="bar-value"),
        class_=f"bar-row mark {row.mark or ''}".rstrip(),
        role="listitem",
        data_tip=row.tip,
    )


def _tick(at: float, most: float, unit: str) -> Markup:
    where = percent(at, most)
    anchor = "start" if at == 0 else "end" if at > most * 0.97 else "middle"
    if unit == "ms" and most < 0.1:
        at, unit = at * 1e3, "µs"
    text = f"{tick(at)} {unit}" if at else "0"
    return tag("text", text, x=where, y=15, text_anchor=anchor)


def meter(value: float | None, text: str, look: str = "compute") -> Markup:
    """A share from 0 to 1 as a small bar with its figure, for a table's cell."""
    if value is None:
        return tag("span", "–", class_="unknown")
    filled = percent(min(1.0, max(0.0, value)), 1)
    return tag(
        "span",
        tag(
            "svg",
            tag("rect", width="100%", height=10, class_="track"),
            tag("rect", width=filled, height=10, class_=f"fill {look}"),
            width="100%",
            height=10,
            aria_hidden="true",
        ),
        tag("span", text),
        class_="meter",
    )


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """What each fill means: (look, words)."""
    return tag(
        "ul",
        [
            tag(
                "li",
                tag(
                    "svg",
                    tag("rect", width=18, height=12, class_=f"fill {look}"),
                    width=18,
                    height=12,
                    aria_hidden="true",
                ),
                words,
            )
            for look, words in entries
        ],
        class_="legend",
    )


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: what is shown, and the exact value behind it."""

    shown: Child
    value: float | str | None = None
    look: str | None = None


Cells = Sequence[Cell | Child]


def table(
    caption: str,
    columns: Sequence[Child],
    rows: Iterable[Cells],
    *,
    class_: str = "",
) -> Markup:
    """A table whose first column heads its rows. It scrolls sideways within itself, by keyboard
    too; the page does not."""
    rows = list(rows)
    looks = ["number" if _has_numbers(rows, at) else None for at in range(len(columns))]
    head = tag(
        "tr",
        [
            tag("th", column, scope="col", class_=look)
            for column, look in zip(columns, looks, strict=True)
        ],
    )
    body = [
        tag("tr", [_cell(cell, looks[at], heads_row=at == 0) for at, cell in enumerate(row)])
        for row in rows
    ]
    drawn = tag(
        "table",
        tag("caption", caption),
        tag("thead", head),
        tag("tbody", body),
        class_=class_ or None,
    )
    return tag("div", drawn, class_="scroll", tabindex=0, role="region", aria_label=caption)


def _has_numbers(rows: Sequence[Cells], at: int) -> bool:
    """Whether a column has figures: they stand at its right, and so do its heading and what is
    not known."""
    cells = [row[at] for row in rows if at < len(row)]
    return any(isinstance(cell, Cell) and isinstance(cell.value, int | float) for cell in cells)


def _cell(cell: Cell | Child, column_look: str | None, *, heads_row: bool) -> Markup:
    if not isinstance(cell, Cell):
        cell = Cell(cell)
    name, scope = ("th", "row") if heads_row else ("td", None)
    exact = repr(float(cell.value)) if isinstance(cell.value, int | float) else cell.value
    look = " ".join(filter(None, (column_look, cell.look))) or None
    return tag(name, cell.shown, scope=scope, data_value=exact, class_=look)


def as_table(summary: str, content: Child) -> Markup:
    """The figures of a chart for those who do not see it, or want them exactly."""
    return tag("details", tag("summary", summary), content)


def empty(why: Child) -> Markup:
    """In place of a chart for which there is nothing."""
    return tag("p", why, class_="empty")


def percent(value: float, most: float) -> str:
    """A length for an SVG attribute."""
    share = 100 * value / most if most else 0.0
    return f"{min(max(share, -1e6), 1e6):.3f}".rstrip("0").rstrip(".") + "%"
