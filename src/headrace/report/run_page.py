"""The values of the page of a sped-up script, `templates/run.html`."""

from __future__ import annotations

from pathlib import Path

from headrace.records import RunPart, RunResult
from headrace.report.charts import Cell, Cells, Table, figure, table
from headrace.report.environment import environment_view
from headrace.report.figures import brief, moment, ms, size, times
from headrace.report.page import Stat, Summary, render_page


def run_page(result: RunResult, source: str) -> str:
    """The page of a `headrace run`."""
    environment = result.environment
    device = environment.device_name or environment.device
    shown = ("run", Path(result.program).name, device, moment(environment.date))
    values = {
        "source": source,
        "kicker": " · ".join(filter(None, shown)),
        "summary": _summary(result),
        "parts": _parts(result),
        "eager": _eager(result),
        "checks": _checks(result),
        "remarks": [
            *result.decisions,
            *result.notes,
            *(f"{part.name}: {part.rounding}" for part in result.parts if part.rounding),
        ],
        "environment": environment_view(environment, {"optimizer steps": result.steps}),
    }
    return render_page("run.html", values)


def _summary(result: RunResult) -> Summary:
    captured = sum(1 for part in result.parts if part.replays)
    stats = [
        Stat("Parts replayed", f"{captured} of {len(result.parts)}"),
        Stat("Memory of graphs", size(sum(part.memory_bytes for part in result.parts))),
    ]
    before, after = result.before_ms, result.after_ms
    if before is None or not after:
        headline = "Too few steps to time them before and after"
        if result.races is not None:
            headline = "The fake device has no times"
        return Summary(headline, f"{result.steps:,}", "steps", [], stats)
    stats.insert(0, Stat("A step", ms(after), ms(before)))
    headline = f"A step is {times(before / after)} as fast as the script's own"
    return Summary(headline, ms(after), "per step", [], stats)


def _parts(result: RunResult) -> Table | None:
    columns = ("part", "line", "replays", "graphs", "memory", "why not")
    rows: list[Cells] = [
        [
            part.name,
            _place(part),
            figure(part.replays, brief),
            figure(part.captures, brief),
            figure(part.memory_bytes, size),
            part.why or "",
        ]
        for part in result.parts
    ]
    return table("Parts of the script", columns, rows) if rows else None


def _eager(result: RunResult) -> Table | None:
    rows: list[Cells] = [
        [part.name, figure(count, brief), why]
        for part in result.parts
        for why, count in part.eager.items()
    ]
    return table("By part and reason", ("part", "calls", "why"), rows) if rows else None


def _checks(result: RunResult) -> Table | None:
    rows: list[Cells] = [
        [
            part.name,
            figure(part.check.replays, brief),
            Cell("yes" if part.check.is_equal else "no"),
            figure(part.check.worst, brief),
            part.check.where,
        ]
        for part in result.parts
        if part.check is not None
    ]
    columns = ("part", "replays compared", "equal", "largest difference", "where")
    return table("The first replays", columns, rows) if rows else None


def _place(part: RunPart) -> str:
    return f"{part.line.file}:{part.line.line}" if part.line.file else ""
