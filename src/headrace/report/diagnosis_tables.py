"""The tables of a diagnosis's page."""

from __future__ import annotations

from headrace.records import DiagnosedLine, DiagnosisResult, LineRecord, PythonLine
from headrace.report.charts import Cell, Cells, Table, figure, table
from headrace.report.figures import brief, ms, times
from headrace.source_lines import short_path


def rank_table(result: DiagnosisResult) -> Table | None:
    if len(result.ranks) < 2:
        return None
    columns = ("rank", "host", "step ms", "computing ms", "waits for others ms", "longest line")
    rows: list[Cells] = [
        [
            one.name,
            one.host,
            *(figure(value) for value in (one.step_ms, one.computing_ms, one.waits_ms)),
            f"{place_of(one.lines[0].line)} ({ms(one.lines[0].ms)})" if one.lines else "–",
        ]
        for one in result.ranks
    ]
    return table("Ranks", columns, rows)


def python_table(result: DiagnosisResult) -> Table | None:
    if not result.python_lines:
        return None
    columns = ("line", "ms", "idle ms", "gain ms")
    rows: list[Cells] = [
        [place_of(shown_line(one)), figure(one.ms), figure(one.idle_ms), figure(one.gain_ms)]
        for one in result.python_lines
    ]
    return table("Python between launches", columns, rows)


def line_table(result: DiagnosisResult) -> Table | None:
    if not result.lines:
        return None
    columns: tuple[str, ...] = ("line", "form", "waits per step")
    rows: list[Cells] = [
        [place_of(shown_line(one)), one.title, figure(one.per_step, brief)] for one in result.lines
    ]
    if has_times(result):
        columns = (*columns, "blocked ms", "idle ms", "gain ms")
        rows = [
            [*row, figure(one.blocked_ms), figure(one.idle_ms), figure(one.gain_ms)]
            for row, one in zip(rows, result.lines, strict=True)
        ]
    return table("Lines that made the host wait", columns, rows)


def has_times(result: DiagnosisResult) -> bool:
    return any(one.blocked_ms is not None for one in result.lines)


def prediction_table(result: DiagnosisResult) -> Table | None:
    if not result.predictions:
        return None
    rows: list[Cells] = [
        [one.change, figure(one.step_ms), Cell(times(one.speedup), one.speedup)]
        for one in result.predictions
    ]
    return table("What a step would take", ("change", "ms", "times as fast"), rows)


def shown_line(one: DiagnosedLine | PythonLine) -> LineRecord | None:
    """The line; for generated code, which nobody can look up, the user's line that ran it."""
    is_generated = one.line is not None and one.line.file.startswith("<")
    return one.called_from if is_generated and one.called_from is not None else one.line


def place_of(line: LineRecord | None) -> str:
    return "unknown" if line is None else f"{short_path(line.file)}:{line.line}"
