"""The page of a bench result: the verdict, then what it rests on."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.report.bench_charts import (
    gpu_section,
    speed_section,
    streams_section,
    timelines_section,
    waits_section,
)
from headrace.report.bench_losses import losses_section
from headrace.report.bench_result import BenchResult, Row
from headrace.report.bench_tables import (
    environment_section,
    plans_section,
    rows_section,
    score_section,
)
from headrace.report.bench_use import use_section
from headrace.report.figures import factor, moment, ms, number, share, size, times
from headrace.report.page import Stat, Verdict, page

#: Below this the difference is not worth a sentence.
_NOTHING = 0.02


def bench_page(result: BenchResult, source: str) -> str:
    environment = result.environment
    device = str(environment.get("device_name") or environment.get("device") or "")
    date = moment(environment.get("date"))
    work = ": ".join(dict.fromkeys(filter(None, (result.work, result.description))))
    kicker = " · ".join(filter(None, ("bench", work, device, date)))
    sections = [
        speed_section(result),
        gpu_section(result),
        timelines_section(result),
        losses_section(result),
        waits_section(result),
        use_section(result),
        streams_section(result),
        score_section(result),
        rows_section(result),
        plans_section(result),
        environment_section(result),
    ]
    return page(kicker, bench_verdict(result), sections, source)


def bench_verdict(result: BenchResult) -> Verdict:
    """What to take, and by how much it is better."""
    reference, taken = result.reference, result.taken
    warnings = _warnings(result)
    sentences = result.verdict.sentences
    if reference is None or reference.pace is None:
        return Verdict("No plan could be measured", "–", "ms a step", sentences, [], warnings)
    if taken is None or taken.pace is None:
        taken = reference
    assert taken.pace is not None
    gain = reference.pace.median / taken.pace.median
    if taken is reference or abs(gain - 1) < _NOTHING:
        headline = f"Nothing to gain: no plan is clearly faster than {reference.plan}"
    else:
        headline = f"Take {taken.plan}: {factor(gain)} times as fast, {_equal_words(taken)}"
    label = f"the speed of {reference.plan}" if taken is not reference else "so stay with it"
    return Verdict(
        headline, times(gain), label, sentences, _stats(result, reference, taken), warnings
    )


def _equal_words(row: Row) -> str:
    verdict = "not compared" if row.equal is None else row.equal.verdict
    return {
        "reference": "and what the others are compared with",
        "identical": "with the very same losses",
        "within": "with the same losses within tolerance",
        "unequal": "but with other losses",
    }.get(verdict, "losses not compared")


def _stats(result: BenchResult, reference: Row, taken: Row) -> list[Stat]:
    def before(text: str) -> str | None:
        return text if taken is not reference else None

    assert reference.pace is not None
    assert taken.pace is not None
    stats = [
        Stat("A step", ms(taken.pace.median), before(ms(reference.pace.median))),
        Stat(
            f"{result.unit} a second".capitalize(),
            number(taken.per_s),
            before(number(reference.per_s)),
        ),
    ]
    if reference.gpu is not None and taken.gpu is not None:
        note = None
        if taken.gpu.over_busy_share is not None:
            note = f"a step is {share(max(0.0, taken.gpu.over_busy_share))} over its own work"
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
        warnings.append("the measurement was interrupted; this is what there was by then")
    for row in result.rows:
        if row.error is not None:
            warnings.append(f"{row.plan} failed: {row.error}")
        elif row.equal is not None and row.equal.verdict == "unequal":
            step = "" if row.equal.first_step is None else f" from step {row.equal.first_step} on"
            why = f": {row.equal.why}" if row.equal.why else ""
            warnings.append(
                f"{row.plan} does not compute the same: its losses differ{step}, by up to "
                f"{number(row.equal.largest)}{why}"
            )
    return warnings
