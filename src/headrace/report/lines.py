"""Line charts: values over steps or seconds, one line or many."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.report.charts import percent
from headrace.report.figures import number, tick, ticks
from headrace.report.markup import Markup, json_script, tag
from headrace.report.thinning import Point, envelope

#: Looks of lines in style.css: colour and dashes, so that neither is needed alone.
LOOKS = 10
_TALL = 1000
_STRAND = 14  # pixels of each line in turn


@dataclass(frozen=True, slots=True)
class Line:
    """A named line. `width` in pixels; `dots` marks its points too."""

    name: str
    points: Sequence[Point]
    look: int = 0
    width: float = 2.0
    dots: bool = False
    area: bool = False
    strand: tuple[int, int] | None = None  # (which, of how many) that may lie over each other


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    low: float | None = None
    high: float | None = None
    written: Callable[[float], str] = number

    def tick(self, value: float) -> str:
        return tick(value) if self.written is number else self.written(value)


def line_chart(
    lines: Sequence[Line], *, label: str, x: Axis, y: Axis, small: bool = False
) -> Markup:
    """The lines on common axes; hover and arrow keys show values. `label` says in words what is to
    be seen. `small` is for many beside each other."""
    thin = [(line, envelope(line.points)) for line in lines]
    x_low, x_high = _bounds([at for _, points in thin for at, _ in points], x)
    y_low, y_high = _bounds([value for _, points in thin for _, value in points], y, room=0.06)
    y_ticks = ticks(y_low, y_high, 2 if small else 5)
    x_ticks = ticks(x_low, x_high, 2 if small else 6)
    data = {
        "x": [x_low, x_high, x.label],
        "y": [y_low, y_high],
        "lines": [
            {
                "n": line.name,
                "p": [[_short(at), _short(value), y.written(value)] for at, value in points],
            }
            for line, points in thin
        ],
    }
    plot = tag(
        "svg",
        [_across(at, y_low, y_high) for at in y_ticks],
        tag(
            "svg",
            [_drawn(line, points, (x_low, x_high), (y_low, y_high)) for line, points in thin],
            viewBox=f"0 0 {_TALL} {_TALL}",
            preserveAspectRatio="none",
            width="100%",
            height="100%",
        ),
        [
            _dot(line, point, (x_low, x_high), (y_low, y_high))
            for line, points in thin
            if (line.dots and len(points) <= 60) or len(points) == 1
            for point in points
        ],
        class_="plot",
        role="img",
        aria_label=label,
        width="100%",
        height="100%",
    )
    return tag(
        "div",
        tag("div", y.label, class_="y-label"),
        tag(
            "div",
            tag(
                "svg",
                [_y_tick(at, y_low, y_high, y.tick) for at in y_ticks],
                class_="y-axis",
                aria_hidden="true",
            ),
            tag("div", plot, class_="plot-frame"),
            tag(
                "svg",
                [
                    _x_tick(
                        at,
                        x_low,
                        x_high,
                        x.tick,
                        spare=index % 2 == 1 and len(x_ticks) > (2 if small else 3),
                    )
                    for index, at in enumerate(x_ticks)
                ],
                class_="x-axis",
                aria_hidden="true",
            ),
            tag("div", x.label, class_="x-label"),
            class_="line-grid",
        ),
        json_script(data, "line-data"),
        class_="line-chart small" if small else "line-chart",
    )


def line_legend(lines: Sequence[Line]) -> Markup:
    entries = []
    for line in lines:
        look = f"line {_look(line)}" if line.strand else f"line dashed {_look(line)}"
        stroke = tag("line", x1=0, x2=26, y1=6, y2=6, class_=look, stroke_width=3)
        sample = tag("svg", stroke, width=26, height=12, aria_hidden="true")
        entries.append(tag("li", sample, line.name))
    return tag("ul", entries, class_="legend")


def _bounds(values: Sequence[float], axis: Axis, room: float = 0.0) -> tuple[float, float]:
    low = axis.low if axis.low is not None else min(values, default=0.0)
    high = axis.high if axis.high is not None else max(values, default=1.0)
    if not high > low:
        around = abs(low) * 0.05 or 0.5
        low, high = (low if axis.low is not None else low - around), low + around
    margin = (high - low) * room
    if not math.isfinite(margin):  # values of 1e308 and the like
        return low, high
    return (
        low if axis.low is not None else low - margin,
        high if axis.high is not None else high + margin,
    )


def _drawn(
    line: Line, points: Sequence[Point], x: tuple[float, float], y: tuple[float, float]
) -> Markup:
    at = [f"{_scaled(a, x):.4g} {_TALL - _scaled(b, y):.4g}" for a, b in points]
    if not at:
        return Markup("")
    parts = []
    if line.area:
        first, last = _scaled(points[0][0], x), _scaled(points[-1][0], x)
        closed = f"M{first:.4g} {_TALL}L{'L'.join(at)}L{last:.4g} {_TALL}Z"
        parts.append(tag("path", d=Markup(closed), class_=f"area {_look(line)}"))
    if len(at) == 1:
        at = [at[0], at[0]]
    dashes = {"class_": f"line dashed {_look(line)}"}
    if line.strand is not None:
        # Each line has every n-th dash: where all lie over each other, all are to be seen.
        which, count = line.strand
        dashes = {
            "class_": f"line {_look(line)}",
            "stroke_dasharray": f"{_STRAND} {_STRAND * (count - 1)}",
            "stroke_dashoffset": f"{-_STRAND * which}",
        }
    drawn = tag("path", d=Markup(f"M{'L'.join(at)}"), stroke_width=f"{line.width:g}", **dashes)
    return Markup("".join([*parts, drawn]))


def _dot(line: Line, point: Point, x: tuple[float, float], y: tuple[float, float]) -> Markup:
    where = {"cx": percent(_scaled(point[0], x), _TALL)}
    where["cy"] = percent(_TALL - _scaled(point[1], y), _TALL)
    return tag("circle", **where, r=3.5, class_=f"dot {_look(line)}")


def _look(line: Line) -> str:
    return f"look-{line.look % LOOKS}"


def _across(at: float, low: float, high: float) -> Markup:
    where = percent(_TALL - _scaled(at, (low, high)), _TALL)
    return tag("line", x1=0, x2="100%", y1=where, y2=where, class_="grid")


def _y_tick(at: float, low: float, high: float, written: Callable[[float], str]) -> Markup:
    where = percent(_TALL - _scaled(at, (low, high)), _TALL)
    return tag("text", written(at), x="100%", y=where, dy="0.32em", dx=-6, text_anchor="end")


def _x_tick(
    at: float, low: float, high: float, written: Callable[[float], str], *, spare: bool
) -> Markup:
    """`spare` ones are left out on a phone."""
    place = _scaled(at, (low, high)) / _TALL
    anchor = "start" if place < 0.04 else "end" if place > 0.96 else "middle"
    look = "spare" if spare else None
    return tag("text", written(at), x=percent(place, 1), y=14, text_anchor=anchor, class_=look)


def _scaled(value: float, bounds: tuple[float, float]) -> float:
    low, high = bounds
    return _TALL * (value / 2 - low / 2) / (high / 2 - low / 2)  # halves: 2e308 is no number


def _short(value: float) -> float:
    return float(f"{value:.7g}")
