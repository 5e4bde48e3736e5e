"""The result of `headrace diagnose`: what a step's time went to, and which lines made it wait."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from headrace.device import pack_spans
from headrace.records.bench import StoredTimeline
from headrace.records.environment import Environment
from headrace.records.races import LineRecord
from headrace.records.result_file import ResultFile

#: How far the diagnosis got. "lines only" is a run on the fake device, which has no times.
Outcome = Literal[
    "complete",
    "partial",
    "lines only",
    "no step",
    "one step",
    "too few steps",
    "on the CPU",
]


@dataclass(frozen=True, slots=True)
class TimeParts:
    """Milliseconds of a step by what the device did or waited for. They add up to the step."""

    computing: float = 0.0
    input: float = 0.0
    transfer: float = 0.0
    synchronization: float = 0.0
    launch: float = 0.0
    host: float = 0.0
    other_ranks: float = 0.0
    unattributed: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Some lines of a file; `first` is the number of the first."""

    first: int = 0
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DiagnosedLine:
    """A line that made the host wait.

    `line` is None if no Python line is known. If it is in an installed package, `called_from` is
    the user's own line. `blocked_ms` is how long the host was blocked per step, `idle_ms` how long
    the device was idle because of it, `gain_ms` what a step would gain if the line went. They are
    None if they are not known. `excerpt` is the code around the user's own line.
    """

    form: str = "other"
    title: str = ""
    advice: str = ""
    line: LineRecord | None = None
    called_from: LineRecord | None = None
    per_step: float = 0.0
    blocked_ms: float | None = None
    idle_ms: float | None = None
    gain_ms: float | None = None
    excerpt: Excerpt | None = None


@dataclass(frozen=True, slots=True)
class PythonLine:
    """A line that the host ran for long between two launches, found by samples.

    `ms` is how long per step, `idle_ms` how long the device was idle because of it, `gain_ms` what
    a step would gain if it took no time; None if that is not known.
    """

    line: LineRecord = field(default_factory=LineRecord)
    called_from: LineRecord | None = None
    ms: float = 0.0
    idle_ms: float = 0.0
    gain_ms: float | None = None
    excerpt: Excerpt | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step would take if something were changed."""

    change: str = ""
    step_ms: float = 0.0
    speedup: float = 1.0


@dataclass(frozen=True, slots=True)
class HostLine:
    """A line, and how long the host was there per step, from samples."""

    line: LineRecord = field(default_factory=LineRecord)
    ms: float = 0.0


@dataclass(frozen=True, slots=True)
class RankFigures:
    """What a rank's step took, for how long its GPU computed, and how long it waited for others.
    `rank` is None for a trace that does not say; then `host` is its file. `lines` are where the
    host was for longest."""

    rank: int | None = None
    host: str = ""
    step_ms: float | None = None
    computing_ms: float | None = None
    waits_ms: float | None = None
    lines: tuple[HostLine, ...] = ()

    @property
    def name(self) -> str:
        return self.host if self.rank is None else f"rank {self.rank}"


@dataclass(frozen=True, slots=True)
class DiagnosisResult(ResultFile):
    """What a run of a program showed. `exit_code` is the program's own; None if it was ended.

    `step_ms` is from the clean window, `low_ms` and `high_ms` are its shortest and longest step on
    the host, `noise_ms` is how far the mean may be off by chance (twice its standard error),
    `nvml_share` is the driver's figure, which says only that something ran.
    `profiled_ms` and `watched_ms` are steps under the profiler and with lines watched. `parts` are
    scaled to the clean step. `waits_per_step` counts the waits that were found by line,
    `waits_in_trace` those of the profiler. `loader_ms` is how long the DataLoader needs for a batch
    if nothing holds it up; None if that was not measured. `replay_error` is how far a replay of the
    trace without changes was from it; beyond 3 % there are no predictions.
    """

    kind: ClassVar[str] = "headrace diagnosis"

    program: str = ""
    exit_code: int | None = None
    outcome: Outcome = "no step"
    verdict: tuple[str, ...] = ()
    steps: int = 0
    calls_per_step: int = 0
    backwards_per_step: float | None = None
    step_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    noise_ms: float | None = None
    nvml_share: float | None = None
    profiled_ms: float | None = None
    watched_ms: float | None = None
    parts: TimeParts | None = None
    idle_share: float | None = None
    launches_per_step: float | None = None
    waits_per_step: float | None = None
    waits_in_trace: float | None = None
    loader_ms: float | None = None
    lines: tuple[DiagnosedLine, ...] = ()
    python_lines: tuple[PythonLine, ...] = ()
    replay_error: float | None = None
    predictions: tuple[Prediction, ...] = ()
    races: int | None = None
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    #: Whether the parts are from the profiler's kernels; else they are from CUDA events.
    has_cupti: bool = True
    #: Of all ranks, if there are several; the rest is about the one for which the others wait.
    ranks: tuple[RankFigures, ...] = ()
    #: The first two steps under the profiler; the host's waits are named by their lines.
    timeline: StoredTimeline | None = None
    environment: Environment = field(default_factory=Environment)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with a packed timeline."""
        values = ResultFile.to_dict(self)
        if values["timeline"] is not None:
            values["timeline"] |= pack_spans(values["timeline"]["spans"])
        return values
