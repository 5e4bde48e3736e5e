"""The result of a search: every candidate that was tried, and the winner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from headrace.records.environment import Environment, WorkRecord
from headrace.records.result_file import ResultFile
from headrace.schema import Invalid

Status = Literal["winner", "same as winner", "slower", "out of memory", "failed"]


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One candidate: its plan, how its batches were loaded, what was measured, how it ended.

    `changed` are the fields that differ from the preset. `runs_ms` has the milliseconds per step of
    each run; `ms_per_step` is their median, None if there were none.
    """

    id: int | str = 0
    name: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)
    runs_ms: tuple[float, ...] = ()
    ms_per_step: float | None = None
    units_per_step: float | None = None
    status: Status = "slower"
    why: str = ""
    peak_memory_bytes: int | None = None


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
    def measured(self) -> list[tuple[TrialRecord, float]]:
        """The trials that were measured, the fastest first, each with its milliseconds per step."""
        known = [(trial, trial.ms_per_step) for trial in self.trials]
        return sorted(
            ((trial, ms) for trial, ms in known if ms is not None), key=lambda measured: measured[1]
        )

    @property
    def won(self) -> TrialRecord | None:
        """The winner's trial; None if the search has not ended."""
        return next((trial for trial in self.trials if trial.status == "winner"), None)

    @property
    def start(self) -> TrialRecord | None:
        """What the search began with: the trial in which nothing was changed, else the first."""
        known = [trial for trial in self.trials if trial.ms_per_step is not None]
        return next((trial for trial in known if not trial.changed), next(iter(known), None))
