"""The result of `headrace run`: what became of each part of a script, and of its step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from headrace.records.environment import Environment
from headrace.records.races import LineRecord
from headrace.records.result_file import ResultFile


@dataclass(frozen=True, slots=True)
class PartCheck:
    """How the first replays of a part compare with what it does without graphs. `worst` is the
    largest difference of a tensor, as a share of its largest value, `where` the tensor; 0 is bit
    for bit the same."""

    replays: int = 0
    is_equal: bool = True
    worst: float = 0.0
    where: str = ""


@dataclass(frozen=True, slots=True)
class RunPart:
    """A model, an optimizer, or the loaders. `line` is where the script first used it. `eager` are
    the calls that ran without a graph, by reason; `why` says why all of them did. `rounding` says
    why the last digits differ from the plain loop's, if something is known to change them."""

    kind: Literal["model", "optimizer", "data"] = "model"
    name: str = ""
    line: LineRecord = field(default_factory=LineRecord)
    replays: int = 0
    captures: int = 0
    eager: dict[str, int] = field(default_factory=dict)
    memory_bytes: int = 0
    why: str | None = None
    rounding: str | None = None
    check: PartCheck | None = None


@dataclass(frozen=True, slots=True)
class RunResult(ResultFile):
    """What a script's run showed. `exit_code` is the script's own; None if Ctrl-C ended it.

    `steps` are optimizer steps on the device, `cpu_steps` those on the CPU. `before_ms` is the
    median step before anything was captured, `after_ms` the median one in which all that is
    captured was replayed; None if there were too few. `peak_bytes` is the most device memory that
    was allocated at once. `decisions` say what the plan `auto` has measured and chosen. `races` is
    known on the fake device only.
    """

    kind: ClassVar[str] = "headrace run"

    program: str = ""
    exit_code: int | None = None
    parts: tuple[RunPart, ...] = ()
    steps: int = 0
    cpu_steps: int = 0
    before_ms: float | None = None
    after_ms: float | None = None
    peak_bytes: int = 0
    decisions: tuple[str, ...] = ()
    races: int | None = None
    notes: tuple[str, ...] = ()
    environment: Environment = field(default_factory=Environment)
