"""The values of a tune result's page, `templates/tune.html`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.records import TrialRecord, TuneResult
from headrace.report.charts import Badge, Bar, BarChart, Cell, Segment, Table, figure, table
from headrace.report.effects import Effect, effects, trial_name
from headrace.report.environment import Entries, entries, environment_view, kicker
from headrace.report.figures import factor, ms, number, plain, share, size, times, words
from headrace.report.page import Stat, Summary, render_page
from headrace.text_table import counted

#: A winner that is less than 2 % faster is not recommended in the headline.
_SMALLEST_GAIN = 1.02
_MAX_BARS = 60
_LOOKS = {"winner": "good", "same as winner": "good", "kept": "compute", "dropped": "host"}
_BADGES = {"winner": "★ winner", "same as winner": "≈ same as winner"}


def tune_page(result: TuneResult, source: str) -> str:
    """The page of a tune result."""
    values = {
        "source": source,
        "kicker": kicker("tune", result.work, result.environment),
        "summary": _summary(result),
        "winner": _winner(result),
        "pace_unit": result.pace_unit,
        "trials": _trials(result.measured[:_MAX_BARS]),
        "slower_trials": max(0, len(result.measured) - _MAX_BARS),
        "fields": _fields(result),
        "rows": _rows(result),
        "environment": environment_view(result.environment, result.settings | result.work.options),
    }
    return render_page("tune.html", values)


def _summary(result: TuneResult) -> Summary:
    fastest = next((trial for trial, _ in result.measured), None)
    won, start = result.won or fastest, result.start
    failed = [trial for trial in result.trials if trial.status in ("failed", "out of memory")]
    won_ms = None if won is None else result.pace_ms(won)
    start_ms = None if start is None else result.pace_ms(start)
    if won is None or won_ms is None or start is None or start_ms is None:
        sentences = [*result.sentences, "Every trial failed: the table says why."]
        return Summary("Nothing could be measured", "–", "ms", sentences, [])
    gain = start_ms / won_ms if won_ms > 0 else 1.0
    if won is start or gain < _SMALLEST_GAIN:
        headline = f"Nothing to gain: nothing is clearly faster than {trial_name(start)}"
    else:
        headline = f"Take {trial_name(won)}: {factor(gain)} times as fast as {trial_name(start)}"
    before = ms(start_ms) if won is not start else None
    note = f"{len(failed)} did not run" if failed else None
    stats = [
        Stat(f"The winner, {result.pace_unit}", ms(won_ms), before),
        Stat("Tried", f"{len(result.trials):,}", note=note),
    ]
    if result.noise_share is not None:
        stats.append(Stat("Noise", share(result.noise_share)))
    if won.peak_memory_bytes:
        stats.append(Stat("Peak memory", size(won.peak_memory_bytes)))
    warnings = [] if result.won else ["The search is not finished: this is the best so far."]
    label = f"the speed of {trial_name(start)}"
    return Summary(headline, times(gain), label, result.sentences, stats, warnings)


def _winner(result: TuneResult) -> list[tuple[str, Entries]]:
    winner = result.winner
    parts = {} if winner is None else {"plan": winner.plan, "loader": winner.loader}
    return [(part, entries(fields)) for part, fields in parts.items() if fields]


def _trials(trials: Sequence[tuple[TrialRecord, float]]) -> BarChart | None:
    if not trials:
        return None
    tops = [max(pace, _repeat_range(trial, pace)[1] or 0.0) for trial, pace in trials]
    bars = [_trial_bar(trial, pace) for trial, pace in trials]
    return BarChart("Milliseconds of each trial", bars, max(tops), "ms", long_labels=True)


def _trial_bar(trial: TrialRecord, pace: float) -> Bar:
    name = trial_name(trial)
    low, high = _repeat_range(trial, pace)
    tip = [f"{name}: {ms(pace)}, {trial.status}", _rungs(trial), trial.why]
    badge_look = "take" if trial.status in _BADGES else ""
    badge = Badge(_BADGES.get(trial.status, trial.status), badge_look)
    return Bar(
        label=Cell(name, badges=[badge]),
        segments=[Segment(pace, _LOOKS.get(trial.status, "compute"))],
        value=ms(pace),
        tip="\n".join(filter(None, tip)),
        note=counted(len(trial.rungs), "rung"),
        low=low,
        high=high,
        look="is-taken" if trial.status == "winner" else "",
    )


def _fields(result: TuneResult) -> dict[str, Any] | None:
    """How much each field changed the time."""
    found = effects(result)
    if not found:
        return None
    noise = result.noise_share or 0.0
    top = max(1.0, max(effect.size for effect in found) * 100)
    bars = [_effect_bar(effect, noise) for effect in found]
    return {
        "has_noise": bool(noise),
        "bars": BarChart("Effect of each field", bars, top, "%"),
        "table": table(
            "The best trial with each value",
            ("field", "best value", "best ms", "worst value", "its best ms", "apart"),
            [
                [
                    words(effect.name),
                    effect.best_ms[0][0],
                    figure(effect.best_ms[0][1]),
                    effect.best_ms[-1][0],
                    figure(effect.best_ms[-1][1]),
                    figure(effect.size, share),
                ]
                for effect in found
            ],
        ),
    }


def _effect_bar(effect: Effect, noise: float) -> Bar:
    name, matters = words(effect.name), effect.size > noise
    values = ", ".join(f"{value}: {ms(pace)}" for value, pace in effect.best_ms[:12])
    return Bar(
        label=Cell(name),
        segments=[Segment(effect.size * 100, "compute" if matters else "host")],
        value=share(effect.size),
        tip=f"{name}: {values}",
        note=f"best: {effect.best_ms[0][0]}" if matters else "within noise",
    )


def _rows(result: TuneResult) -> Table:
    columns = ("trial", "plan", f"ms {result.pace_unit}", "rungs", "status", "why", "peak memory")
    return table(
        "One row per trial",
        columns,
        [
            [
                plain(trial.id),
                trial_name(trial),
                figure(result.pace_ms(trial)),
                _rungs(trial) or "–",
                trial.status,
                trial.why or "–",
                figure(trial.peak_memory_bytes, size),
            ]
            for trial in result.trials
        ],
    )


def _rungs(trial: TrialRecord) -> str:
    return "; ".join(
        f"{rung.steps} steps: {', '.join(number(value) for value in rung.ms_per_step)}"
        for rung in trial.rungs
    )


def _repeat_range(trial: TrialRecord, pace: float) -> tuple[float | None, float | None]:
    """Lowest and highest repeat of the last rung, if they are in the same unit as the pace."""
    if not trial.rungs:
        return None, None
    low, high = min(trial.rungs[-1].ms_per_step), max(trial.rungs[-1].ms_per_step)
    return (low, high) if low <= pace <= high else (None, None)
