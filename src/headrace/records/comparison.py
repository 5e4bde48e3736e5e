"""The result of `headrace diagnose --compare`: what changed from one diagnosis to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headrace.records.result_file import ResultFile


@dataclass(frozen=True, slots=True)
class PartChange:
    """Milliseconds of a part of the step, before and after."""

    name: str = ""
    before_ms: float = 0.0
    after_ms: float = 0.0

    @property
    def ms(self) -> float:
        return self.after_ms - self.before_ms


@dataclass(frozen=True, slots=True)
class LineChange:
    """A line whose waits or whose idle time have changed. None: the line was not there, or its idle
    time is not known. `line` is its number after the change, if it is still there."""

    file: str = ""
    line: int = 0
    code: str = ""
    waits_before: float | None = None
    waits_after: float | None = None
    idle_before_ms: float | None = None
    idle_after_ms: float | None = None

    @property
    def ms(self) -> float:
        return (self.idle_after_ms or 0.0) - (self.idle_before_ms or 0.0)


@dataclass(frozen=True, slots=True)
class DiagnosisComparison(ResultFile):
    """What changed from one diagnosis to another.

    `slower` is by how much a step takes longer, as a share of the step before; less than 0 if it is
    faster. Up to `noise`, it may be chance: each step's mean is known so well from the spread of
    its clean steps. None: not known.
    """

    kind: ClassVar[str] = "headrace diagnosis comparison"

    before: str = ""
    after: str = ""
    verdict: tuple[str, ...] = ()
    before_ms: float | None = None
    after_ms: float | None = None
    slower: float | None = None
    noise: float | None = None
    parts: tuple[PartChange, ...] = ()
    lines: tuple[LineChange, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_noise(self) -> bool:
        return self.slower is not None and abs(self.slower) <= (self.noise or 0.0)
