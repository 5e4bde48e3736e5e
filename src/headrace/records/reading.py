"""Reads a result file of any kind."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import ReportError
from headrace.records.bench import BenchResult
from headrace.records.diagnosis import DiagnosisResult
from headrace.records.result_file import check_header
from headrace.records.run import RunResult
from headrace.records.tune import TuneResult
from headrace.schema import read_json


def read_result(path: str | Path) -> BenchResult | TuneResult | DiagnosisResult | RunResult:
    """The result in a JSON file that `headrace bench`, `tune`, `diagnose` or `run` wrote."""
    content = read_json(path, ReportError)
    check_header(content, BenchResult.kind, TuneResult.kind, DiagnosisResult.kind, RunResult.kind)
    if content.values["kind"] == BenchResult.kind:
        return BenchResult.from_fields(content)
    if content.values["kind"] == DiagnosisResult.kind:
        return DiagnosisResult.from_fields(content)
    if content.values["kind"] == RunResult.kind:
        return RunResult.from_fields(content)
    return TuneResult.from_fields(content)
