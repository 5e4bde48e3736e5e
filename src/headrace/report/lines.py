"""Line charts: values over steps or seconds. uPlot draws them, in `static/lines.js`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.report.page import shown_text
from headrace.report.thinning import Point, envelope

#: Colors and dashes in style.css.
_LOOKS = 10
_MAX_POINTS = 4_000  # of all lines of a chart
_MAX_POINTS_SMALL = 400

#: How `lines.js` writes a value.
Format = Literal["number", "share", "bytes", "watts", "clock"]


@dataclass(frozen=True, slots=True)
class Line:
    """A named line. `width` is in pixels; `dots` marks its points; `area` fills the space below.

    Lines with `strand` (which, of how many) may lie over each other: each draws every n-th stretch,
    so that all are seen.
    """

    name: str
    points: Sequence[Point]
    look: int = 0
    width: float = 2.0
    dots: bool = False
    area: bool = False
    strand: tuple[int, int] | None = None

    @property
    def look_class(self) -> str:
        return f"look-{self.look % _LOOKS}"


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis. Without `low` and `high` it spans the values."""

    label: str
    low: float | None = None
    high: float | None = None
    format: Format = "number"


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines on common axes. `label` describes the chart for screen readers.

    `small` is for many charts beside each other. Charts with the same `sync` share cursor and zoom.
    """

    label: str
    lines: Sequence[Line]
    x: Axis
    y: Axis
    small: bool = False
    sync: str = ""

    @property
    def data(self) -> dict[str, Any]:
        """What `lines.js` reads."""
        limit = _MAX_POINTS_SMALL if self.small else max(400, _MAX_POINTS // len(self.lines))
        return {
            "x": _axis(self.x),
            "y": _axis(self.y),
            "sync": shown_text(self.sync),
            "lines": [_line(line, limit) for line in self.lines],
        }


def _axis(axis: Axis) -> dict[str, Any]:
    return {"label": axis.label, "low": axis.low, "high": axis.high, "format": axis.format}


def _line(line: Line, limit: int) -> dict[str, Any]:
    points = [(_short(at), _short(value)) for at, value in envelope(sorted(line.points), limit)]
    return {
        "name": shown_text(line.name),
        "x": [at for at, _ in points],
        "y": [value for _, value in points],
        "look": line.look % _LOOKS,
        "width": line.width,
        "dots": line.dots and len(points) <= 60,
        "area": line.area,
        "strand": line.strand,
    }


def _short(value: float) -> float:
    """Seven digits; values near the end of the range of a float would overflow in the scales."""
    return float(f"{math.copysign(min(abs(value), 1e300), value):.7g}")
