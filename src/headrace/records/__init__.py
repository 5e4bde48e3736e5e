"""Stored results: one schema for each, which one room writes and another reads.

    from headrace.records import BenchResult, TrainingRun, read_result

    result = BenchResult.read("bench.json")
    print(result.row("graph").speedup, result.verdict.take)

Every result is a tree of frozen dataclasses. A field that a file lacks, or that is null there, was
not recorded: it has the default that its dataclass gives, and a field without a default is
required. Unknown fields are ignored, since a later version may have written them. A value of the
wrong type is a `ReportError` that names the file and the field.

Times are in the units that the names say, shares are 0 to 1, and None means not recorded.
"""

from __future__ import annotations

from headrace.records.bench import (
    Agreement,
    BenchResult,
    BenchSettings,
    BenchWork,
    Equality,
    GpuUse,
    HostWaits,
    Noise,
    PlanResult,
    Sample,
    StepTimes,
    StoredTimeline,
    Verdict,
    WaitFigures,
    WaitsFor,
)
from headrace.records.comparison import Comparison, LineChange, PartChange
from headrace.records.diagnosis import (
    DiagnosedLine,
    DiagnosisResult,
    Excerpt,
    Outcome,
    Prediction,
    PythonLine,
    StepParts,
)
from headrace.records.environment import Environment, WorkRecord
from headrace.records.races import AccessRecord, LineRecord, RaceRecord, RacesResult
from headrace.records.reading import read_result
from headrace.records.scores import JUDGEMENTS, WEIGHTS, Judgement, Score
from headrace.records.train import (
    BusyLine,
    EpochLine,
    FinishedRun,
    Scores,
    StepLine,
    TrainingRun,
    UseLine,
)
from headrace.records.tune import Status, TrialRecord, TuneResult, Winner

__all__ = [
    "JUDGEMENTS",
    "WEIGHTS",
    "AccessRecord",
    "Agreement",
    "BenchResult",
    "BenchSettings",
    "BenchWork",
    "BusyLine",
    "Comparison",
    "DiagnosedLine",
    "DiagnosisResult",
    "Environment",
    "EpochLine",
    "Equality",
    "Excerpt",
    "FinishedRun",
    "GpuUse",
    "HostWaits",
    "Judgement",
    "LineChange",
    "LineRecord",
    "Noise",
    "Outcome",
    "PartChange",
    "PlanResult",
    "Prediction",
    "PythonLine",
    "RaceRecord",
    "RacesResult",
    "Sample",
    "Score",
    "Scores",
    "Status",
    "StepLine",
    "StepParts",
    "StepTimes",
    "StoredTimeline",
    "TrainingRun",
    "TrialRecord",
    "TuneResult",
    "UseLine",
    "Verdict",
    "WaitFigures",
    "WaitsFor",
    "Winner",
    "WorkRecord",
    "read_result",
]
