"""Stored results: one schema for each, which one package writes and another reads.

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

from headrace.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headrace.records.bench import Agreement as Agreement
    from headrace.records.bench import BenchResult as BenchResult
    from headrace.records.bench import BenchSettings as BenchSettings
    from headrace.records.bench import BenchWork as BenchWork
    from headrace.records.bench import Equality as Equality
    from headrace.records.bench import GpuUse as GpuUse
    from headrace.records.bench import HostWaits as HostWaits
    from headrace.records.bench import Noise as Noise
    from headrace.records.bench import PlanResult as PlanResult
    from headrace.records.bench import StepTimes as StepTimes
    from headrace.records.bench import StoredSample as StoredSample
    from headrace.records.bench import StoredTimeline as StoredTimeline
    from headrace.records.bench import Verdict as Verdict
    from headrace.records.bench import WaitFigures as WaitFigures
    from headrace.records.bench import WaitsFor as WaitsFor
    from headrace.records.comparison import DiagnosisComparison as DiagnosisComparison
    from headrace.records.comparison import LineChange as LineChange
    from headrace.records.comparison import PartChange as PartChange
    from headrace.records.diagnosis import DiagnosedLine as DiagnosedLine
    from headrace.records.diagnosis import DiagnosisResult as DiagnosisResult
    from headrace.records.diagnosis import Excerpt as Excerpt
    from headrace.records.diagnosis import HostLine as HostLine
    from headrace.records.diagnosis import Outcome as Outcome
    from headrace.records.diagnosis import Prediction as Prediction
    from headrace.records.diagnosis import PythonLine as PythonLine
    from headrace.records.diagnosis import RankFigures as RankFigures
    from headrace.records.diagnosis import TimeParts as TimeParts
    from headrace.records.environment import Environment as Environment
    from headrace.records.environment import WorkRecord as WorkRecord
    from headrace.records.races import AccessRecord as AccessRecord
    from headrace.records.races import LineRecord as LineRecord
    from headrace.records.races import RaceRecord as RaceRecord
    from headrace.records.races import RacesResult as RacesResult
    from headrace.records.reading import read_result as read_result
    from headrace.records.run import PartCheck as PartCheck
    from headrace.records.run import RunPart as RunPart
    from headrace.records.run import RunResult as RunResult
    from headrace.records.scores import JUDGMENTS as JUDGMENTS
    from headrace.records.scores import WEIGHTS as WEIGHTS
    from headrace.records.scores import Judgment as Judgment
    from headrace.records.scores import Score as Score
    from headrace.records.train import BusyLine as BusyLine
    from headrace.records.train import EpochLine as EpochLine
    from headrace.records.train import FinishedRun as FinishedRun
    from headrace.records.train import Scores as Scores
    from headrace.records.train import StepMetrics as StepMetrics
    from headrace.records.train import TrainingRun as TrainingRun
    from headrace.records.train import UseLine as UseLine
    from headrace.records.tune import Status as Status
    from headrace.records.tune import TrialRecord as TrialRecord
    from headrace.records.tune import TuneResult as TuneResult
    from headrace.records.tune import Winner as Winner

__all__, __getattr__, __dir__ = lazy(__name__, __file__)
