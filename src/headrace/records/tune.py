"""The result of a search: every candidate that was tried, and the winner."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from headrace.records.environment import Environment, WorkRecord
from headrace.records.result_file import ResultFile
from headrace.schema import Invalid

Status = Literal["kept", "dropped", "out of memory", "failed", "winner", "same as winner"]


@dataclass(frozen=True, slots=True)
class Rung:
    """Runs of one length: how many steps, and each run's milliseconds per step."""

    steps: int = 0
    ms_per_step: tuple[float, ...] = ()

    def invalid(self) -> Invalid | None:
        return None if self.ms_per_step else Invalid("ms_per_step", [], "at least one number")


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One candidate: its plan, how its batches were loaded, what was measured, how it ended.

    `changed` are the fields that differ from the preset. `ms_per_step` is the median of its
    longest runs, None if it was never measured; `ms_per_unit` is that per sample or token.
    """

    id: int | str = 0
    name: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)
    rungs: tuple[Rung, ...] = ()
    ms_per_step: float | None = None
    units_per_step: float | None = None
    ms_per_unit: float | None = None
    status: Status = "kept"
    why: str = ""
    peak_memory_bytes: int | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The fields of its plan and its loader."""
        return self.plan | self.loader


@dataclass(frozen=True, slots=True)
class Winner:
    """The candidate that won; `id` is its trial's."""

    id: int | str = 0
    name: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TuneResult(ResultFile):
    """A whole search. `settings` are the search's own, as typed. `noise_share` is by
    how much two runs may differ by chance, `cut_short` whether it was ended early."""

    kind: ClassVar[str] = "headrace tune"

    work: WorkRecord = field(default_factory=WorkRecord)
    environment: Environment = field(default_factory=Environment)
    settings: dict[str, Any] = field(default_factory=dict)
    trials: tuple[TrialRecord, ...] = ()
    winner: Winner | None = None
    noise_share: float | None = None
    cut_short: bool = False
    sentences: tuple[str, ...] = ()

    def invalid(self) -> Invalid | None:
        return None if self.trials else Invalid("trials", [], "at least one")

    @property
    def compares_units(self) -> bool:
        """Whether trials differ in their batch size, so that only times per unit compare."""
        sizes = {trial.units_per_step for trial in self.trials}
        return len(sizes) > 1 and None not in sizes

    @property
    def pace_unit(self) -> str:
        """The unit of `pace_ms`, in words after "milliseconds"."""
        return f"per thousand {self.work.unit}" if self.compares_units else "per step"

    def pace_ms(self, trial: TrialRecord) -> float | None:
        """A trial's milliseconds per step, or per thousand units where batch sizes differ. None if
        it was never measured."""
        if self.compares_units:
            return None if trial.ms_per_unit is None else trial.ms_per_unit * 1000
        if trial.ms_per_step is None and trial.rungs:
            return statistics.median(trial.rungs[-1].ms_per_step)
        return trial.ms_per_step

    @property
    def measured(self) -> list[tuple[TrialRecord, float]]:
        """The trials that were measured, the fastest first, each with its `pace_ms`."""
        paces = [(trial, self.pace_ms(trial)) for trial in self.trials]
        known = [(trial, pace) for trial, pace in paces if pace is not None]
        return sorted(known, key=lambda measured: measured[1])

    @property
    def won(self) -> TrialRecord | None:
        """The winner's trial; None if the search has not ended."""
        return next((trial for trial in self.trials if trial.status == "winner"), None)

    @property
    def start(self) -> TrialRecord | None:
        """What the search began with: the trial in which nothing was changed, else the first."""
        known = [trial for trial in self.trials if self.pace_ms(trial) is not None]
        return next((trial for trial in known if not trial.changed), next(iter(known), None))
