"""The measurements of each candidate, and how much measurements differ by chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace.bench.tune.candidates import Candidate
from headrace.records import Status

#: Medians that differ by less count as equal, even on an idle machine.
MIN_NOISE = 0.01


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
    """All runs of one candidate. `rungs` maps a number of steps to the runs of that length, in
    milliseconds per step.

    Only runs made at about the same time are compared: `recent` are those since `mark`.
    """

    number: int
    candidate: Candidate
    rungs: dict[int, list[float]] = field(default_factory=dict)
    _marks: dict[int, int] = field(default_factory=dict)
    units_per_step: float = 1.0
    peak_memory_bytes: int | None = None
    status: Status | None = None
    why: str = ""

    def add(self, steps: int, found: Measurement) -> None:
        if found.peak_memory_bytes is not None:
            self.peak_memory_bytes = max(self.peak_memory_bytes or 0, found.peak_memory_bytes)
        if found.out_of_memory is not None:
            self.end("out of memory", found.out_of_memory)
        elif found.failed is not None:
            self.end("failed", found.failed)
        elif found.unequal is not None:
            self.end("failed", f"losses differ from {_REFERENCE}'s: {found.unequal}")
        elif found.ms_per_step is not None:
            self.units_per_step = found.units_per_step
            self.rungs.setdefault(steps, []).append(found.ms_per_step)

    def mark(self) -> None:
        """Forget earlier runs in `recent` and `value`."""
        self._marks = {steps: len(times) for steps, times in self.rungs.items()}

    def recent(self, steps: int) -> list[float]:
        """Milliseconds per unit of each run of that length since the mark."""
        times = self.rungs.get(steps, [])[self._marks.get(steps, 0) :]
        return [ms / self.units_per_step for ms in times]

    def value(self, steps: int) -> float:
        """The median of `recent`; infinite if there are none."""
        recent = self.recent(steps)
        return statistics.median(recent) if recent else math.inf

    def end(self, status: Status, why: str) -> None:
        self.status, self.why = status, why

    @property
    def can_run(self) -> bool:
        """Whether it has not failed, nor run out of memory."""
        return self.status not in ("out of memory", "failed")

    @property
    def in_race(self) -> bool:
        """Whether it was measured and has neither won nor lost yet."""
        return self.status is None and bool(self.rungs)

    @property
    def longest(self) -> int:
        """The length of its longest runs, in steps; 0 if it never ran."""
        return max(self.rungs, default=0)

    @property
    def ms_per_step(self) -> float | None:
        """The median of its longest runs; None if it never ran."""
        return statistics.median(self.rungs[self.longest]) if self.rungs else None

    @property
    def ms_per_unit(self) -> float | None:
        return None if self.ms_per_step is None else self.ms_per_step / self.units_per_step


_REFERENCE = "baseline"


def deviation_of(runs: Iterable[Sequence[float]]) -> float:
    """The relative standard deviation between runs. Each sequence holds one candidate's runs of one
    length."""
    variances = [
        statistics.variance(times) / statistics.mean(times) ** 2
        for times in runs
        if len(times) >= 2
    ]
    # A mean would follow a single disturbed run.
    return math.sqrt(statistics.median(variances)) if variances else 0.0


def noise_of(runs: Iterable[Sequence[float]], repeats: int | None = None) -> float:
    """By what share two medians of `repeats` runs may differ by chance: two standard deviations of
    the difference. Without `repeats`, the shortest sequence says how many."""
    repeated = [times for times in runs if len(times) >= 2]
    if repeats is None:
        repeats = min((len(times) for times in repeated), default=1)
    # The standard error of a median is 1.25 times that of a mean.
    return max(MIN_NOISE, 2 * 1.2533 * deviation_of(repeated) * math.sqrt(2 / repeats))


def simplest(trials: Sequence[Trial]) -> Trial:
    """The trial with the least complex candidate."""
    return min(trials, key=lambda trial: (trial.candidate.complexity, trial.number))
