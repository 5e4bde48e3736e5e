"""The page of a bench result: the verdict, then what it rests on, section by section."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.report.charts import (
    Bar,
    Cell,
    Cells,
    Segment,
    as_table,
    bars,
    empty,
    legend,
    meter,
    table,
)
from headrace.report.environment import (
    bullets,
    command_block,
    machine_list,
    recorded,
    settings_list,
)
from headrace.report.figures import (
    brief,
    clock,
    factor,
    moment,
    ms,
    number,
    plain,
    share,
    size,
    times,
    words,
)
from headrace.report.lines import Axis, Line, line_chart, line_legend
from headrace.report.markup import Child, Markup, tag
from headrace.report.page import Section, Stat, Verdict, page
from headrace.report.thinning import spread
from headrace.report.timelines import timelines
from headrace.runs.records import WEIGHTS, BenchResult, PlanResult, Sample, WaitFigures

#: Below this the difference is not worth a sentence.
_NOTHING = 0.02
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
#: The monitor's sensors: name, what it reads, how that is written, the top of its scale.
_Sensor = tuple[str, Callable[[Sample], float | None], Callable[[float], str], float | None]
_SENSORS: tuple[_Sensor, ...] = (
    ("GPU use, by NVML", lambda sample: sample.gpu_share, share, 1.0),
    ("CPU cores", lambda sample: sample.cpu_share, number, None),
    ("GPU power", lambda sample: sample.power_w, lambda watts: f"{watts:,.0f} W", None),
    ("GPU memory", lambda sample: sample.gpu_memory_bytes, size, None),
)


def bench_page(result: BenchResult, source: str) -> str:
    environment = result.environment
    device = environment.device_name or environment.device
    date = moment(environment.date or None)
    work = ": ".join(dict.fromkeys(filter(None, (result.work.name, result.work.description))))
    kicker = " · ".join(filter(None, ("bench", work, device, date)))
    sections = [
        _speed_section(result),
        _gpu_section(result),
        _timelines_section(result),
        _losses_section(result),
        _waits_section(result),
        _use_section(result),
        _streams_section(result),
        _score_section(result),
        _rows_section(result),
        _plans_section(result),
        _environment_section(result),
    ]
    return page(kicker, _bench_verdict(result), sections, source)


def _bench_verdict(result: BenchResult) -> Verdict:
    """What to take, and by how much it is better."""
    reference, taken = result.reference, result.taken
    warnings = _warnings(result)
    sentences = result.verdict.sentences
    if reference is None or reference.ms_per_step is None:
        return Verdict("No plan could be measured", "–", "ms a step", sentences, [], warnings)
    if taken is None or taken.ms_per_step is None:
        taken = reference
    assert taken.ms_per_step is not None
    gain = reference.ms_per_step.median / taken.ms_per_step.median
    if taken is reference or abs(gain - 1) < _NOTHING:
        headline = f"Nothing to gain: no plan is clearly faster than {reference.plan}"
    else:
        headline = f"Take {taken.plan}: {factor(gain)} times as fast, {_equal_words(taken)}"
    label = f"the speed of {reference.plan}" if taken is not reference else "so stay with it"
    return Verdict(
        headline, times(gain), label, sentences, _stats(result, reference, taken), warnings
    )


def _equal_words(row: PlanResult) -> str:
    return {
        "reference": "and what the others are compared with",
        "identical": "with the very same losses",
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
            f"{result.work.unit} a second".capitalize(),
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
        elif row.equal.verdict == "unequal":
            step = "" if row.equal.first_step is None else f" from step {row.equal.first_step} on"
            why = f": {row.equal.why}" if row.equal.why else ""
            warnings.append(
                f"{row.plan} does not compute the same: its losses differ{step}, by up to "
                f"{number(row.equal.largest)}{why}"
            )
    return warnings


def _speed_section(result: BenchResult) -> Section:
    measured = [row for row in result.rows if row.ms_per_step is not None]
    most = max(
        (row.ms_per_step.high for row in measured if row.ms_per_step is not None), default=1.0
    )
    rows = [_pace_bar(result, row) for row in result.rows]
    seen = any(_busy_ms(row) is not None for row in measured)
    lead = (
        "How long one step takes: the filled part is the GPU at work, the hatched part is the GPU "
        "waiting to be fed. The thin line spans all repeats."
        if seen
        else "How long one step takes; the thin line spans all repeats. "
        + _unseen(result, "how much of it a GPU was at work")
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
                        for value in (
                            row.ms_per_step.median,
                            row.ms_per_step.low,
                            row.ms_per_step.high,
                        )
                    ]
                    + [", ".join(number(value) for value in row.ms_per_step.repeats) or "–"]
                    if row.ms_per_step is not None
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


def _pace_bar(result: BenchResult, row: PlanResult) -> Bar:
    label = _plan_label(result, row)
    if row.ms_per_step is None:
        why = row.error or "not measured"
        failed = tag("span", "failed" if row.error else "not measured", class_="failed")
        return Bar(label, [], failed, f"{row.plan}: {why}", mark="is-failed")
    busy = _busy_ms(row)
    median, low, high = row.ms_per_step.median, row.ms_per_step.low, row.ms_per_step.high
    if busy is None:
        segments = [Segment(median, "plain", "a step")]
    else:
        busy = min(busy, median)
        segments = [Segment(busy, "compute", "at work"), Segment(median - busy, "idle", "waiting")]
    tip = (
        f"{row.plan}: {ms(median)} a step, {number(low)} to {ms(high)} over "
        f"{len(row.ms_per_step.repeats) or 1} repeats"
    )
    if busy is not None:
        tip += f"; the GPU works for {ms(busy)} of it"
    if row.speedup is not None:
        tip += f"; {times(row.speedup)}"
    value = [tag("b", ms(median)), " ", tag("span", times(row.speedup), class_="times")]
    return Bar(label, segments, value, tip, low, high, _mark(result, row))


def _gpu_section(result: BenchResult) -> Section:
    title, anchor = "What the GPU did", "gpu"
    seen = [row for row in result.rows if row.gpu is not None and row.gpu.busy_share is not None]
    if not seen:
        why = _unseen(result, "what a GPU did: no profiler window was recorded")
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
        rows.append(Bar(_plan_label(result, row), segments, value, tip, mark=_mark(result, row)))
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


def _timelines_section(result: BenchResult) -> Section:
    found = result.timelines
    title = "Timelines"
    if not found:
        why = _unseen(result, "when each kernel and copy ran: no timeline was recorded")
        return Section("timelines", title, "", empty(why))
    lead = (
        "A few steps of each plan on one time scale. A lane's level is the share of that moment in "
        "which it had something to do: half full is half idle. Click a timeline, then use the "
        "wheel or + and −; arrow keys go from one kernel to the next; drag to move."
    )
    drawn = {plan for plan, _ in found}
    without = [row.plan for row in result.rows if row.plan not in drawn]
    note = tag("p", f"No timeline of {', '.join(without)}.", class_="empty") if without else None
    looks = [
        ("kernel", "kernels"),
        ("copy", "copies"),
        ("wait", "the host waits"),
        ("host", "the host works"),
    ]
    return Section("timelines", title, lead, [legend(looks), timelines(found), note])


def _losses_section(result: BenchResult) -> Section:
    title, anchor = "The same losses", "losses"
    lines, differences = _loss_lines(result)
    if not lines:
        return Section(anchor, title, "", empty("No losses were recorded, so none are compared."))
    reference = next((row for row in result.rows if _is_reference(result, row)), result.rows[0])
    chart = line_chart(
        lines,
        label=f"Losses of {len(lines)} plans, laid over each other. {_equality_words(result)}",
        x=Axis("step"),
        y=Axis("loss"),
    )
    content: list[Child] = [line_legend(lines), chart]
    if differences:
        content += [
            tag("h3", f"Difference from {reference.plan}"),
            line_legend(differences),
            line_chart(
                differences,
                label="Each plan's loss minus the reference's",
                x=Axis("step"),
                y=Axis("loss − reference", written=brief),
            ),
        ]
    content.append(as_table("As a table", _losses_table(result)))
    content.append(as_table("How they compare", _equality_table(result)))
    figure = tag("figure", content, class_="chart")
    return Section(anchor, title, _equality_words(result), figure)


def _loss_lines(result: BenchResult) -> tuple[list[Line], list[Line]]:
    """The losses of each plan, and how far they are from the reference's where they are."""
    rows = [row for row in result.rows if any(loss is not None for loss in row.losses)]
    base = next((row.losses for row in rows if _is_reference(result, row)), None)
    lines, differences = [], []
    for index, row in enumerate(rows):
        points = [(float(at), loss) for at, loss in enumerate(row.losses, 1) if loss is not None]
        strand = (index, len(rows)) if len(rows) > 1 else None
        lines.append(Line(row.plan, points, index, 4.0, strand=strand))
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
    said = []
    if same := by_verdict.get("identical"):
        said.append(f"{_names_of(same)} gave the reference's losses bit for bit.")
    if within := by_verdict.get("within"):
        worst = max(within, key=lambda row: row.equal.largest or 0.0)
        said.append(
            f"{_names_of(within)} stayed within the tolerance of {brief(worst.equal.tolerance)}; "
            f"the largest difference is {brief(worst.equal.largest)} ({worst.plan})."
        )
        said += [
            f"({row.plan}: {row.equal.why}.)" for row in within if row.equal.why and not row.is_peer
        ]
    for row in by_verdict.get("unequal", ()):
        step = "" if row.equal.first_step is None else f" at step {row.equal.first_step}"
        said.append(
            f"{row.plan} is not the same: it first differs{step}, by up to "
            f"{brief(row.equal.largest)}."
        )
    if apart := by_verdict.get("not compared"):
        said.append(f"{_names_of(apart)}: not compared.")
    return " ".join(said) or "Nothing was compared."


def _losses_table(result: BenchResult) -> Markup:
    rows = [row for row in result.rows if row.losses]
    steps = spread(max((len(row.losses) for row in rows), default=0), 50)
    return table(
        "Loss of each step" + ("" if len(steps) < 50 else " (a choice of 50 steps)"),
        ("step", *(row.plan for row in rows)),
        [
            [
                f"{step + 1}",
                *(
                    Cell(f"{loss:.6g}", loss) if loss is not None else "–"
                    for loss in (
                        row.losses[step] if step < len(row.losses) else None for row in rows
                    )
                ),
            ]
            for step in steps
        ],
    )


def _equality_table(result: BenchResult) -> Markup:
    return table(
        "How each plan's losses compare with the reference's",
        ("plan", "verdict", "largest difference", "tolerance", "first at step", "why"),
        [
            [
                row.plan,
                row.equal.verdict,
                Cell(brief(row.equal.largest), row.equal.largest),
                Cell(brief(row.equal.tolerance), row.equal.tolerance),
                "–" if row.equal.first_step is None else str(row.equal.first_step),
                row.equal.why or "–",
            ]
            for row in result.rows
        ],
    )


def _waits_section(result: BenchResult) -> Section:
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
            Segment(found[reason].ms_per_step, looks[reason], words(reason))
            for reason in reasons
            if reason in found
        ]
        total = sum(segment.value for segment in segments)
        listed = ", ".join(f"{segment.label} {ms(segment.value)}" for segment in segments)
        tip = f"{row.plan}: {listed or 'never'}; {number(row.waits.per_step)} waits a step"
        value = [tag("b", ms(total)), f" {brief(row.waits.per_step)} a step"]
        drawn.append(Bar(_plan_label(result, row), segments, value, tip, mark=_mark(result, row)))
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


def _use_section(result: BenchResult) -> Section:
    title, anchor = "Use over time", "use"
    rows = [row for row in result.rows if row.samples]
    seen = [sensor for sensor in _SENSORS if any(_points(row, sensor) for row in rows)]
    if not seen:
        why = "The monitor recorded no samples" if not rows else "No sensor could be read"
        return Section(anchor, title, "", empty(f"{why} here."))
    lead = "What the monitor saw while each plan ran."
    if _SENSORS[0] in seen:
        lead += (
            " NVML's GPU use says that something ran, not that the GPU was full: compare it with "
            "the shares above."
        )
    tops = {
        sensor[0]: sensor[3]
        or max(value for row in rows for _, value in _points(row, sensor)) * 1.1
        or 1.0
        for sensor in seen
    }
    drawn = [
        tag(
            "div",
            tag("h3", row.plan),
            [_use_chart(row, sensor, tops[sensor[0]]) for sensor in seen],
        )
        for row in rows
    ]
    return Section(
        anchor, title, lead, tag("div", tag("div", drawn, class_="matrix"), class_="chart")
    )


def _points(row: PlanResult, sensor: _Sensor) -> list[tuple[float, float]]:
    found = [(sample.at_s, sensor[1](sample)) for sample in row.samples]
    return [(at, value) for at, value in found if value is not None]


def _use_chart(row: PlanResult, sensor: _Sensor, top: float) -> Markup:
    name, _, written, _ = sensor
    points = _points(row, sensor)
    if not points:
        return tag("figure", tag("figcaption", f"{name}: not seen"))
    mean = sum(value for _, value in points) / len(points)
    chart = line_chart(
        [Line(name, points, 0, 1.5, area=True)],
        label=f"{name} of {row.plan} over time: mean {written(mean)}",
        x=Axis("time", 0.0, written=clock),
        y=Axis("", 0.0, top, written),
        small=True,
    )
    return tag("figure", tag("figcaption", f"{name}: mean {written(mean)}"), chart)


def _streams_section(result: BenchResult) -> Section:
    title, anchor = "Streams", "streams"
    rows = [row for row in result.rows if row.streams]
    if not rows:
        why = _unseen(result, "what each stream did")
        return Section(anchor, title, "", empty(why))
    body = [
        [
            _plan_label(result, row) if index == 0 else tag("span", row.plan, class_="again"),
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


def _score_section(result: BenchResult) -> Section:
    title, anchor = "Scores", "score"
    rows = [row for row in result.rows if row.score]
    if not rows:
        return Section(anchor, title, "", empty("This result holds no scores."))
    rows.sort(key=lambda row: -(row.score.total if row.score else 0.0))
    columns: list[Child] = ["plan", "total, of 100"]
    columns += [[name, " ", tag("small", f"of {weight}")] for name, weight in WEIGHTS.items()]
    body = [
        [
            _plan_label(result, row),
            _part(row, "total", 100, "plain"),
            *(_part(row, name, weight, "compute") for name, weight in WEIGHTS.items()),
        ]
        for row in rows
    ]
    lead = (
        "Each plan's score with six weights: what it gains and what memory it takes are measured "
        "here; effort, complexity, maintainability and risk are the plan's own. More is better."
    )
    return Section(anchor, title, lead, table("Scores, best first", columns, body, class_="scores"))


def _part(row: PlanResult, name: str, weight: float, look: str) -> Cell:
    value: float = getattr(row.score, name)
    return Cell(meter(value / weight, number(value), look), value)


def _rows_section(result: BenchResult) -> Section:
    columns = (
        *("plan", "ms a step", "speed", f"{result.work.unit} a second", "waits a step"),
        *("host blocked ms", "data ms", "GPU busy", "NVML", "CPU cores", "power W"),
        *("peak memory", "reserved", "over GPU's own", "two streams", "losses"),
    )
    body = [_all_of(result, row) for row in result.rows]
    lead = "Every row of the result. What stands as – could not be seen where it was measured."
    noted = [f"{row.plan}: {note}" for row in result.rows for note in row.notes]
    content = [table("All rows", columns, body, class_="wide"), bullets(noted)]
    return Section("rows", "All figures", lead, content)


def _all_of(result: BenchResult, row: PlanResult) -> list[Cell | Child]:
    gpu = row.gpu
    busy = None if gpu is None else gpu.busy_share
    over = None if gpu is None else gpu.over_busy_share
    median = None if row.ms_per_step is None else row.ms_per_step.median
    waits = None if row.waits is None else row.waits.per_step
    equal: Child = row.error or row.equal.verdict
    return [
        _plan_label(result, row),
        Cell(number(median), median),
        Cell(times(row.speedup), row.speedup),
        Cell(number(row.per_s), row.per_s),
        Cell(number(waits), waits),
        Cell(number(row.host_blocked_ms), row.host_blocked_ms),
        Cell(number(row.data_wait_ms), row.data_wait_ms),
        Cell(share(busy), busy),
        Cell(share(row.nvml_share), row.nvml_share),
        Cell(number(row.cpu_share), row.cpu_share),
        Cell(number(row.power_w), row.power_w),
        Cell(size(row.peak_memory_bytes), row.peak_memory_bytes),
        Cell(size(row.reserved_memory_bytes), row.reserved_memory_bytes),
        Cell(share(over), over),
        Cell(share(row.overlap_share), row.overlap_share),
        equal,
    ]


def _plans_section(result: BenchResult) -> Section:
    title, anchor = "Plans", "plans"
    rows = [(row.plan, row.fields) for row in result.rows if row.fields]
    names = list(dict.fromkeys(name for _, fields in rows for name in fields if name != "name"))
    differing = [name for name in names if len({plain(own.get(name)) for _, own in rows}) > 1]
    if not rows:
        return Section(anchor, title, "", empty("This result does not hold the plans' fields."))
    if not differing:
        return Section(anchor, title, "", empty("No field differs between the plans."))
    body: list[Cells] = []
    for name in differing:
        values = [plain(fields.get(name)) for _, fields in rows]
        cells = [Cell(value, look=None if value == values[0] else "changed") for value in values]
        body.append([name, *cells])
    lead = f"The fields in which the plans differ; bold is what differs from {rows[0][0]}."
    columns = ("field", *(plan for plan, _ in rows))
    return Section(anchor, title, lead, table("Fields that differ", columns, body, class_="plans"))


def _environment_section(result: BenchResult) -> Section:
    content = [
        command_block(result.environment.command),
        [tag("h3", "What could not be seen"), bullets(result.missing)] if result.missing else None,
        tag("h3", "Machine"),
        machine_list(result.environment),
        tag("h3", "Settings"),
        settings_list(recorded(result.settings) | result.work.options),
    ]
    return Section("environment", "How it was measured", "", content)


def _busy_ms(row: PlanResult) -> float | None:
    return None if row.gpu is None else row.gpu.busy_ms_per_step


def _shares(row: PlanResult) -> tuple[float, float, float]:
    """(busy, computing, idle) in percent: together no more than 100."""
    assert row.gpu is not None
    busy = min(1.0, max(0.0, row.gpu.busy_share or 0.0))
    compute = busy if row.gpu.compute_share is None else min(busy, max(0.0, row.gpu.compute_share))
    return busy, compute, 1.0 - busy


def _percent(bar: Bar) -> Bar:
    segments = [Segment(part.value * 100, part.look, part.label) for part in bar.segments]
    return Bar(bar.label, segments, bar.value, bar.tip, mark=bar.mark)


def _plan_label(result: BenchResult, row: PlanResult) -> Child:
    """The plan's name, with a word for those that matter, and for what its step lacked."""
    badge = None
    if row.plan == result.verdict.take:
        badge = "take this"
    elif _is_reference(result, row):
        badge = "before"
    elif row.is_peer:
        badge = "peer"
    badges = [] if badge is None else [tag("span", badge, class_=f"badge {badge.split()[0]}")]
    badges += [
        tag("span", word, class_="badge", title=why)
        for word, why in (("not compiled", row.not_compiled), ("not captured", row.not_captured))
        if why is not None
    ]
    return [row.plan, *([" ", each] for each in badges)] if badges else row.plan


def _is_reference(result: BenchResult, row: PlanResult) -> bool:
    reference = result.reference
    return reference is not None and row.plan == reference.plan


def _mark(result: BenchResult, row: PlanResult) -> str | None:
    return "is-taken" if row.plan == result.verdict.take else None


def _names_of(rows: Sequence[PlanResult]) -> str:
    names = [row.plan for row in rows]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _unseen(result: BenchResult, what: str) -> str:
    if not result.has_gpu:
        return f"Measured on the CPU, which cannot show {what.split(':')[0]}."
    return f"This result does not say {what}."
