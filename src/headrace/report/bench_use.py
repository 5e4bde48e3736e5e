"""Use over time of a bench result: what the monitor saw while each plan ran."""

from __future__ import annotations

from collections.abc import Callable

from headrace.report.bench_result import BenchResult, Row, Sample
from headrace.report.charts import empty
from headrace.report.figures import clock, number, share, size
from headrace.report.lines import Axis, Line, line_chart
from headrace.report.markup import Markup, tag
from headrace.report.page import Section

#: The monitor's sensors: name, what it reads, how that is written, the top of its scale.
_Sensor = tuple[str, Callable[[Sample], float | None], Callable[[float], str], float | None]
_SENSORS: tuple[_Sensor, ...] = (
    ("GPU use, by NVML", lambda sample: sample.gpu_share, share, 1.0),
    ("CPU cores", lambda sample: sample.cpu_share, number, None),
    ("GPU power", lambda sample: sample.power_w, lambda watts: f"{watts:,.0f} W", None),
    ("GPU memory", lambda sample: sample.gpu_memory_bytes, size, None),
)


def use_section(result: BenchResult) -> Section:
    title, anchor = "Use over time", "use"
    rows = [row for row in result.rows if row.samples]
    seen = [sensor for sensor in _SENSORS if any(_points(row, sensor) for row in rows)]
    if not seen:
        why = "The monitor recorded no samples" if not rows else "No sensor could be read"
        return Section(anchor, title, "", empty(f"{why} here."))
    lead = "What the monitor saw while each plan ran."
    if _SENSORS[0] in seen:
        lead += (
            " NVML's GPU use says that something ran, not that the GPU was full: compare it with "
            "the shares above."
        )
    tops = {
        sensor[0]: sensor[3]
        or max(value for row in rows for _, value in _points(row, sensor)) * 1.1
        or 1.0
        for sensor in seen
    }
    drawn = [
        tag(
            "div",
            tag("h3", row.plan),
            [_use_chart(row, sensor, tops[sensor[0]]) for sensor in seen],
        )
        for row in rows
    ]
    return Section(
        anchor, title, lead, tag("div", tag("div", drawn, class_="matrix"), class_="chart")
    )


def _points(row: Row, sensor: _Sensor) -> list[tuple[float, float]]:
    found = [(sample.at_s, sensor[1](sample)) for sample in row.samples]
    return [(at, value) for at, value in found if value is not None]


def _use_chart(row: Row, sensor: _Sensor, top: float) -> Markup:
    name, _, written, _ = sensor
    points = _points(row, sensor)
    if not points:
        return tag("figure", tag("figcaption", f"{name}: not seen"))
    mean = sum(value for _, value in points) / len(points)
    chart = line_chart(
        [Line(name, points, 0, 1.5, area=True)],
        label=f"{name} of {row.plan} over time: mean {written(mean)}",
        x=Axis("time", 0.0, written=clock),
        y=Axis("", 0.0, top, written),
        small=True,
    )
    return tag("figure", tag("figcaption", f"{name}: mean {written(mean)}"), chart)
