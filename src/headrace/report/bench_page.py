"""The values of a bench result's page, `templates/bench.html`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.records import WEIGHTS, BenchResult, PlanResult, WaitFigures
from headrace.report.charts import (
    Badge,
    Bar,
    BarChart,
    Cell,
    Cells,
    Column,
    Segment,
    Table,
    figure,
    meter,
    table,
)
from headrace.report.environment import environment_view, kicker, recorded
from headrace.report.figures import (
    brief,
    factor,
    joined,
    ms,
    number,
    plain,
    share,
    size,
    times,
    words,
)
from headrace.report.lines import Axis, Line, LineChart
from headrace.report.page import Stat, Summary, render_page
from headrace.report.sensors import (
    CPU_CORES,
    GPU_MEMORY,
    NVML,
    POWER,
    sensor_table,
    sensor_view,
)
from headrace.report.thinning import evenly_spaced
from headrace.report.timelines import timeline_group

#: A plan that is less than 2 % faster is not recommended in the headline.
_SMALLEST_GAIN = 0.02
_STEPS_IN_TABLE = 50
_REASON_LOOKS = 8
#: Reasons of the engine's own waits, in words.
_REASONS = {
    "sync": "the plan waits for the device",
    "run_ahead": "the host is as far ahead as the plan allows",
    "data": "the loader has no batch yet",
    "copy": "a copy that the host waits for",
    "pageable_copy": "a copy from memory that is not pinned",
    "losses": "a loss is read",
}


_SENSORS = (NVML, CPU_CORES, POWER, GPU_MEMORY)


def bench_page(result: BenchResult, source: str) -> str:
    """The page of a bench result."""
    with_timeline = dict(result.timelines)
    losses, use = _losses(result), _use(result)
    values = {
        "source": source,
        "kicker": kicker("bench", result.work, result.environment),
        "summary": _summary(result),
        "has_gpu": result.has_gpu,
        "speed": _speed(result),
        "gpu": _gpu(result),
        "timeline_group": timeline_group(result.timelines) if with_timeline else None,
        "without_timeline": [row.plan for row in result.rows if row.plan not in with_timeline],
        "losses": losses,
        "waits": _waits(result),
        "use": use,
        "streams": _streams(result),
        "scores": _scores(result),
        "figures": _figures(result),
        "row_notes": [f"{row.plan}: {note}" for row in result.rows for note in row.notes],
        "plans": _plans(result),
        "environment": environment_view(
            result.environment, recorded(result.settings) | result.work.options, result.missing
        ),
    }
    return render_page(
        "bench.html",
        values,
        has_lines=losses is not None or bool(use["plans"]),
        has_timelines=bool(with_timeline),
    )


def _summary(result: BenchResult) -> Summary:
    """Which plan to take, and by how much it is faster."""
    reference, taken = result.reference, result.taken
    warnings = _warnings(result)
    sentences = result.verdict.sentences
    if reference is None or reference.ms_per_step is None:
        return Summary("No plan could be measured", "–", "ms per step", sentences, [], warnings)
    if taken is None or taken.ms_per_step is None:
        taken = reference
    assert taken.ms_per_step is not None
    gain = reference.ms_per_step.median / taken.ms_per_step.median
    if taken is reference or abs(gain - 1) < _SMALLEST_GAIN:
        headline = f"Nothing to gain: no plan is clearly faster than {reference.plan}"
    else:
        headline = f"Take {taken.plan}: {factor(gain)} times as fast, {_same_losses(taken)}"
    label = f"the speed of {reference.plan}" if taken is not reference else "so stay with it"
    return Summary(
        headline, times(gain), label, sentences, _stats(result, reference, taken), warnings
    )


def _same_losses(row: PlanResult) -> str:
    return {
        "reference": "and the reference for the others",
        "identical": "with the same losses",
        "within": "with the same losses within tolerance",
        "unequal": "but with other losses",
    }.get(row.equal.verdict, "losses not compared")


def _stats(result: BenchResult, reference: PlanResult, taken: PlanResult) -> list[Stat]:
    def before(text: str) -> str | None:
        return text if taken is not reference else None

    assert reference.ms_per_step is not None
    assert taken.ms_per_step is not None
    stats = [
        Stat("A step", ms(taken.ms_per_step.median), before(ms(reference.ms_per_step.median))),
        Stat(
            f"{result.work.unit} per second".capitalize(),
            number(taken.per_s),
            before(number(reference.per_s)),
        ),
    ]
    if reference.gpu is not None and taken.gpu is not None:
        note = None
        if taken.gpu.over_busy_share is not None:
            over = max(0.0, taken.gpu.over_busy_share)
            note = f"idle {share(over / (1 + over))} of a step"
        stats.append(
            Stat(
                "GPU busy",
                share(taken.gpu.busy_share),
                before(share(reference.gpu.busy_share)),
                note,
            )
        )
    if reference.host_blocked_ms is not None and taken.host_blocked_ms is not None:
        blocked = before(ms(reference.host_blocked_ms))
        stats.append(Stat("Host blocked", ms(taken.host_blocked_ms), blocked))
    if taken.peak_memory_bytes:
        used = before(size(reference.peak_memory_bytes))
        stats.append(Stat("Peak memory", size(taken.peak_memory_bytes), used))
    if result.noise is not None:
        noise = share(abs(result.noise.difference_share))
        stats.append(Stat("Noise", noise, note=f"{result.noise.plan} against itself"))
    return stats


def _warnings(result: BenchResult) -> Sequence[str]:
    warnings = []
    if result.interrupted:
        warnings.append("the measurement was interrupted: this is what was measured until then")
    for row in result.rows:
        if row.error is not None:
            warnings.append(f"{row.plan} failed: {row.error}")
        elif row.equal.verdict == "unequal":
            step = "" if row.equal.first_step is None else f" from step {row.equal.first_step} on"
            why = f": {row.equal.why}" if row.equal.why else ""
            warnings.append(
                f"{row.plan} does not compute the same: its losses differ{step}, by up to "
                f"{number(row.equal.largest)}{why}"
            )
    return warnings


def _speed(result: BenchResult) -> dict[str, Any]:
    paces = [row.ms_per_step for row in result.rows if row.ms_per_step is not None]
    return {
        "has_gpu_time": any(
            row.ms_per_step is not None and _busy_ms(row) is not None for row in result.rows
        ),
        "bars": BarChart(
            "Milliseconds per step of each plan",
            [_pace_bar(result, row) for row in result.rows],
            top=max((pace.high for pace in paces), default=1.0),
            unit="ms",
        ),
        "table": table(
            "Milliseconds per step",
            ("plan", "median ms", "lowest", "highest", "repeats", "GPU busy ms", "speed"),
            [
                [row.plan, *_pace_cells(row), figure(_busy_ms(row)), figure(row.speedup, times)]
                for row in result.rows
            ],
        ),
    }


def _pace_cells(row: PlanResult) -> list[Cell | str]:
    pace = row.ms_per_step
    if pace is None:
        return [row.error or "not measured", "–", "–", "–"]
    repeats = ", ".join(number(value) for value in pace.repeats) or "–"
    return [figure(pace.median), figure(pace.low), figure(pace.high), repeats]


def _pace_bar(result: BenchResult, row: PlanResult) -> Bar:
    label, pace, busy = _plan_label(result, row), row.ms_per_step, _busy_ms(row)
    if pace is None:
        value = "failed" if row.error else "not measured"
        tip = f"{row.plan}: {row.error or 'not measured'}"
        return Bar(label, [], value, tip, look="is-failed")
    tip = (
        f"{row.plan}: {ms(pace.median)} per step, {number(pace.low)} to {ms(pace.high)} over "
        f"{len(pace.repeats) or 1} repeats"
    )
    segments = [Segment(pace.median, "plain")]
    if busy is not None:
        busy = min(busy, pace.median)
        segments = [Segment(busy, "compute"), Segment(pace.median - busy, "idle")]
        tip += f"; the GPU works for {ms(busy)} of it"
    if row.speedup is not None:
        tip += f"; {times(row.speedup)}"
    return Bar(
        label,
        segments,
        value=ms(pace.median),
        tip=tip,
        note=times(row.speedup),
        low=pace.low,
        high=pace.high,
        look=_bar_look(result, row),
    )


def _gpu(result: BenchResult) -> dict[str, Any] | None:
    seen = [
        (row, row.gpu)
        for row in result.rows
        if row.gpu is not None and row.gpu.busy_share is not None
    ]
    if not seen:
        return None
    bars = []
    for row, gpu in seen:
        # Clamped: a damaged result must not draw a bar of more than 100 %.
        busy = min(1.0, max(0.0, gpu.busy_share or 0.0))
        compute = busy if gpu.compute_share is None else min(busy, max(0.0, gpu.compute_share))
        shares = {"compute": compute, "copy": busy - compute, "idle": 1.0 - busy}
        tip = (
            f"{row.plan}: computing {share(compute)}, only copying {share(busy - compute)}, "
            f"idle {share(1.0 - busy)} of the time"
        )
        segments = [Segment(part * 100, look) for look, part in shares.items()]
        look = _bar_look(result, row)
        bars.append(Bar(_plan_label(result, row), segments, share(busy), tip, "busy", look=look))
    rows: list[Cells] = [
        [
            row.plan,
            *(
                figure(value, share)
                for value in (
                    *(gpu.busy_share, gpu.compute_share, gpu.copy_share),
                    *(gpu.idle_share, row.nvml_share),
                )
            ),
            figure(gpu.launches_per_step),
            figure(gpu.over_busy_share, share),
        ]
        for row, gpu in seen
    ]
    return {
        "bars": BarChart("GPU use of each plan", bars, top=100, unit="%"),
        "table": table(
            "Shares of wall time, from a profiler window, and NVML's figure",
            (
                *("plan", "busy", "computing", "copying", "idle", "NVML", "launches per step"),
                "longer than GPU busy",
            ),
            rows,
        ),
    }


def _losses(result: BenchResult) -> dict[str, Any] | None:
    lines, differences = _loss_lines(result)
    if not lines:
        return None
    equality = _equality_words(result)
    reference = next((row for row in result.rows if _is_reference(result, row)), result.rows[0])
    return {
        "equality": equality,
        "reference": reference.plan,
        "chart": LineChart(
            f"Losses of {len(lines)} plans in one chart. {equality}",
            lines,
            x=Axis("step"),
            y=Axis("loss"),
            sync="losses",
        ),
        "differences": LineChart(
            "Each plan's loss minus the reference's",
            differences,
            x=Axis("step"),
            y=Axis("loss − reference"),
            sync="losses",
        )
        if differences
        else None,
        "table": _losses_table(result),
        "equality_table": _equality_table(result),
    }


def _loss_lines(result: BenchResult) -> tuple[list[Line], list[Line]]:
    """The losses of each plan, and the differences from the reference of plans that have some."""
    rows = [row for row in result.rows if any(loss is not None for loss in row.losses)]
    base = next((row.losses for row in rows if _is_reference(result, row)), None)
    lines, differences = [], []
    for index, row in enumerate(rows):
        points = [(float(at), loss) for at, loss in enumerate(row.losses, 1) if loss is not None]
        same = [other.plan for other in rows if other.losses == row.losses]
        strand = (same.index(row.plan), len(same)) if len(same) > 1 else None
        lines.append(Line(row.plan, points, index, 4.0 if strand else 2.0, strand=strand))
        pairs = zip(row.losses, row.reference_losses or base or (), strict=False)
        both = [
            (at, own, other)
            for at, (own, other) in enumerate(pairs, 1)
            if own is not None and other is not None
        ]
        if any(own != other for _, own, other in both):
            apart = [(float(at), own - other) for at, own, other in both]
            differences.append(Line(row.plan, apart, index))
    return lines, differences


def _equality_words(result: BenchResult) -> str:
    """Whether the plans compute the same, in a sentence or two."""
    by_verdict: dict[str, list[PlanResult]] = {}
    for row in result.rows:
        by_verdict.setdefault(row.equal.verdict, []).append(row)
    sentences = []
    if same := by_verdict.get("identical"):
        sentences.append(f"{_plans_in(same)} gave the reference's losses bit for bit.")
    if within := by_verdict.get("within"):
        worst = max(within, key=lambda row: row.equal.largest or 0.0)
        sentences.append(
            f"{_plans_in(within)} stayed within the tolerance of {brief(worst.equal.tolerance)}; "
            f"the largest difference is {brief(worst.equal.largest)} ({worst.plan})."
        )
        sentences += [
            f"({row.plan}: {row.equal.why}.)" for row in within if row.equal.why and not row.is_peer
        ]
    for row in by_verdict.get("unequal", ()):
        step = "" if row.equal.first_step is None else f" from step {row.equal.first_step} on"
        sentences.append(
            f"The losses of {row.plan} differ{step}, by up to {brief(row.equal.largest)}."
        )
    if apart := by_verdict.get("not compared"):
        sentences.append(f"{_plans_in(apart)}: not compared.")
    return " ".join(sentences) or "Nothing was compared."


def _losses_table(result: BenchResult) -> Table:
    rows = [row for row in result.rows if row.losses]
    steps = evenly_spaced(max((len(row.losses) for row in rows), default=0), _STEPS_IN_TABLE)
    chosen = f" ({_STEPS_IN_TABLE} steps, evenly spread)" if len(steps) == _STEPS_IN_TABLE else ""
    body: list[Cells] = []
    for step in steps:
        found = [row.losses[step] if step < len(row.losses) else None for row in rows]
        cells = [Cell("–") if loss is None else Cell(f"{loss:.6g}", loss) for loss in found]
        body.append([f"{step + 1}", *cells])
    return table(f"Loss of each step{chosen}", ("step", *(row.plan for row in rows)), body)


def _equality_table(result: BenchResult) -> Table:
    return table(
        "How each plan's losses compare with the reference's",
        ("plan", "verdict", "largest difference", "tolerance", "first at step", "why"),
        [
            [
                row.plan,
                row.equal.verdict,
                figure(row.equal.largest, brief),
                figure(row.equal.tolerance, brief),
                "–" if row.equal.first_step is None else str(row.equal.first_step),
                row.equal.why or "–",
            ]
            for row in result.rows
        ],
    )


def _waits(result: BenchResult) -> dict[str, Any] | None:
    rows = [(row, row.waits) for row in result.rows if row.waits is not None]
    if not rows:
        return None
    reasons = _reasons([row for row, _ in rows])
    looks = {reason: f"reason-{at % _REASON_LOOKS}" for at, reason in enumerate(reasons)}
    bars = []
    for row, waits in rows:
        costs = {r: waits.by_reason[r].ms_per_step for r in reasons if r in waits.by_reason}
        parts = ", ".join(f"{words(reason)} {ms(cost)}" for reason, cost in costs.items())
        bars.append(
            Bar(
                _plan_label(result, row),
                [Segment(cost, looks[reason]) for reason, cost in costs.items()],
                ms(sum(costs.values())),
                f"{row.plan}: {parts or 'never'}; {number(waits.per_step)} waits per step",
                f"{brief(waits.per_step)} per step",
                look=_bar_look(result, row),
            )
        )
    return {
        "legend": [
            (looks[reason], ": ".join(filter(None, (words(reason), _REASONS.get(reason)))))
            for reason in reasons
        ],
        "bars": BarChart(
            "Host waits of each plan by reason",
            bars,
            top=max(sum(part.value for part in bar.segments) for bar in bars),
            unit="ms",
        ),
        "table": table(
            "Host waits per step by reason: how many, and milliseconds",
            ("plan", *(words(reason) for reason in reasons), "waits", "host blocked ms", "data ms"),
            [
                [
                    row.plan,
                    *(_wait_cell(waits.by_reason.get(reason)) for reason in reasons),
                    figure(waits.per_step),
                    figure(row.host_blocked_ms),
                    figure(row.data_wait_ms),
                ]
                for row, waits in rows
            ],
        ),
    }


def _reasons(rows: Sequence[PlanResult]) -> list[str]:
    """All reasons, the costliest first."""
    costs: dict[str, float] = {}
    for row in rows:
        for reason, wait in (row.waits.by_reason if row.waits else {}).items():
            costs[reason] = costs.get(reason, 0.0) + wait.ms_per_step
    return sorted(costs, key=lambda reason: (-costs[reason], reason))


def _wait_cell(found: WaitFigures | None) -> Cell:
    if found is None:
        return Cell("–")
    return Cell(f"{number(found.per_step)} × · {ms(found.ms_per_step)}", found.ms_per_step)


def _use(result: BenchResult) -> dict[str, Any]:
    rows = [row for row in result.rows if row.samples]
    points = {(s, row.plan): s.points(row.samples) for row in rows for s in _SENSORS}
    seen = [s for s in _SENSORS if any(points[s, row.plan] for row in rows)]
    # One scale for all plans, so that they can be compared.
    tops = {s: s.scale_top([v for row in rows for _, v in points[s, row.plan]]) for s in seen}
    why = "No sensor could be read here." if rows else "The monitor recorded no samples here."
    return {
        "why": why,
        "has_nvml": NVML in seen,
        "plans": [
            (row.plan, [sensor_view(s, points[s, row.plan], tops[s], row.plan) for s in seen])
            for row in rows
            if seen
        ],
        "table": sensor_table([(row.plan, s, points[s, row.plan]) for row in rows for s in seen]),
    }


def _streams(result: BenchResult) -> Table | None:
    body = [
        [
            _plan_label(result, row) if index == 0 else Cell(row.plan, look="again"),
            stream.name,
            meter(stream.busy_share, stream.busy_share, share),
            figure(stream.kernels_per_step),
            figure(stream.copies_per_step),
            meter(row.overlap_share, row.overlap_share, share, "copy") if index == 0 else "",
        ]
        for row in result.rows
        for index, stream in enumerate(row.streams)
    ]
    columns = ("plan", "stream", "busy", "kernels per step", "copies per step", "two at once")
    return table("Streams of each plan", columns, body, look="streams") if body else None


def _scores(result: BenchResult) -> Table | None:
    rows = [row for row in result.rows if row.score]
    rows.sort(key=lambda row: -(row.score.total if row.score else 0.0))
    columns: list[Column | str] = ["plan", "total, of 100"]
    columns += [Column(name, f"of {weight}") for name, weight in WEIGHTS.items()]
    body = [
        [
            _plan_label(result, row),
            _score_part(row, "total", 100, "plain"),
            *(_score_part(row, name, weight, "compute") for name, weight in WEIGHTS.items()),
        ]
        for row in rows
    ]
    return table("Scores, best first", columns, body, look="scores") if rows else None


def _score_part(row: PlanResult, name: str, weight: float, look: str) -> Cell:
    value: float = getattr(row.score, name)
    return meter(value, value / weight, number, look)


def _figures(result: BenchResult) -> Table:
    """Every figure of every row."""
    columns = (
        *("plan", "ms per step", "speed", f"{result.work.unit} per second", "ms per pass"),
        *("waits per step", "host blocked ms", "data ms", "GPU busy", "NVML", "CPU cores"),
        *("power W", "peak memory", "reserved", "longer than GPU busy", "streams overlap"),
        "losses",
    )
    body = [_figures_of(result, row) for row in result.rows]
    return table("All rows", columns, body, look="wide")


def _figures_of(result: BenchResult, row: PlanResult) -> list[Cell | str]:
    gpu = row.gpu
    return [
        _plan_label(result, row),
        figure(None if row.ms_per_step is None else row.ms_per_step.median),
        figure(row.speedup, times),
        figure(row.per_s),
        figure(row.pass_ms),
        figure(None if row.waits is None else row.waits.per_step),
        figure(row.host_blocked_ms),
        figure(row.data_wait_ms),
        figure(None if gpu is None else gpu.busy_share, share),
        figure(row.nvml_share, share),
        figure(row.cpu_share),
        figure(row.power_w),
        figure(row.peak_memory_bytes, size),
        figure(row.reserved_memory_bytes, size),
        figure(None if gpu is None else gpu.over_busy_share, share),
        figure(row.overlap_share, share),
        row.error or row.equal.verdict,
    ]


def _plans(result: BenchResult) -> dict[str, Any]:
    """The fields in which the plans differ."""
    rows = [(row.plan, row.fields) for row in result.rows if row.fields]
    if not rows:
        return {"table": None, "why": "This result does not hold the plans' fields."}
    body: list[list[Cell | str]] = []
    for name in dict.fromkeys(name for _, fields in rows for name in fields if name != "name"):
        values = [plain(fields.get(name)) for _, fields in rows]
        if len(set(values)) > 1:
            looks = ["" if value == values[0] else "changed" for value in values]
            cells = [Cell(value, look=look) for value, look in zip(values, looks, strict=True)]
            body.append([name, *cells])
    if not body:
        return {"table": None, "why": "No field differs between the plans."}
    columns = ("field", *(plan for plan, _ in rows))
    return {
        "table": table("Fields that differ", columns, body, look="plans"),
        "first": rows[0][0],
    }


def _busy_ms(row: PlanResult) -> float | None:
    return None if row.gpu is None else row.gpu.busy_ms_per_step


def _plan_label(result: BenchResult, row: PlanResult) -> Cell:
    """The plan's name, with badges: recommended, reference or peer; not compiled, not captured."""
    badges = []
    if row.plan == result.verdict.take:
        badges.append(Badge("take this", "take"))
    elif _is_reference(result, row):
        badges.append(Badge("before"))
    elif row.is_peer:
        badges.append(Badge("peer"))
    if row.not_compiled is not None:
        badges.append(Badge("not compiled", title=row.not_compiled))
    if row.not_captured is not None:
        badges.append(Badge("not captured", title=row.not_captured))
    return Cell(row.plan, badges=badges)


def _is_reference(result: BenchResult, row: PlanResult) -> bool:
    reference = result.reference
    return reference is not None and row.plan == reference.plan


def _bar_look(result: BenchResult, row: PlanResult) -> str:
    return "is-taken" if row.plan == result.verdict.take else ""


def _plans_in(rows: Sequence[PlanResult]) -> str:
    return joined([row.plan for row in rows])
