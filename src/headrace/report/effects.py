"""Which fields of a plan made a difference in a search."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.report.figures import plain, words
from headrace.runs.records import TrialRecord, TuneResult

_AS_GIVEN = "as given"


def trial_name(trial: TrialRecord) -> str:
    """The name that the trial was stored with; else its plan's, and what was changed."""
    if trial.name:
        return trial.name
    plan = plain(trial.values.get("name") or f"trial {trial.id}")
    changed = (f"{words(name)} {plain(value)}" for name, value in trial.changed.items())
    return ", ".join([plan, *changed])


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
    """What mattered, most first: the plan, by the presets as they are, and each field by trials
    that differ in it alone, the fastest of them and those beside it."""
    measured = result.measured
    names = _fields([trial for trial, _ in measured])
    found = [_around(name, measured) for name in names]
    presets = [(trial, pace) for trial, pace in measured if not trial.changed]
    found.append(_best("plan", [(plain(t.values.get("name")), pace) for t, pace in presets]))
    return sorted((one for one in found if one is not None), key=lambda effect: -effect.size)


def _fields(trials: list[TrialRecord]) -> dict[str, None]:
    names = dict.fromkeys(name for trial in trials for name in (*trial.values, *trial.changed))
    names.pop("name", None)
    return names


def _around(name: str, measured: list[tuple[TrialRecord, float]]) -> Effect | None:
    """The field's effect around the fastest trial that has others like it but for the field."""
    for fastest, fastest_ms in measured:
        beside = [(t, pace) for t, pace in measured if _differ_in_alone(name, fastest, t)]
        if beside:
            paces = [(fastest, fastest_ms), *beside]
            return _best(name, [(_value(trial, name), pace) for trial, pace in paces])
    return None


def _differ_in_alone(name: str, one: TrialRecord, other: TrialRecord) -> bool:
    """A prefetch factor comes with workers, and without them is none: that does not count."""
    if _value(one, name) == _value(other, name):
        return False
    for field in _fields([one, other]):
        mine, others = _value(one, field), _value(other, field)
        comes_along = field == "prefetch_factor" and _AS_GIVEN in (mine, others)
        if field != name and mine != others and not comes_along:
            return False
    return True


def _value(trial: TrialRecord, name: str) -> str:
    chosen = trial.changed.get(name, trial.values.get(name))
    return _AS_GIVEN if chosen is None else plain(chosen)


def _best(name: str, values: list[tuple[str, float]]) -> Effect | None:
    best: dict[str, float] = {}
    for value, pace in sorted(values, key=lambda entry: entry[1]):
        best.setdefault(value, pace)
    if len(best) < 2 or min(best.values()) <= 0:
        return None
    return Effect(name, tuple(best.items()))
