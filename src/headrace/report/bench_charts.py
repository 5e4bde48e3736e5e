"""The charts of a bench result, each with its words and its table."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.report.bench_labels import mark, plan_label, unseen
from headrace.report.bench_result import BenchResult, Row
from headrace.report.charts import Bar, Cell, Segment, as_table, bars, empty, legend, meter, table
from headrace.report.figures import brief, ms, number, share, times, words
from headrace.report.markup import tag
from headrace.report.page import Section
from headrace.report.timelines import timelines

_REASON_LOOKS = 8
#: Reasons of the engine's own waits, in words.
_REASONS = {
    "sync": "the plan waits for the device",
    "run_ahead": "the host is far enough ahead",
    "data": "the loader has no batch yet",
    "copy": "a copy in line",
    "pageable_copy": "a copy from memory that is not pinned",
    "losses": "a loss is read",
}


def speed_section(result: BenchResult) -> Section:
    measured = [row for row in result.rows if row.pace is not None]
    most = max((row.pace.high for row in measured if row.pace is not None), default=1.0)
    rows = [_pace_bar(result, row) for row in result.rows]
    seen = any(_busy_ms(row) is not None for row in measured)
    lead = (
        "How long one step takes: the filled part is the GPU at work, the hatched part is the GPU "
        "waiting to be fed. The thin line spans all repeats."
        if seen
        else "How long one step takes; the thin line spans all repeats. "
        + unseen(result, "how much of it a GPU was at work")
    )
    looks = [("compute", "GPU at work"), ("idle", "GPU waiting")] if seen else [("plain", "a step")]
    columns = ("plan", "median ms", "lowest", "highest", "repeats", "GPU's own ms", "speed")
    details = table(
        "Milliseconds a step",
        columns,
        [
            [
                row.plan,
                *(
                    [
                        Cell(number(value), value)
                        for value in (row.pace.median, row.pace.low, row.pace.high)
                    ]
                    + [", ".join(number(value) for value in row.pace.repeats) or "–"]
                    if row.pace is not None
                    else [row.error or "not measured", "–", "–", "–"]
                ),
                Cell(number(_busy_ms(row)), _busy_ms(row)),
                Cell(times(row.speedup), row.speedup),
            ]
            for row in result.rows
        ],
    )
    chart = bars(rows, label="Milliseconds a step of each plan", most=most, unit="ms")
    content = [legend(looks), chart, as_table("As a table", details)]
    return Section("speed", "Time a step", lead, tag("figure", content, class_="chart"))


def _pace_bar(result: BenchResult, row: Row) -> Bar:
    label = plan_label(result, row)
    if row.pace is None:
        why = row.error or "not measured"
        failed = tag("span", "failed" if row.error else "not measured", class_="failed")
        return Bar(label, [], failed, f"{row.plan}: {why}", mark="is-failed")
    busy = _busy_ms(row)
    median = row.pace.median
    if busy is None:
        segments = [Segment(median, "plain", "a step")]
    else:
        busy = min(busy, median)
        segments = [Segment(busy, "compute", "at work"), Segment(median - busy, "idle", "waiting")]
    tip = (
        f"{row.plan}: {ms(median)} a step, {number(row.pace.low)} to {ms(row.pace.high)} over "
        f"{len(row.pace.repeats) or 1} repeats"
    )
    if busy is not None:
        tip += f"; the GPU works for {ms(busy)} of it"
    if row.speedup is not None:
        tip += f"; {times(row.speedup)}"
    value = [tag("b", ms(median)), " ", tag("span", times(row.speedup), class_="times")]
    return Bar(label, segments, value, tip, row.pace.low, row.pace.high, mark(result, row))


def gpu_section(result: BenchResult) -> Section:
    title, anchor = "What the GPU did", "gpu"
    seen = [row for row in result.rows if row.gpu is not None and row.gpu.busy_share is not None]
    if not seen:
        why = unseen(result, "what a GPU did: no profiler window was recorded")
        return Section(anchor, title, "", empty(why))
    rows = []
    for row in seen:
        busy, compute, idle = _shares(row)
        tip = (
            f"{row.plan}: computing {share(compute)}, copying alone {share(busy - compute)}, "
            f"idle {share(idle)} of the time"
        )
        segments = [
            Segment(compute, "compute", "computing"),
            Segment(busy - compute, "copy", "copying alone"),
            Segment(idle, "idle", "idle"),
        ]
        value = [tag("b", share(busy)), " busy"]
        rows.append(Bar(plan_label(result, row), segments, value, tip, mark=mark(result, row)))
    details = table(
        "Shares of wall time, from a profiler window, and what NVML said",
        (
            "plan",
            "busy",
            "computing",
            "copying",
            "idle",
            "NVML",
            "launches a step",
            "over its own work",
        ),
        [
            [
                row.plan,
                *(
                    Cell(share(value), value)
                    for value in (
                        *(row.gpu.busy_share, row.gpu.compute_share, row.gpu.copy_share),
                        *(row.gpu.idle_share, row.nvml_share),
                    )
                ),
                Cell(number(row.gpu.launches_per_step), row.gpu.launches_per_step),
                Cell(share(row.gpu.over_busy_share), row.gpu.over_busy_share),
            ]
            for row in seen
            if row.gpu is not None
        ],
    )
    lead = (
        "Shares of wall time in which at least one kernel or copy ran, from a profiler window. "
        "NVML's own figure, in the table, only says that something ran in each of its samples."
    )
    looks = [("compute", "computing"), ("copy", "copying alone"), ("idle", "idle")]
    chart = bars([_percent(row) for row in rows], label="GPU use of each plan", most=100, unit="%")
    content = [legend(looks), chart, as_table("As a table", details)]
    return Section(anchor, title, lead, tag("figure", content, class_="chart"))


def timelines_section(result: BenchResult) -> Section:
    found = [(row.plan, row.timeline) for row in result.rows if row.timeline is not None]
    title = "Timelines"
    if not found:
        why = unseen(result, "when each kernel and copy ran: no timeline was recorded")
        return Section("timelines", title, "", empty(why))
    lead = (
        "A few steps of each plan on one time scale. A lane's level is the share of that moment in "
        "which it had something to do: half full is half idle. Click a timeline, then use the "
        "wheel or + and −; arrow keys go from one kernel to the next; drag to move."
    )
    without = [row.plan for row in result.rows if row.timeline is None]
    note = tag("p", f"No timeline of {', '.join(without)}.", class_="empty") if without else None
    looks = [
        ("kernel", "kernels"),
        ("copy", "copies"),
        ("wait", "the host waits"),
        ("host", "the host works"),
    ]
    return Section("timelines", title, lead, [legend(looks), timelines(found), note])


def waits_section(result: BenchResult) -> Section:
    title, anchor = "What the host waited for", "waits"
    rows = [row for row in result.rows if row.waits is not None]
    if not rows:
        return Section(anchor, title, "", empty("No waits were recorded."))
    reasons = _reasons(rows)
    looks = {reason: f"reason-{at % _REASON_LOOKS}" for at, reason in enumerate(reasons)}
    drawn = []
    for row in rows:
        assert row.waits is not None
        found = row.waits.by_reason
        segments = [
            Segment(found[reason][1], looks[reason], words(reason))
            for reason in reasons
            if reason in found
        ]
        total = sum(segment.value for segment in segments)
        listed = ", ".join(f"{segment.label} {ms(segment.value)}" for segment in segments)
        tip = f"{row.plan}: {listed or 'never'}; {number(row.waits.per_step)} waits a step"
        value = [tag("b", ms(total)), f" {brief(row.waits.per_step)} a step"]
        drawn.append(Bar(plan_label(result, row), segments, value, tip, mark=mark(result, row)))
    most = max((sum(s.value for s in bar.segments) for bar in drawn), default=1.0)
    details = table(
        "Host waits a step by reason: how many, and milliseconds",
        ("plan", *(words(reason) for reason in reasons), "all", "host blocked ms", "data ms"),
        [
            [
                row.plan,
                *(_wait_cell(row.waits.by_reason.get(reason)) for reason in reasons),
                Cell(number(row.waits.per_step), row.waits.per_step),
                Cell(number(row.host_blocked_ms), row.host_blocked_ms),
                Cell(number(row.data_wait_ms), row.data_wait_ms),
            ]
            for row in rows
            if row.waits is not None
        ],
    )
    entries = [
        (
            looks[reason],
            f"{words(reason)}: {_REASONS[reason]}" if reason in _REASONS else words(reason),
        )
        for reason in reasons
    ]
    lead = (
        "Milliseconds of each step in which the Python thread stood still, by reason, as the "
        "ledger counted them. A plan may wait less and not be faster: what counts is what the "
        "GPU does."
    )
    chart = bars(drawn, label="Host waits of each plan by reason", most=most, unit="ms")
    content = [legend(entries), chart, as_table("As a table", details)]
    return Section(anchor, title, lead, tag("figure", content, class_="chart"))


def _reasons(rows: Sequence[Row]) -> list[str]:
    """All reasons, the costliest first."""
    costs: dict[str, float] = {}
    for row in rows:
        for reason, (_, wait_ms) in (row.waits.by_reason if row.waits else {}).items():
            costs[reason] = costs.get(reason, 0.0) + wait_ms
    return sorted(costs, key=lambda reason: (-costs[reason], reason))


def _wait_cell(found: tuple[float, float] | None) -> Cell:
    if found is None:
        return Cell("–")
    return Cell(f"{number(found[0])} × · {ms(found[1])}", found[1])


def streams_section(result: BenchResult) -> Section:
    title, anchor = "Streams", "streams"
    rows = [row for row in result.rows if row.streams]
    if not rows:
        why = unseen(result, "what each stream did")
        return Section(anchor, title, "", empty(why))
    body = [
        [
            plan_label(result, row) if index == 0 else tag("span", row.plan, class_="again"),
            stream.name,
            Cell(meter(stream.busy_share, share(stream.busy_share)), stream.busy_share),
            Cell(number(stream.kernels_per_step), stream.kernels_per_step),
            Cell(number(stream.copies_per_step), stream.copies_per_step),
            Cell(meter(row.overlap_share, share(row.overlap_share), "copy"), row.overlap_share)
            if index == 0
            else "",
        ]
        for row in rows
        for index, stream in enumerate(row.streams)
    ]
    columns = ("plan", "stream", "busy", "kernels a step", "copies a step", "two or more at once")
    lead = "How busy each stream was, and the share of wall time in which two or more ran at once."
    drawn = table("Streams of each plan", columns, body, class_="streams")
    return Section(anchor, title, lead, drawn)


def _busy_ms(row: Row) -> float | None:
    return None if row.gpu is None else row.gpu.busy_ms_per_step


def _shares(row: Row) -> tuple[float, float, float]:
    """(busy, computing, idle) in percent: together no more than 100."""
    assert row.gpu is not None
    busy = min(1.0, max(0.0, row.gpu.busy_share or 0.0))
    compute = busy if row.gpu.compute_share is None else min(busy, max(0.0, row.gpu.compute_share))
    return busy, compute, 1.0 - busy


def _percent(bar: Bar) -> Bar:
    segments = [Segment(part.value * 100, part.look, part.label) for part in bar.segments]
    return Bar(bar.label, segments, bar.value, bar.tip, mark=bar.mark)
