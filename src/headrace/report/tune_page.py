"""The page of a tune result: the winner, all that was tried, and which fields mattered."""

from __future__ import annotations

from headrace.report.charts import Bar, Cell, Cells, Segment, as_table, bars, empty, legend, table
from headrace.report.effects import Effect, effects, trial_name
from headrace.report.environment import command_block, machine_list, settings_list
from headrace.report.figures import factor, moment, ms, number, plain, share, size, times, words
from headrace.report.markup import Child, tag
from headrace.report.page import Section, Stat, Verdict, page
from headrace.runs.records import TrialRecord, TuneResult

_MOST_BARS = 60
_LOOKS = {"winner": "good", "same as winner": "good", "kept": "compute", "dropped": "host"}
_SIGNS = {"winner": "★ winner", "same as winner": "≈ same as winner", "dropped": "dropped"}


def tune_page(result: TuneResult, source: str) -> str:
    environment = result.environment
    device = environment.device_name or environment.device
    work = ": ".join(dict.fromkeys(filter(None, (result.work.name, result.work.description))))
    date = moment(environment.date or None)
    kicker = " · ".join(filter(None, ("tune", work, device, date)))
    sections = [
        _winner_section(result),
        _trials_section(result),
        _fields_section(result),
        _table_section(result),
        _environment_section(result),
    ]
    return page(kicker, tune_verdict(result), sections, source)


def tune_verdict(result: TuneResult) -> Verdict:
    fastest = next((trial for trial, _ in result.measured), None)
    won, start = result.won or fastest, result.start
    failed = [trial for trial in result.trials if trial.status in ("failed", "out of memory")]
    won_ms = None if won is None else result.pace_ms(won)
    start_ms = None if start is None else result.pace_ms(start)
    if won is None or won_ms is None or start is None or start_ms is None:
        why = ["Every trial failed: the table says why."]
        return Verdict("Nothing could be measured", "–", "ms", [*result.sentences, *why], [])
    gain = start_ms / won_ms if won_ms > 0 else 1.0
    if won is start or gain < 1.02:
        headline = f"Nothing to gain: nothing is clearly faster than {trial_name(start)}"
    else:
        headline = f"Take {trial_name(won)}: {factor(gain)} times as fast as {trial_name(start)}"
    stats = [
        Stat(
            f"The winner, {result.pace_unit}",
            ms(won_ms),
            ms(start_ms) if won is not start else None,
        ),
        Stat(
            "Tried",
            f"{len(result.trials):,}",
            note=f"{len(failed)} did not run" if failed else None,
        ),
    ]
    if result.noise_share is not None:
        stats.append(Stat("Noise", share(result.noise_share)))
    if won.peak_memory_bytes:
        stats.append(Stat("Peak memory", size(won.peak_memory_bytes)))
    unfinished = [] if result.won else ["The search is not finished: this is the best so far."]
    return Verdict(
        headline,
        times(gain),
        f"the speed of {trial_name(start)}",
        result.sentences,
        stats,
        unfinished,
    )


def _winner_section(result: TuneResult) -> Section:
    winner = result.winner
    parts = {} if winner is None else {"plan": winner.plan, "loader": winner.loader}
    if not any(parts.values()):
        why = empty("There is no winner yet.")
        return Section("winner", "The winner", "", why)
    content: list[Child] = []
    for part, values in parts.items():
        if values:
            content += [tag("h3", part), settings_list(values)]
    return Section(
        "winner", "The winner", "As it stands in the plan.yaml that tune wrote.", content
    )


def _trials_section(result: TuneResult) -> Section:
    title, anchor = "All trials", "trials"
    shown = result.measured[:_MOST_BARS]
    if not shown:
        return Section(anchor, title, "", empty("No trial was measured."))
    rows = []
    for trial, pace in shown:
        name = trial_name(trial)
        low, high = _spread(trial, pace)
        sign = _SIGNS.get(trial.status, trial.status)
        label: Child = [name, " ", tag("span", sign, class_=f"badge {_badge(trial)}")]
        tip = f"{name}: {ms(pace)}, {trial.status}\n{_rungs(trial)}"
        if trial.why:
            tip += f"\n{trial.why}"
        rungs = f" {len(trial.rungs)} rung{'s' if len(trial.rungs) != 1 else ''}"
        segments = [Segment(pace, _LOOKS.get(trial.status, "compute"), trial.status)]
        mark = "is-taken" if trial.status == "winner" else None
        rows.append(Bar(label, segments, [tag("b", ms(pace)), rungs], tip, low, high, mark))
    most = max(max(pace, _spread(trial, pace)[1] or 0.0) for trial, pace in shown)
    lead = (
        f"Milliseconds {result.pace_unit}, the fastest first; the thin line spans the repeats of "
        "the last rung. Each rung is a longer measurement: what was clearly behind was dropped "
        "early."
    )
    left_out = len(result.measured) - len(shown)
    note = (
        tag("p", f"{left_out:,} slower ones are in the table.", class_="lead") if left_out else None
    )
    looks = [
        ("good", "winner, and the same within noise"),
        ("compute", "kept"),
        ("host", "dropped"),
    ]
    chart = bars(rows, label="Milliseconds of each trial", most=most, unit="ms", long_labels=True)
    return Section(anchor, title, lead, tag("figure", legend(looks), chart, note, class_="chart"))


def _fields_section(result: TuneResult) -> Section:
    title, anchor = "What mattered", "fields"
    found = effects(result)
    if not found:
        return Section(anchor, title, "", empty("No two trials differ in one thing alone."))
    noise = result.noise_share or 0.0
    rows = [_effect_bar(effect, noise) for effect in found]
    most = max(1.0, max(effect.size for effect in found) * 100)
    details = table(
        "The best trial with each value",
        ("field", "best value", "best ms", "worst value", "its best ms", "apart"),
        [
            [
                words(effect.name),
                effect.best_ms[0][0],
                Cell(number(effect.best_ms[0][1]), effect.best_ms[0][1]),
                effect.best_ms[-1][0],
                Cell(number(effect.best_ms[-1][1]), effect.best_ms[-1][1]),
                Cell(share(effect.size), effect.size),
            ]
            for effect in found
        ],
    )
    lead = (
        "How much slower the worst choice is than the best: of plans as they come, and of each "
        "field in trials that differ in it alone. What has a short bar may be left as it is."
    )
    looks = [("compute", "more than noise"), ("host", "within noise")]
    chart = [
        legend(looks) if noise else None,
        bars(rows, label="Effect of each field", most=most, unit="%"),
    ]
    return Section(
        anchor, title, lead, tag("figure", chart, as_table("As a table", details), class_="chart")
    )


def _effect_bar(effect: Effect, noise: float) -> Bar:
    listed = ", ".join(f"{value}: {ms(pace)}" for value, pace in effect.best_ms[:12])
    best = f" best: {effect.best_ms[0][0]}" if effect.size > noise else " within noise"
    value = [tag("b", share(effect.size)), best]
    segments = [
        Segment(effect.size * 100, "compute" if effect.size > noise else "host", effect.name)
    ]
    return Bar(words(effect.name), segments, value, f"{words(effect.name)}: {listed}")


def _table_section(result: TuneResult) -> Section:
    body: list[Cells] = [
        [
            plain(trial.id),
            trial_name(trial),
            Cell(number(result.pace_ms(trial)), result.pace_ms(trial)),
            _rungs(trial) or "–",
            trial.status,
            trial.why or "–",
            Cell(size(trial.peak_memory_bytes), trial.peak_memory_bytes),
        ]
        for trial in result.trials
    ]
    columns = ("trial", "plan", f"ms {result.pace_unit}", "rungs", "status", "why", "peak memory")
    drawn = table("One row a trial", columns, body)
    return Section("rows", "Everything that was tried", "", drawn)


def _environment_section(result: TuneResult) -> Section:
    content = [
        command_block(result.environment.command),
        tag("h3", "Machine"),
        machine_list(result.environment),
        tag("h3", "Settings"),
        settings_list(result.settings | result.work.options),
    ]
    return Section("environment", "How it was measured", "", content)


def _rungs(trial: TrialRecord) -> str:
    return "; ".join(
        f"{rung.steps} steps: {', '.join(number(value) for value in rung.ms_per_step)}"
        for rung in trial.rungs
    )


def _spread(trial: TrialRecord, pace: float) -> tuple[float | None, float | None]:
    """Of the last rung's repeats, where they are in the same unit as the figure."""
    if not trial.rungs:
        return None, None
    low, high = min(trial.rungs[-1].ms_per_step), max(trial.rungs[-1].ms_per_step)
    return (low, high) if low <= pace <= high else (None, None)


def _badge(trial: TrialRecord) -> str:
    return "take" if trial.status in ("winner", "same as winner") else "other"
