"""Charts of what the monitor sampled: GPU use, memory, power and CPU cores over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.report.charts import Cell, Table, figure, table
from headrace.report.figures import number, share, size, watts
from headrace.report.lines import Axis, Format, Line, LineChart
from headrace.report.thinning import Point


class Sampled(Protocol):
    """A sample of the monitor: its time, and an attribute for each sensor."""

    @property
    def at_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Sensor:
    """A sensor and how its values are written. `top` ends its scale; None: the highest value."""

    name: str
    attribute: str
    written: Callable[[float | None], str]
    format: Format
    top: float | None = None

    def points(self, samples: Sequence[Sampled]) -> list[Point]:
        found = [(sample.at_s, getattr(sample, self.attribute)) for sample in samples]
        return [(at, value) for at, value in found if value is not None]

    def scale_top(self, values: Sequence[float]) -> float:
        return self.top or max(values, default=0.0) * 1.1 or 1.0


@dataclass(frozen=True, slots=True)
class SensorView:
    """A sensor's chart and its mean; without values, neither."""

    name: str
    mean: str = ""
    chart: LineChart | None = None


NVML = Sensor("GPU use, by NVML", "gpu_share", share, "share", 1.0)
CPU_CORES = Sensor("CPU cores", "cpu_share", number, "number")
WORKER_CORES = Sensor("CPU cores of the loader workers", "workers_cpu_share", number, "number")
POWER = Sensor("GPU power", "power_w", watts, "watts")
GPU_MEMORY = Sensor("GPU memory", "gpu_memory_bytes", size, "bytes")
HOST_MEMORY = Sensor("Host memory", "host_memory_bytes", size, "bytes")


def sensor_view(sensor: Sensor, points: Sequence[Point], top: float, of: str) -> SensorView:
    """A small chart. `of` names what was sampled: charts of the same one share the cursor."""
    if not points:
        return SensorView(sensor.name)
    mean = f"mean {sensor.written(_mean(points))}".replace(" ", "\N{NO-BREAK SPACE}")
    chart = LineChart(
        f"{sensor.name} of {of} over time: {mean}",
        [Line(sensor.name, points, 0, 1.5, area=True)],
        x=Axis("time", 0.0, format="clock"),
        y=Axis("", 0.0, top, sensor.format),
        small=True,
        sync=f"use of {of}",
    )
    return SensorView(sensor.name, mean, chart)


def sensor_table(rows: Sequence[tuple[str | None, Sensor, Sequence[Point]]]) -> Table:
    """Lowest, mean and highest value of each sensor: of each plan, if plans are given."""
    has_plans = any(plan is not None for plan, _, _ in rows)
    return table(
        "What the monitor sampled",
        (*(["plan"] if has_plans else []), "sensor", "samples", "lowest", "mean", "highest"),
        [
            [
                *([] if plan is None else [plan]),
                sensor.name,
                f"{len(points):,}",
                *(
                    Cell("–") if value is None else figure(value, sensor.written)
                    for value in _extremes(points)
                ),
            ]
            for plan, sensor, points in rows
        ],
    )


def _extremes(points: Sequence[Point]) -> tuple[float | None, float | None, float | None]:
    values = [value for _, value in points]
    return (min(values), _mean(points), max(values)) if values else (None, None, None)


def _mean(points: Sequence[Point]) -> float:
    return sum(value for _, value in points) / len(points)
