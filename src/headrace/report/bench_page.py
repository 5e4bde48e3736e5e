"""The values of a bench result's page, `templates/bench.html`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.records import BenchResult, PlanResult
from headrace.report.bench_losses import losses_view
from headrace.report.bench_tables import figure_table, plans_view, score_table, stream_table
from headrace.report.bench_times import gpu_view, speed_view, waits_view
from headrace.report.environment import environment_view, kicker, recorded
from headrace.report.figures import factor, ms, number, share, size, times
from headrace.report.page import Stat, Summary, render_page
from headrace.report.sensors import CPU_CORES, GPU_MEMORY, NVML, POWER, sensor_table, sensor_view
from headrace.report.timelines import timeline_group

#: A plan that is less than 2 % faster is not recommended in the headline.
_SMALLEST_GAIN = 0.02
_SENSORS = (NVML, CPU_CORES, POWER, GPU_MEMORY)


def bench_page(result: BenchResult, source: str) -> str:
    """The page of a bench result."""
    with_timeline = dict(result.timelines)
    losses, use = losses_view(result), _use(result)
    values = {
        "source": source,
        "kicker": kicker("bench", result.work, result.environment),
        "summary": _summary(result),
        "has_gpu": result.has_gpu,
        "speed": speed_view(result),
        "gpu": gpu_view(result),
        "timeline_group": timeline_group(result.timelines) if with_timeline else None,
        "without_timeline": [row.plan for row in result.rows if row.plan not in with_timeline],
        "losses": losses,
        "waits": waits_view(result),
        "use": use,
        "streams": stream_table(result),
        "scores": score_table(result),
        "figures": figure_table(result),
        "row_notes": [f"{row.plan}: {note}" for row in result.rows for note in row.notes],
        "plans": plans_view(result),
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
