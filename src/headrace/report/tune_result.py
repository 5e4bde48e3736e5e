"""A tune result as it was stored: the trials, their rungs, the winner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.errors import ReportError
from headrace.report.figures import median, plain, words
from headrace.schema import Fields

_AS_GIVEN = "as given"


@dataclass(frozen=True, slots=True)
class Rung:
    """One measurement of a trial: how many steps, and milliseconds a step of each repeat."""

    steps: int
    ms_per_step: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """One plan that was tried. `pace_ms` is its last figure: None if it was never measured; a step,
    or a thousand units where trials differ in their batches."""

    number: str
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
    pace_unit: str
    noise_share: float | None

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
    work = content.section("work")
    stored = content.children("trials")
    if not stored:
        raise ReportError(f"{content.file}: trials: expected at least one, found none")
    sizes = {fields.number("units_per_step") for fields in stored}
    by_unit = len(sizes) > 1 and None not in sizes
    winner = content.child("winner")
    parts = {} if winner is None else {name: winner.plain(name) for name in ("plan", "loader")}
    return TuneResult(
        work=work.text("name") or "work",
        description=work.text("description") or "",
        work_options=work.plain("options"),
        settings=content.plain("settings"),
        environment=content.plain("environment"),
        trials=tuple(_trial(fields, by_unit) for fields in stored),
        winner=parts,
        sentences=tuple(content.texts("sentences")),
        pace_unit=f"a thousand {work.text('unit') or 'samples'}" if by_unit else "a step",
        noise_share=content.number("noise_share"),
    )


def _trial(fields: Fields, by_unit: bool) -> Trial:
    rungs = tuple(_rung(rung) for rung in fields.children("rungs"))
    pace = fields.number("ms_per_step")
    if pace is None and rungs:
        pace = median(rungs[-1].ms_per_step)
    if by_unit:
        # Trials of other batch sizes compare by that alone.
        per_unit = fields.number("ms_per_unit")
        pace = None if per_unit is None else per_unit * 1000
    values = fields.plain("plan") | fields.plain("loader")
    changed = fields.plain("changed")
    number = plain(fields.values.get("id"))
    return Trial(
        number=number,
        name=fields.text("name")
        or _called(plain(values.get("name") or f"trial {number}"), changed),
        values=values,
        changed=changed,
        rungs=rungs,
        pace_ms=pace,
        status=fields.text("status") or "kept",
        why=fields.text("why") or "",
        peak_memory_bytes=fields.number("peak_memory_bytes"),
    )


def _called(plan: str, changed: dict[str, Any]) -> str:
    return ", ".join([plan, *(f"{words(name)} {plain(value)}" for name, value in changed.items())])


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
    """What mattered, most first: the plan, by the presets as they are, and each field by trials
    that differ in it alone, the fastest of them and those beside it."""
    found = [_around(name, result.measured) for name in _fields(result.measured)]
    presets = [trial for trial in result.measured if not trial.changed]
    found.append(_best("plan", [(plain(t.values.get("name")), t.pace_ms or 0.0) for t in presets]))
    return sorted((one for one in found if one is not None), key=lambda effect: -effect.size)


def _fields(trials: list[Trial]) -> dict[str, None]:
    names = dict.fromkeys(name for trial in trials for name in (*trial.values, *trial.changed))
    names.pop("name", None)
    return names


def _around(name: str, trials: list[Trial]) -> Effect | None:
    """The field's effect around the fastest trial that has others like it but for the field."""
    for fastest in trials:
        beside = [trial for trial in trials if _differ_in_alone(name, fastest, trial)]
        if beside:
            values = [(_value(t, name), t.pace_ms or 0.0) for t in (fastest, *beside)]
            return _best(name, values)
    return None


def _differ_in_alone(name: str, one: Trial, other: Trial) -> bool:
    """A prefetch factor comes with workers, and without them is none: that does not count."""
    if _value(one, name) == _value(other, name):
        return False
    for field in _fields([one, other]):
        mine, others = _value(one, field), _value(other, field)
        comes_along = field == "prefetch_factor" and _AS_GIVEN in (mine, others)
        if field != name and mine != others and not comes_along:
            return False
    return True


def _value(trial: Trial, name: str) -> str:
    chosen = trial.changed.get(name, trial.values.get(name))
    return _AS_GIVEN if chosen is None else plain(chosen)


def _best(name: str, values: list[tuple[str, float]]) -> Effect | None:
    best: dict[str, float] = {}
    for value, pace in sorted(values, key=lambda entry: entry[1]):
        best.setdefault(value, pace)
    if len(best) < 2 or min(best.values()) <= 0:
        return None
    return Effect(name, tuple(best.items()))
