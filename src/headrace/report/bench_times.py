"""Times, GPU use and host waits on a bench page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.records import BenchResult, PlanResult, WaitFigures
from headrace.report.bench_labels import bar_look, busy_ms, plan_label
from headrace.report.charts import Bar, BarChart, Cell, Cells, Segment, figure, table
from headrace.report.figures import brief, ms, number, share, times, words

_REASON_LOOKS = 8


#: Reasons of the engine's own waits, in words.
_REASONS = {
    "sync": "the plan waits for the device",
    "run_ahead": "the host is as far ahead as the plan allows",
    "data": "the loader has no batch yet",
    "copy": "a copy that the host waits for",
    "pageable_copy": "a copy from memory that is not pinned",
    "losses": "a loss is read",
}


def speed_view(result: BenchResult) -> dict[str, Any]:
    paces = [row.ms_per_step for row in result.rows if row.ms_per_step is not None]
    return {
        "has_gpu_time": any(
            row.ms_per_step is not None and busy_ms(row) is not None for row in result.rows
        ),
        "bars": BarChart(
            "Milliseconds per step of each plan",
            [_pace_bar(result, row) for row in result.rows],
            top=max((pace.high for pace in paces), default=1.0),
            unit="ms",
        ),
        "table": table(
            "Milliseconds per step",
            ("plan", "median ms", "lowest", "highest", "repeats", "GPU busy ms", "speed"),
            [
                [row.plan, *_pace_cells(row), figure(busy_ms(row)), figure(row.speedup, times)]
                for row in result.rows
            ],
        ),
    }


def _pace_cells(row: PlanResult) -> list[Cell | str]:
    pace = row.ms_per_step
    if pace is None:
        return [row.error or "not measured", "–", "–", "–"]
    repeats = ", ".join(number(value) for value in pace.repeats) or "–"
    return [figure(pace.median), figure(pace.low), figure(pace.high), repeats]


def _pace_bar(result: BenchResult, row: PlanResult) -> Bar:
    label, pace, busy = plan_label(result, row), row.ms_per_step, busy_ms(row)
    if pace is None:
        value = "failed" if row.error else "not measured"
        tip = f"{row.plan}: {row.error or 'not measured'}"
        return Bar(label, [], value, tip, look="is-failed")
    tip = (
        f"{row.plan}: {ms(pace.median)} per step, {number(pace.low)} to {ms(pace.high)} over "
        f"{len(pace.repeats) or 1} repeats"
    )
    segments = [Segment(pace.median, "plain")]
    if busy is not None:
        busy = min(busy, pace.median)
        segments = [Segment(busy, "compute"), Segment(pace.median - busy, "idle")]
        tip += f"; the GPU works for {ms(busy)} of it"
    if row.speedup is not None:
        tip += f"; {times(row.speedup)}"
    return Bar(
        label,
        segments,
        value=ms(pace.median),
        tip=tip,
        note=times(row.speedup),
        low=pace.low,
        high=pace.high,
        look=bar_look(result, row),
    )


def gpu_view(result: BenchResult) -> dict[str, Any] | None:
    seen = [
        (row, row.gpu)
        for row in result.rows
        if row.gpu is not None and row.gpu.busy_share is not None
    ]
    if not seen:
        return None
    bars = []
    for row, gpu in seen:
        # Clamped: a damaged result must not draw a bar of more than 100 %.
        busy = min(1.0, max(0.0, gpu.busy_share or 0.0))
        compute = busy if gpu.compute_share is None else min(busy, max(0.0, gpu.compute_share))
        shares = {"compute": compute, "copy": busy - compute, "idle": 1.0 - busy}
        tip = (
            f"{row.plan}: computing {share(compute)}, only copying {share(busy - compute)}, "
            f"idle {share(1.0 - busy)} of the time"
        )
        segments = [Segment(part * 100, look) for look, part in shares.items()]
        look = bar_look(result, row)
        bars.append(Bar(plan_label(result, row), segments, share(busy), tip, "busy", look=look))
    rows: list[Cells] = [
        [
            row.plan,
            *(
                figure(value, share)
                for value in (
                    *(gpu.busy_share, gpu.compute_share, gpu.copy_share),
                    *(gpu.idle_share, row.nvml_share),
                )
            ),
            figure(gpu.launches_per_step),
            figure(gpu.over_busy_share, share),
        ]
        for row, gpu in seen
    ]
    return {
        "bars": BarChart("GPU use of each plan", bars, top=100, unit="%"),
        "table": table(
            "Shares of wall time, from a profiler window, and NVML's figure",
            (
                *("plan", "busy", "computing", "copying", "idle", "NVML", "launches per step"),
                "longer than GPU busy",
            ),
            rows,
        ),
    }


def waits_view(result: BenchResult) -> dict[str, Any] | None:
    rows = [(row, row.waits) for row in result.rows if row.waits is not None]
    if not rows:
        return None
    reasons = _reasons([row for row, _ in rows])
    looks = {reason: f"reason-{at % _REASON_LOOKS}" for at, reason in enumerate(reasons)}
    bars = []
    for row, waits in rows:
        costs = {r: waits.by_reason[r].ms_per_step for r in reasons if r in waits.by_reason}
        parts = ", ".join(f"{words(reason)} {ms(cost)}" for reason, cost in costs.items())
        bars.append(
            Bar(
                plan_label(result, row),
                [Segment(cost, looks[reason]) for reason, cost in costs.items()],
                ms(sum(costs.values())),
                f"{row.plan}: {parts or 'never'}; {number(waits.per_step)} waits per step",
                f"{brief(waits.per_step)} per step",
                look=bar_look(result, row),
            )
        )
    return {
        "legend": [
            (looks[reason], ": ".join(filter(None, (words(reason), _REASONS.get(reason)))))
            for reason in reasons
        ],
        "bars": BarChart(
            "Host waits of each plan by reason",
            bars,
            top=max(sum(part.value for part in bar.segments) for bar in bars),
            unit="ms",
        ),
        "table": table(
            "Host waits per step by reason: how many, and milliseconds",
            ("plan", *(words(reason) for reason in reasons), "waits", "host blocked ms", "data ms"),
            [
                [
                    row.plan,
                    *(_wait_cell(waits.by_reason.get(reason)) for reason in reasons),
                    figure(waits.per_step),
                    figure(row.host_blocked_ms),
                    figure(row.data_wait_ms),
                ]
                for row, waits in rows
            ],
        ),
    }


def _reasons(rows: Sequence[PlanResult]) -> list[str]:
    """All reasons, the costliest first."""
    costs: dict[str, float] = {}
    for row in rows:
        for reason, wait in (row.waits.by_reason if row.waits else {}).items():
            costs[reason] = costs.get(reason, 0.0) + wait.ms_per_step
    return sorted(costs, key=lambda reason: (-costs[reason], reason))


def _wait_cell(found: WaitFigures | None) -> Cell:
    if found is None:
        return Cell("–")
    return Cell(f"{number(found.per_step)} × · {ms(found.ms_per_step)}", found.ms_per_step)
