"""The tables of a bench page."""

from __future__ import annotations

from typing import Any

from headrace.records import WEIGHTS, BenchResult, PlanResult
from headrace.report.bench_labels import plan_label
from headrace.report.charts import Cell, Column, Table, figure, meter, table
from headrace.report.figures import number, plain, share, size, times


def stream_table(result: BenchResult) -> Table | None:
    body = [
        [
            plan_label(result, row) if index == 0 else Cell(row.plan, look="again"),
            stream.name,
            meter(stream.busy_share, stream.busy_share, share),
            figure(stream.kernels_per_step),
            figure(stream.copies_per_step),
            meter(row.overlap_share, row.overlap_share, share, "copy") if index == 0 else "",
        ]
        for row in result.rows
        for index, stream in enumerate(row.streams)
    ]
    columns = ("plan", "stream", "busy", "kernels per step", "copies per step", "two at once")
    return table("Streams of each plan", columns, body, look="streams") if body else None


def score_table(result: BenchResult) -> Table | None:
    rows = [row for row in result.rows if row.score]
    rows.sort(key=lambda row: -(row.score.total if row.score else 0.0))
    columns: list[Column | str] = ["plan", "total, of 100"]
    columns += [Column(name, f"of {weight}") for name, weight in WEIGHTS.items()]
    body = [
        [
            plan_label(result, row),
            _score_part(row, "total", 100, "plain"),
            *(_score_part(row, name, weight, "compute") for name, weight in WEIGHTS.items()),
        ]
        for row in rows
    ]
    return table("Scores, best first", columns, body, look="scores") if rows else None


def _score_part(row: PlanResult, name: str, weight: float, look: str) -> Cell:
    value: float = getattr(row.score, name)
    return meter(value, value / weight, number, look)


def figure_table(result: BenchResult) -> Table:
    """Every figure of every row."""
    columns = (
        *("plan", "ms per step", "speed", f"{result.work.unit} per second", "ms per pass"),
        *("waits per step", "host blocked ms", "data ms", "GPU busy", "NVML", "CPU cores"),
        *("power W", "peak memory", "reserved", "longer than GPU busy", "streams overlap"),
        "losses",
    )
    body = [_figures_of(result, row) for row in result.rows]
    return table("All rows", columns, body, look="wide")


def _figures_of(result: BenchResult, row: PlanResult) -> list[Cell | str]:
    gpu = row.gpu
    return [
        plan_label(result, row),
        figure(None if row.ms_per_step is None else row.ms_per_step.median),
        figure(row.speedup, times),
        figure(row.per_s),
        figure(row.pass_ms),
        figure(None if row.waits is None else row.waits.per_step),
        figure(row.host_blocked_ms),
        figure(row.data_wait_ms),
        figure(None if gpu is None else gpu.busy_share, share),
        figure(row.nvml_share, share),
        figure(row.cpu_share),
        figure(row.power_w),
        figure(row.peak_memory_bytes, size),
        figure(row.reserved_memory_bytes, size),
        figure(None if gpu is None else gpu.over_busy_share, share),
        figure(row.overlap_share, share),
        row.error or row.equal.verdict,
    ]


def plans_view(result: BenchResult) -> dict[str, Any]:
    """The fields in which the plans differ."""
    rows = [(row.plan, row.fields) for row in result.rows if row.fields]
    if not rows:
        return {"table": None, "why": "This result does not hold the plans' fields."}
    body: list[list[Cell | str]] = []
    for name in dict.fromkeys(name for _, fields in rows for name in fields if name != "name"):
        values = [plain(fields.get(name)) for _, fields in rows]
        if len(set(values)) > 1:
            looks = ["" if value == values[0] else "changed" for value in values]
            cells = [Cell(value, look=look) for value, look in zip(values, looks, strict=True)]
            body.append([name, *cells])
    if not body:
        return {"table": None, "why": "No field differs between the plans."}
    columns = ("field", *(plan for plan, _ in rows))
    return {
        "table": table("Fields that differ", columns, body, look="plans"),
        "first": rows[0][0],
    }
