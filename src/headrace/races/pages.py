"""One HTML file with the races of a run: for each a picture of its timelines, and its lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.races.findings import Finding
from headrace.races.history import Moment
from headrace.races.source import source_line
from headrace.source_lines import Site, short_path

# Sizes of the picture, in pixels.
LANE, ROW, GAP, HEAD = 148, 40, 22, 44
BOX_WIDTH, BOX_HEIGHT = 100, 26
_MAX_LABEL = 14


@dataclass(frozen=True, slots=True)
class Row:
    """One moment in the picture, or, without a `lane`, `hidden` moments that are left out."""

    y: int
    height: int
    lane: int | None = None
    label: str = ""
    does: str = ""
    role: str = ""
    place: str = ""
    text: str = ""
    hidden: int = 0


@dataclass(frozen=True, slots=True)
class Arrow:
    """An order between two moments; the one that is missing has `missing`."""

    path: str
    missing: bool = False


@dataclass(frozen=True, slots=True)
class Drawing:
    """A race's picture: lanes from left to right, time from top to bottom."""

    lanes: list[tuple[str, str]]
    rows: list[Row]
    arrows: list[Arrow]
    width: int
    height: int


def race_page(findings: Sequence[Finding], title: str = "Stream races") -> str:
    """The whole page. It loads nothing."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("headrace.races"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("races.html").render(
        title=title,
        findings=[(finding, draw(finding)) for finding in findings],
        place=_place,
        sizes={"lane": LANE, "box_width": BOX_WIDTH, "box_height": BOX_HEIGHT, "head": HEAD},
    )


def draw(finding: Finding) -> Drawing:
    picture = finding.picture
    lanes = picture.lanes()
    rows: list[Row] = []
    placed: dict[int, tuple[int, int]] = {}
    y, before = HEAD, None
    for moment in picture.moments:
        if before is not None and moment.number > before + 1:
            rows.append(Row(y, GAP, hidden=moment.number - before - 1))
            y += GAP
        lane = lanes.index(moment.lane)
        rows.append(_row(moment, lane, y, picture.first, picture.second))
        placed[moment.number] = lane * LANE + LANE // 2, y + ROW // 2
        y, before = y + ROW, moment.number
    arrows = [
        Arrow(_path(placed[moment.after], placed[moment.number]))
        for moment in picture.moments
        if moment.after in placed and moment.number in placed
    ]
    missing = _path(placed[picture.first], placed[picture.second], nudge=8)
    arrows.append(Arrow(missing, missing=True))
    made_at = finding.made_at
    return Drawing(
        [
            (_short(lane), lane if lane not in made_at else f"{lane}, made at {made_at[lane]}")
            for lane in lanes
        ],
        rows,
        arrows,
        LANE * len(lanes),
        y,
    )


def _row(moment: Moment, lane: int, y: int, first: int, second: int) -> Row:
    role = {first: "first", second: "second"}.get(moment.number, "")
    label = _short(moment.name.removeprefix("aten::").partition("(")[0])
    text = source_line(moment.site)
    return Row(y, ROW, lane, label, moment.does, role, _place(moment.site), text)


def _path(start: tuple[int, int], end: tuple[int, int], nudge: int = 0) -> str:
    """A line from the side of one box, down between the lanes, to the side of another."""
    (x1, y1), (x2, y2) = start, end
    right = x2 >= x1
    side, corner = BOX_WIDTH // 2, min(10, max(2, (y2 - y1) // 2))
    x1 += side if right else -side
    x2 += -side if x2 > x1 else side
    middle = x1 + (LANE - BOX_WIDTH) // 2 * (1 if right else -1) + nudge
    tip = x2 - 5 if x2 > middle else x2 + 5
    return (
        f"M{x1} {y1} Q{middle} {y1} {middle} {y1 + corner} "
        f"L{middle} {y2 - corner} Q{middle} {y2} {tip} {y2}"
    )


def _short(text: str) -> str:
    return text if len(text) <= _MAX_LABEL else text[: _MAX_LABEL - 1] + "…"


def _place(site: Site) -> str:
    return f"{short_path(site.file)}:{site.line}"
