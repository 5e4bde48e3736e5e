"""A tune result as it was stored: the trials, their rungs, the winner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.errors import ReportError
from headrace.report.fields import Fields
from headrace.report.figures import median, plain


@dataclass(frozen=True, slots=True)
class Rung:
    """One measurement of a trial: how many steps, and milliseconds a step of each repeat."""

    steps: int
    ms_per_step: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """One plan that was tried. `pace_ms` is its last figure: None if it was never measured."""

    name: str
    values: dict[str, Any]
    changed: dict[str, Any]
    rungs: tuple[Rung, ...]
    pace_ms: float | None
    status: str
    why: str
    peak_memory_bytes: float | None


@dataclass(frozen=True, slots=True)
class TuneResult:
    work: str
    description: str
    work_options: dict[str, Any]
    settings: dict[str, Any]
    environment: dict[str, Any]
    trials: tuple[Trial, ...]
    winner: dict[str, dict[str, Any]]
    sentences: tuple[str, ...]

    @property
    def measured(self) -> list[Trial]:
        """The trials with a figure, the fastest first."""
        known = [trial for trial in self.trials if trial.pace_ms is not None]
        return sorted(known, key=lambda trial: trial.pace_ms or 0.0)

    @property
    def won(self) -> Trial | None:
        return next((trial for trial in self.trials if trial.status == "winner"), None)

    @property
    def start(self) -> Trial | None:
        """What the search began with: the trial in which nothing was changed, else the first."""
        known = [trial for trial in self.trials if trial.pace_ms is not None]
        return next((trial for trial in known if not trial.changed), next(iter(known), None))


def tune_result(content: Fields) -> TuneResult:
    """The result in a file that `headrace tune` wrote."""
    work = content.child("work") or Fields(content.file, "work", {})
    trials = tuple(_trial(fields) for fields in content.children("trials"))
    if not trials:
        raise ReportError(f"{content.file}: trials: expected at least one, found none")
    winner = content.child("winner")
    parts = {} if winner is None else {name: winner.plain(name) for name in ("plan", "loader")}
    return TuneResult(
        work=work.text("name") or "work",
        description=work.text("description") or "",
        work_options=work.plain("options"),
        settings=content.plain("settings"),
        environment=content.plain("environment"),
        trials=trials,
        winner=parts,
        sentences=tuple(content.texts("sentences")),
    )


def _trial(fields: Fields) -> Trial:
    rungs = tuple(_rung(rung) for rung in fields.children("rungs"))
    # Per unit where there is one: trials of other batch sizes compare by that alone.
    pace = fields.number("ms_per_unit")
    if pace is None and rungs:
        pace = median(rungs[-1].ms_per_step)
    return Trial(
        name=plain(fields.values.get("id")),
        values=fields.plain("plan") | fields.plain("loader"),
        changed=fields.plain("changed"),
        rungs=rungs,
        pace_ms=pace,
        status=fields.text("status") or "kept",
        why=fields.text("why") or "",
        peak_memory_bytes=fields.number("peak_memory_bytes"),
    )


def _rung(fields: Fields) -> Rung:
    paces = tuple(value for value in fields.numbers("ms_per_step") if value is not None)
    if not paces:
        raise fields.problem("ms_per_step", "at least one number")
    return Rung(fields.whole("steps") or 0, paces)


@dataclass(frozen=True, slots=True)
class Effect:
    """What a field did: the best figure with each of its values, the best value first."""

    name: str
    best_ms: tuple[tuple[str, float], ...]

    @property
    def size(self) -> float:
        """How much slower the worst value's best trial is than the best value's: 0.2 is 20 %."""
        return self.best_ms[-1][1] / self.best_ms[0][1] - 1


def effects(result: TuneResult) -> list[Effect]:
    """The fields that took more than one value, those that mattered most first."""
    names = dict.fromkeys(name for trial in result.measured for name in trial.values)
    names |= dict.fromkeys(name for trial in result.measured for name in trial.changed)
    found = []
    for name in names:
        if name == "name":
            continue
        best: dict[str, float] = {}
        for trial in result.measured:
            value = plain(trial.changed.get(name, trial.values.get(name)))
            best.setdefault(value, trial.pace_ms or 0.0)  # measured is in order: the first is best
        if len(best) > 1 and min(best.values()) > 0:
            ordered = tuple(sorted(best.items(), key=lambda entry: entry[1]))
            found.append(Effect(name, ordered))
    return sorted(found, key=lambda effect: -effect.size)
