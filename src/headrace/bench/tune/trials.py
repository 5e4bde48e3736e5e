"""What is known of the candidates: every measurement, and how far apart two must be to differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace.bench.tune.candidates import Candidate
from headrace.runs.records import Status

# Two medians that differ by less are the same, however calm the machine.
LEAST_NOISE = 0.01


@dataclass(frozen=True, slots=True)
class Measurement:
    """Some steps of a candidate, measured; or why there is nothing to measure.

    `units_per_step` is what a step has of what is counted: samples or tokens. `failed` is an error
    in one line, `out_of_memory` that it did not fit, `unequal` that its losses are not those of the
    plan that all are compared with. `took_s` is what it took in all, and
    what came between it and the one before: letting go of loader workers can take long.
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
    """One candidate's story. `rungs` has its times, milliseconds a step, by number of steps.

    Only what ran at about the same time is compared: `recent` are the times since `mark`.
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
            self.end("failed", f"other losses than {_REFERENCE}: {found.unequal}")
        elif found.ms_per_step is not None:
            self.units_per_step = found.units_per_step
            self.rungs.setdefault(steps, []).append(found.ms_per_step)

    def mark(self) -> None:
        self._marks = {steps: len(times) for steps, times in self.rungs.items()}

    def recent(self, steps: int) -> list[float]:
        """Milliseconds a unit of its runs of that length since the mark."""
        times = self.rungs.get(steps, [])[self._marks.get(steps, 0) :]
        return [ms / self.units_per_step for ms in times]

    def value(self, steps: int) -> float:
        """The median of those; infinite if there are none."""
        recent = self.recent(steps)
        return statistics.median(recent) if recent else math.inf

    def end(self, status: Status, why: str) -> None:
        self.status, self.why = status, why

    @property
    def runs(self) -> bool:
        """Whether it works at all."""
        return self.status not in ("out of memory", "failed")

    @property
    def in_race(self) -> bool:
        return self.status is None and bool(self.rungs)

    @property
    def longest(self) -> int:
        """The most steps that it was measured over; 0: never."""
        return max(self.rungs, default=0)

    @property
    def ms_per_step(self) -> float | None:
        """The median over all its longest runs."""
        return statistics.median(self.rungs[self.longest]) if self.rungs else None

    @property
    def ms_per_unit(self) -> float | None:
        return None if self.ms_per_step is None else self.ms_per_step / self.units_per_step


_REFERENCE = "baseline"


def deviation_of(runs: Iterable[Sequence[float]]) -> float:
    """How much a run differs from the next, as a share: the standard deviation. Each sequence has
    the times of one candidate's runs of one length."""
    variances = [
        statistics.variance(times) / statistics.mean(times) ** 2
        for times in runs
        if len(times) >= 2
    ]
    # The mean would follow a single disturbed run.
    return math.sqrt(statistics.median(variances)) if variances else 0.0


def noise_of(runs: Iterable[Sequence[float]], repeats: int | None = None) -> float:
    """How far two medians of `repeats` such runs (none: as few as any has) may differ by chance, as
    a share: two standard deviations of a difference."""
    repeated = [times for times in runs if len(times) >= 2]
    if repeats is None:
        repeats = min((len(times) for times in repeated), default=1)
    # A median scatters 1.25 times as much as a mean would.
    return max(LEAST_NOISE, 2 * 1.2533 * deviation_of(repeated) * math.sqrt(2 / repeats))


def simplest(trials: Sequence[Trial]) -> Trial:
    return min(trials, key=lambda trial: (trial.candidate.complexity, trial.number))
