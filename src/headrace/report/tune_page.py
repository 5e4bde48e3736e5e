"""The values of a tune result's page, `templates/tune.html`."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.records import TrialRecord, TuneResult
from headrace.report.charts import Badge, Bar, BarChart, Cell, Segment, Table, figure, table
from headrace.report.environment import Entries, entries, environment_view, kicker
from headrace.report.figures import factor, ms, number, plain, share, size, times
from headrace.report.page import Stat, Summary, render_page
from headrace.text_table import counted

#: A winner that is less than 2 % faster is not recommended in the headline.
_SMALLEST_GAIN = 1.02
_MAX_BARS = 60
_LOOKS = {"winner": "good", "same as winner": "good", "slower": "compute"}
_BADGES = {"winner": "★ winner", "same as winner": "≈ same as winner"}


def tune_page(result: TuneResult, source: str) -> str:
    """The page of a tune result."""
    values = {
        "source": source,
        "kicker": kicker("tune", result.work, result.environment),
        "summary": _summary(result),
        "winner": _winner(result),
        "trials": _trials(result.measured[:_MAX_BARS]),
        "slower_trials": max(0, len(result.measured) - _MAX_BARS),
        "rows": _rows(result),
        "environment": environment_view(result.environment, result.settings | result.work.options),
    }
    return render_page("tune.html", values)


def _summary(result: TuneResult) -> Summary:
    fastest = next((trial for trial, _ in result.measured), None)
    won, start = result.won or fastest, result.start
    failed = [trial for trial in result.trials if trial.status in ("failed", "out of memory")]
    won_ms = None if won is None else won.ms_per_step
    start_ms = None if start is None else start.ms_per_step
    if won is None or won_ms is None or start is None or start_ms is None:
        sentences = [*result.sentences, "Every trial failed: the table says why."]
        return Summary("Nothing could be measured", "–", "ms", sentences, [])
    gain = start_ms / won_ms if won_ms > 0 else 1.0
    if won is start or gain < _SMALLEST_GAIN:
        headline = f"Nothing to gain: nothing is clearly faster than {start.name}"
    else:
        headline = f"Take {won.name}: {factor(gain)} times as fast as {start.name}"
    before = ms(start_ms) if won is not start else None
    note = f"{len(failed)} did not run" if failed else None
    stats = [
        Stat("The winner, per step", ms(won_ms), before),
        Stat("Tried", f"{len(result.trials):,}", note=note),
    ]
    if result.noise_share is not None:
        stats.append(Stat("Noise", share(result.noise_share)))
    if won.peak_memory_bytes:
        stats.append(Stat("Peak memory", size(won.peak_memory_bytes)))
    warnings = [] if result.won else ["The search is not finished: this is the best so far."]
    label = f"the speed of {start.name}"
    return Summary(headline, times(gain), label, result.sentences, stats, warnings)


def _winner(result: TuneResult) -> list[tuple[str, Entries]]:
    winner = result.winner
    parts = {} if winner is None else {"plan": winner.plan, "loader": winner.loader}
    return [(part, entries(fields)) for part, fields in parts.items() if fields]


def _trials(trials: Sequence[tuple[TrialRecord, float]]) -> BarChart | None:
    if not trials:
        return None
    top = max(max(trial.runs_ms, default=pace) for trial, pace in trials)
    bars = [_trial_bar(trial, pace) for trial, pace in trials]
    return BarChart("Milliseconds of each trial", bars, top, "ms", long_labels=True)


def _trial_bar(trial: TrialRecord, pace: float) -> Bar:
    name = trial.name
    tip = [f"{name}: {ms(pace)}, {trial.status}", _runs(trial), trial.why]
    badge_look = "take" if trial.status in _BADGES else ""
    badge = Badge(_BADGES.get(trial.status, trial.status), badge_look)
    return Bar(
        label=Cell(name, badges=[badge]),
        segments=[Segment(pace, _LOOKS.get(trial.status, "compute"))],
        value=ms(pace),
        tip="\n".join(filter(None, tip)),
        note=counted(len(trial.runs_ms), "run"),
        low=min(trial.runs_ms, default=None),
        high=max(trial.runs_ms, default=None),
        look="is-taken" if trial.status == "winner" else "",
    )


def _rows(result: TuneResult) -> Table:
    columns = ("trial", "plan", "ms per step", "runs", "status", "why", "peak memory")
    return table(
        "One row per trial",
        columns,
        [
            [
                plain(trial.id),
                trial.name,
                figure(trial.ms_per_step),
                _runs(trial) or "–",
                trial.status,
                trial.why or "–",
                figure(trial.peak_memory_bytes, size),
            ]
            for trial in result.trials
        ],
    )


def _runs(trial: TrialRecord) -> str:
    return ", ".join(number(value) for value in trial.runs_ms)
