"""Writes the report of a stored result, and its timelines for Perfetto."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from headrace.atomic_files import replace_file
from headrace.device import Timeline
from headrace.errors import HeadraceError, ReportError
from headrace.records import BenchResult, DiagnosisResult, RunResult, TrainingRun, read_result
from headrace.report.bench_page import bench_page
from headrace.report.diagnosis_page import diagnosis_page
from headrace.report.run_page import run_page
from headrace.report.train_page import train_page
from headrace.report.tune_page import tune_page
from headrace.schema import read_json

log = logging.getLogger("headrace")


def render(source: str | Path) -> str:
    """The HTML of a result of bench, tune, diagnose or run, or of a run folder."""
    source = _source(source)
    if source.is_dir():
        return train_page(TrainingRun.read(source), source.name)
    result = read_result(source)
    if isinstance(result, BenchResult):
        return bench_page(result, source.name)
    if isinstance(result, DiagnosisResult):
        return diagnosis_page(result, source.name)
    if isinstance(result, RunResult):
        return run_page(result, source.name)
    return tune_page(result, source.name)


def render_diagnosis(result: DiagnosisResult) -> str:
    """The HTML of a diagnosis that has just ended."""
    return diagnosis_page(result, Path(result.program).name)


def write_run_page(result: RunResult, out: Path) -> None:
    """Write the page of a `headrace run` that has just ended."""
    _write(out, run_page(result, Path(result.program).name).encode())


def write_report(source: str | Path, out: str | Path | None = None) -> Path:
    """Write the page to `out`: by default `report.html` in a run folder, or a file beside a result
    and named after it, `bench.html` for `bench.json`."""
    source = Path(source)
    if out is None:
        beside = source.parent / f"{source.name.removesuffix('.json')}.html"
        out = source / "report.html" if source.is_dir() else beside
    out = Path(out)
    if out.is_dir():
        raise ReportError(f"{out}: is a folder; expected the name of the file to write")
    if out.exists() and source.exists() and out.samefile(source):
        raise ReportError(f"{out}: is the result itself; expected another file to write")
    text = render(source)
    _write(out, text.encode())
    return out


def try_report(run: Path) -> None:
    """Write a run's report. If it cannot be written, log a warning: the run itself is fine."""
    try:
        write_report(run)
    except HeadraceError as problem:
        log.warning("no report was written: %s", problem)


def write_perfetto(source: str | Path, folder: str | Path) -> list[Path]:
    """Write a bench result's timelines for ui.perfetto.dev and chrome://tracing.

    Each plan with a timeline gets a file, `NAME.PLAN.trace.json`."""
    source, folder = _source(source), Path(folder)
    if source.is_dir():
        raise ReportError(f"{source}: is a run's folder; only bench results hold timelines")
    result = read_result(source)
    if isinstance(result, DiagnosisResult):
        stored = [] if result.timeline is None else [("steps", result.timeline)]
    elif isinstance(result, BenchResult):
        stored = result.timelines
    else:
        kind = "run" if isinstance(result, RunResult) else "tune"
        raise ReportError(f"{source}: is a {kind} result; only bench results hold timelines")
    if folder.exists() and not folder.is_dir():
        raise ReportError(f"{folder}: is a file; expected a folder for the timelines")
    written: list[Path] = []
    for name, timeline in stored:
        plan = re.sub(r"[^\w.#+-]", "_", name)[:80] or "plan"
        path = folder / f"{source.stem}.{plan}.trace.json"
        if path in written:
            path = folder / f"{source.stem}.{plan}-{len(written)}.trace.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            Timeline(timeline.spans).save(path)
        except OSError as problem:
            raise ReportError(f"{path}: cannot be written ({problem.strerror})") from problem
        written.append(path)
    return written


def _source(given: str | Path) -> Path:
    """The file or folder to read: `result.json` in a folder that `tune` wrote."""
    source = Path(given)
    inside = source / "result.json"
    if (
        source.is_dir()
        and inside.is_file()
        and read_json(inside, ReportError).values.get("kind") is not None
    ):
        return inside
    return source


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ReportError(f"{path.parent}: cannot be made ({problem.strerror})") from problem
    replace_file(path, content, ReportError)
