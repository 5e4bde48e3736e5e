"""Which fields of a plan made a difference in a search."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.records import TrialRecord, TuneResult
from headrace.report.figures import plain, words

_AS_GIVEN = "as given"


def trial_name(trial: TrialRecord) -> str:
    """The name stored with the trial; without one, its plan's name and its changed fields."""
    if trial.name:
        return trial.name
    plan = plain(trial.values.get("name") or f"trial {trial.id}")
    changed = (f"{words(name)} {plain(value)}" for name, value in trial.changed.items())
    return ", ".join([plan, *changed])


@dataclass(frozen=True, slots=True)
class Effect:
    """The best time with each value of a field, the best value first."""

    name: str
    best_ms: tuple[tuple[str, float], ...]

    @property
    def size(self) -> float:
        """How much slower the worst value's best trial is than the best value's: 0.2 is 20 %."""
        return self.best_ms[-1][1] / self.best_ms[0][1] - 1


def effects(result: TuneResult) -> list[Effect]:
    """The effects of the plan and of each field, the largest first.

    The plan's effect compares presets without changes. A field's effect compares the fastest trial
    that can be compared with trials that differ from it in that field only.
    """
    measured = result.measured
    names = _fields([trial for trial, _ in measured])
    found = [_field_effect(name, measured) for name in names]
    presets = [(trial, pace) for trial, pace in measured if not trial.changed]
    found.append(_effect("plan", [(plain(t.values.get("name")), pace) for t, pace in presets]))
    return sorted((one for one in found if one is not None), key=lambda effect: -effect.size)


def _fields(trials: list[TrialRecord]) -> dict[str, None]:
    names = dict.fromkeys(name for trial in trials for name in (*trial.values, *trial.changed))
    names.pop("name", None)
    return names


def _field_effect(name: str, measured: list[tuple[TrialRecord, float]]) -> Effect | None:
    """A field's effect: the fastest trial that has others which differ in this field only."""
    for fastest, fastest_ms in measured:
        beside = [(t, pace) for t, pace in measured if _differ_only_in(name, fastest, t)]
        if beside:
            paces = [(fastest, fastest_ms), *beside]
            return _effect(name, [(_value(trial, name), pace) for trial, pace in paces])
    return None


def _differ_only_in(name: str, one: TrialRecord, other: TrialRecord) -> bool:
    """Whether two trials differ in one field only.

    Without workers there is no prefetch factor: that difference comes with `workers`.
    """
    if _value(one, name) == _value(other, name):
        return False
    for field in _fields([one, other]):
        mine, others = _value(one, field), _value(other, field)
        comes_with_workers = field == "prefetch_factor" and _AS_GIVEN in (mine, others)
        if field != name and mine != others and not comes_with_workers:
            return False
    return True


def _value(trial: TrialRecord, name: str) -> str:
    chosen = trial.changed.get(name, trial.values.get(name))
    return _AS_GIVEN if chosen is None else plain(chosen)


def _effect(name: str, values: list[tuple[str, float]]) -> Effect | None:
    best: dict[str, float] = {}
    for value, pace in sorted(values, key=lambda entry: entry[1]):
        best.setdefault(value, pace)
    if len(best) < 2 or min(best.values()) <= 0:
        return None
    return Effect(name, tuple(best.items()))
