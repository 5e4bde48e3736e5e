"""The runs of a candidate, and how a search has ended."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from headrace.bench.tune.candidates import Candidate
from headrace.records import Status


@dataclass(frozen=True, slots=True)
class Measurement:
    """One timed run of a candidate, or why there was none.

    `units_per_step` are samples or tokens. `failed` is an error in one line, `out_of_memory` the
    message if it did not fit, `unequal` how its losses differ from the reference's. `took_s` is the
    time since the previous measurement ended, which includes warming up and stopping workers.
    """

    ms_per_step: float | None
    units_per_step: float = 1.0
    peak_memory_bytes: int | None = None
    out_of_memory: str | None = None
    failed: str | None = None
    unequal: str | None = None
    took_s: float = 0.0


@dataclass
class Trial:
    """All runs of one candidate, in milliseconds per step, and how it ended."""

    number: int
    candidate: Candidate
    ms: list[float] = field(default_factory=list)
    units_per_step: float = 1.0
    peak_memory_bytes: int | None = None
    status: Status | None = None
    why: str = ""

    def add(self, found: Measurement) -> None:
        if found.peak_memory_bytes is not None:
            self.peak_memory_bytes = max(self.peak_memory_bytes or 0, found.peak_memory_bytes)
        if found.out_of_memory is not None:
            self.end("out of memory", found.out_of_memory)
        elif found.failed is not None:
            self.end("failed", found.failed)
        elif found.unequal is not None:
            self.end("failed", f"losses differ from the first plan's: {found.unequal}")
        elif found.ms_per_step is not None:
            self.units_per_step = found.units_per_step
            self.ms.append(found.ms_per_step)

    def end(self, status: Status, why: str) -> None:
        self.status = status
        self.why = why

    def reopen(self) -> None:
        """It has not lost after all."""
        self.status = None

    @property
    def can_run(self) -> bool:
        """Whether it has not failed, nor run out of memory."""
        return self.status not in ("out of memory", "failed")

    @property
    def ms_per_step(self) -> float | None:
        """The median of its runs; None if it never ran."""
        return statistics.median(self.ms) if self.ms else None


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """How far the search is, for a progress line. `done` counts runs; `left_s` is what remains of
    the time limit, None without one."""

    stage: str
    candidate: Candidate
    steps: int
    done: int
    left_s: float | None
    best: Trial | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a search ended. `noise` is the share by which two candidates may differ by chance,
    `ended_by` what ended the search early: "time limit", or a signal's name."""

    trials: tuple[Trial, ...]
    winner: Trial
    first: Trial
    noise: float
    ended_by: str | None


class NothingRuns(Exception):  # noqa: N818 - turned into an error that names the workload
    """Not even the first plan runs. The message is its error."""


class Stopped(Exception):  # noqa: N818 - not an error: `measure` raises it to end the search
    """The user, or the time limit, ended the search. The message says which."""
