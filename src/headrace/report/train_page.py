"""The page of a training run: what it came to, how it got there, and what the GPU did meanwhile."""

from __future__ import annotations

from collections.abc import Callable

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
from headrace.report.environment import settings_list
from headrace.report.figures import clock, counted, number, score, seconds, share, size, words
from headrace.report.lines import Axis, Line, line_chart, line_legend
from headrace.report.markup import Child, Markup, tag
from headrace.report.page import Section, Stat, Verdict, page
from headrace.report.thinning import spread
from headrace.runs.records import TrainingRun, UseLine

_EPOCHS_SHOWN = 100
#: A chart's title, what it shows, how that is written, the top of its scale.
_Sensor = tuple[str, Callable[[UseLine], float | None], Callable[[float], str], float | None]


def train_page(run: TrainingRun, source: str) -> str:
    settings = run.settings
    pair = f"{settings.get('src', '?')} → {settings.get('trg', '?')}"
    told = f"{settings.get('preset', '')} model, plan {settings.get('plan', '?')}"
    kicker = " · ".join(("training run", run.path.name, pair, told))
    sections = [
        _losses_section(run),
        _bleu_section(run),
        _speed_section(run),
        _waits_section(run),
        _use_section(run),
        _busy_section(run),
        _examples_section(run),
        _epochs_section(run),
        _files_section(run),
        Section("settings", "Settings", "As in config.yaml.", settings_list(settings)),
    ]
    return page(kicker, train_verdict(run), sections, source)


def train_verdict(run: TrainingRun) -> Verdict:
    last = run.epochs[-1] if run.epochs else None
    sentences = []
    if last is not None and last.data_wait_share is not None:
        sentences.append(_feeding_words(last.data_wait_share, last.host_blocked_share))
    if run.busy is not None and run.busy.busy_share is not None:
        sentences.append(
            f"In a profiler window the GPU was busy {share(run.busy.busy_share)} of the time."
        )
    done = counted(run.updates, "update")
    if run.finished is not None:
        final = run.finished.scores
        figure, label = score(final.bleu), f"BLEU, chrF {score(final.chrf)}"
        headline = f"BLEU {score(final.bleu)} after {counted(len(run.epochs), 'epoch')}, {done}"
    else:
        sentences.append(f"Go on with: headrace train --resume {run.path}")
        headline = (
            f"Not finished: {done} so far" if run.updates else "Not begun: nothing measured yet"
        )
        if last is not None and last.bleu is not None:
            figure, label = score(last.bleu), "BLEU on a sample of valid"
        else:
            loss = last.loss if last is not None else run.steps[-1].loss if run.steps else None
            figure, label = number(loss), "loss"
    return Verdict(headline, figure, label, sentences, _stats(run))


def _feeding_words(data: float, blocked: float | None) -> str:
    if data > 0.1:
        return (
            f"The loop stood still for data {share(data)} of the last epoch: more loading workers "
            "(--workers) would make it faster."
        )
    if blocked is None:
        return (
            f"Data was there when it was needed: {share(data)} of the last epoch went on waiting."
        )
    return (
        f"Data was there when it was needed ({share(data)} of the last epoch went on waiting); the "
        f"host waited for the device {share(blocked)} of the time."
    )


def _stats(run: TrainingRun) -> list[Stat]:
    if not run.epochs:
        return []
    last = run.epochs[-1]
    stats = [Stat("Loss, last epoch", number(last.loss))]
    if last.valid_loss is not None:
        stats.append(Stat("Valid loss", number(last.valid_loss)))
    if last.tokens_per_s is not None:
        stats.append(Stat("Tokens a second", number(last.tokens_per_s)))
    if last.data_wait_share is not None:
        stats.append(Stat("Waiting for data", share(last.data_wait_share)))
    if run.busy is not None and run.busy.busy_share is not None:
        stats.append(Stat("GPU busy", share(run.busy.busy_share)))
    if last.peak_memory_bytes:
        stats.append(Stat("Peak memory", size(last.peak_memory_bytes)))
    if run.uses:
        stats.append(Stat("Watched for", seconds(run.uses[-1].at_s)))
    return stats


def _losses_section(run: TrainingRun) -> Section:
    title, anchor = "Losses", "losses"
    running = [(float(line.step), line.loss) for line in run.steps if line.loss is not None]
    trained = [(float(epoch.step), epoch.loss) for epoch in run.epochs if epoch.loss is not None]
    valid = [
        (float(epoch.step), epoch.valid_loss)
        for epoch in run.epochs
        if epoch.valid_loss is not None
    ]
    lines = [
        Line("train, mean of the epoch so far", running, 0, 1.5),
        Line("train, whole epoch", trained, 2, dots=True),
        Line("valid", valid, 1, dots=True),
    ]
    lines = [line for line in lines if line.points]
    if not lines:
        return Section(anchor, title, "", empty("metrics.jsonl holds no losses yet."))
    words_ = f"{number(lines[-1].points[-1][1])} at the end"
    if valid:
        words_ += f" on valid, {number(min(value for _, value in valid))} at its best"
    words_ += "."
    chart = line_chart(
        lines, label=f"Losses over updates. {words_}", x=Axis("update", low=0.0), y=Axis("loss")
    )
    content: list[Child] = [line_legend(lines), chart]
    timed = [Line(line.name, _timed(run, line), line.look, line.width, line.dots) for line in lines]
    timed = [line for line in timed if len(line.points) > 1]
    if timed:
        over_time = line_chart(
            timed, label="The same over time", x=Axis("time", 0.0, written=clock), y=Axis("loss")
        )
        content += [tag("h3", "Over time"), over_time]
    content.append(as_table("As a table", _epochs_table(run, ("loss", "valid loss"))))
    return Section(anchor, title, words_, tag("figure", content, class_="chart"))


def _timed(run: TrainingRun, line: Line) -> list[tuple[float, float]]:
    points = [line.points[at] for at in spread(len(line.points), 400)]
    found = [(run.seconds_at(round(step)), value) for step, value in points]
    return [(at, value) for at, value in found if at is not None]


def _bleu_section(run: TrainingRun) -> Section:
    title, anchor = "BLEU", "bleu"
    points = [(float(epoch.step), epoch.bleu) for epoch in run.epochs if epoch.bleu is not None]
    if not points:
        return Section(
            anchor,
            title,
            "",
            empty("No epoch was scored: valid_sentences is 0, or none ended yet."),
        )
    lead = (
        f"On a sample of held-out sentences, translated greedily after each epoch: best "
        f"{score(max(value for _, value in points))}."
    )
    if run.finished is not None:
        final = run.finished.scores
        lead += f" At the end, with beam search: {score(final.bleu)}. {final.bleu_signature}"
    chart = line_chart(
        [Line("BLEU", points, 2, dots=True)],
        label=lead,
        x=Axis("update", low=0.0),
        y=Axis("BLEU", low=0.0),
    )
    return Section(anchor, title, lead, tag("figure", chart, class_="chart"))


def _speed_section(run: TrainingRun) -> Section:
    title, anchor = "Tokens a second", "speed"
    points = [(float(e.step), e.tokens_per_s) for e in run.epochs if e.tokens_per_s is not None]
    if not points:
        return Section(anchor, title, "", empty("No epoch has ended yet."))
    chart = line_chart(
        [Line("tokens a second", points, 0, dots=True)],
        label=f"Tokens a second of each epoch, last {number(points[-1][1])}",
        x=Axis("update", low=0.0),
        y=Axis("tokens a second", low=0.0),
    )
    lead = "Target tokens trained on, a second of each epoch's wall time."
    return Section(anchor, title, lead, tag("figure", chart, class_="chart"))


def _waits_section(run: TrainingRun) -> Section:
    title, anchor = "What the host waited for", "waits"
    totals: dict[str, float] = {}
    for epoch in run.epochs:
        for reason, count in epoch.waits.items():
            totals[reason] = totals.get(reason, 0.0) + count
    shares = [
        Line(
            "for data",
            [
                (float(e.step), e.data_wait_share)
                for e in run.epochs
                if e.data_wait_share is not None
            ],
            1,
            dots=True,
        ),
        Line(
            "for the device",
            [
                (float(e.step), e.host_blocked_share)
                for e in run.epochs
                if e.host_blocked_share is not None
            ],
            3,
            dots=True,
        ),
    ]
    shares = [line for line in shares if line.points]
    if not shares and not totals:
        return Section(anchor, title, "", empty("No epoch has ended yet."))
    content: list[Child] = []
    if shares:
        most = max(value for line in shares for _, value in line.points)
        chart = line_chart(
            shares,
            label="Share of each epoch in which the host waited",
            x=Axis("update", low=0.0),
            y=Axis("share of the epoch", 0.0, max(0.05, min(1.0, most * 1.1)), share),
        )
        content += [line_legend(shares), chart]
    if totals:
        ordered = sorted(totals.items(), key=lambda entry: -entry[1])
        rows = [
            Bar(
                words(reason),
                [Segment(count, f"reason-{index % 8}", reason)],
                [tag("b", f"{count:,.0f}"), f" {number(count / max(1, run.updates))} an update"],
                f"{words(reason)}: {count:,.0f} times",
            )
            for index, (reason, count) in enumerate(ordered)
        ]
        most = max(totals.values())
        content += [
            tag("h3", "How often, by reason"),
            bars(rows, label="Host waits by reason", most=most, unit=""),
        ]
    lead = "The share of each epoch in which the Python thread stood still, and how often it asked."
    return Section(anchor, title, lead, tag("figure", content, class_="chart"))


def _use_section(run: TrainingRun) -> Section:
    title, anchor = "Use over time", "use"
    shown: list[_Sensor] = [
        ("GPU use, by NVML", lambda use: use.gpu_share, share, 1.0),
        ("CPU cores in use", lambda use: use.cpu_share, number, None),
        ("CPU cores of the loading workers", lambda use: use.workers_cpu_share, number, None),
        ("GPU memory", lambda use: use.gpu_memory_bytes, size, None),
        ("GPU power", lambda use: use.power_w, lambda watts: f"{watts:,.0f} W", None),
        ("Host memory", lambda use: use.host_memory_bytes, size, None),
    ]
    charts = []
    for name, value, written, most in shown:
        points = [(use.at_s, found) for use in run.uses if (found := value(use)) is not None]
        if points:
            charts.append(_use_chart(name, points, written, most))
    if not charts:
        why = "The monitor wrote no samples into metrics.jsonl."
        return Section(anchor, title, "", empty(why))
    return Section(
        anchor,
        title,
        "What the monitor saw, over seconds of training.",
        tag("div", charts, class_="multiples"),
    )


def _use_chart(
    name: str,
    points: list[tuple[float, float]],
    written: Callable[[float], str],
    most: float | None,
) -> Markup:
    mean = sum(value for _, value in points) / len(points)
    high = most or max(value for _, value in points) * 1.1 or 1.0
    chart = line_chart(
        [Line(name, points, 0, 1.5, area=True)],
        label=f"{name} over time: mean {written(mean)}",
        x=Axis("time", 0.0, written=clock),
        y=Axis("", 0.0, high, written),
        small=True,
    )
    told = written(mean).replace(" ", "\N{NO-BREAK SPACE}")
    return tag("figure", tag("figcaption", tag("b", name), f" mean {told}"), chart)


def _busy_section(run: TrainingRun) -> Section:
    title, anchor = "What the GPU did", "gpu"
    busy = run.busy
    if busy is None or busy.busy_share is None:
        why = "No profiler window was recorded: there is none on a CPU."
        return Section(anchor, title, "", empty(why))
    compute = min(busy.busy_share, busy.compute_share or 0.0)
    alone, idle = busy.busy_share - compute, max(0.0, 1.0 - busy.busy_share)
    parts = [
        ("compute", "computing", compute),
        ("copy", "copying alone", alone),
        ("idle", "idle", idle),
    ]
    row = Bar(
        f"from update {busy.step:,}",
        [Segment(value * 100, look, name) for look, name, value in parts],
        [tag("b", share(busy.busy_share)), " busy"],
        "; ".join(f"{name} {share(value)}" for _, name, value in parts),
    )
    content: list[Child] = [
        legend((look, name) for look, name, _ in parts),
        bars([row], label="GPU use in the profiler window", most=100, unit="%"),
    ]
    if busy.streams:
        body: list[Cells] = [
            [
                stream.name,
                Cell(meter(stream.busy_share, share(stream.busy_share)), stream.busy_share),
                Cell(number(stream.kernels_per_step), stream.kernels_per_step),
                Cell(number(stream.copies_per_step), stream.copies_per_step),
            ]
            for stream in busy.streams
        ]
        content.append(
            table(
                f"Streams; two or more ran at once {share(busy.overlap_share)} of the time",
                ("stream", "busy", "kernels a step", "copies a step"),
                body,
            )
        )
    steps = "a few steps" if busy.steps is None else f"{busy.steps} steps"
    lead = f"From a profiler window over {steps}: the share of wall time in which something ran."
    return Section(anchor, title, lead, tag("figure", content, class_="chart"))


def _examples_section(run: TrainingRun) -> Section:
    title, anchor = "Translations", "examples"
    if run.finished is None or not run.finished.examples:
        why = "There are none before the run is finished."
        return Section(anchor, title, "", empty(why))
    src, trg = (str(run.settings.get(side, "")) for side in ("src", "trg"))
    entries = [
        tag(
            "div",
            tag("dt", "source"),
            tag("dd", source, lang=src or None),
            tag("dt", "reference"),
            tag("dd", reference, lang=trg or None),
            tag("dt", "translation"),
            tag("dd", tag("b", found), lang=trg or None),
        )
        for source, reference, found in run.finished.examples
    ]
    lead = "Sentences that the model never saw."
    return Section(anchor, title, lead, tag("dl", entries, class_="pairs"))


def _epochs_section(run: TrainingRun) -> Section:
    if not run.epochs:
        return Section("epochs", "Epochs", "", empty("No epoch has ended yet."))
    columns = (
        *("loss", "valid loss", "bleu", "tokens per s", "data wait share", "host blocked share"),
        "peak memory bytes",
    )
    return Section("epochs", "Epochs", "", _epochs_table(run, columns))


def _epochs_table(run: TrainingRun, columns: tuple[str, ...]) -> Markup:
    chosen = spread(len(run.epochs), _EPOCHS_SHOWN)
    caption = (
        "Each epoch"
        if len(chosen) == len(run.epochs)
        else f"{len(chosen)} of {len(run.epochs):,} epochs"
    )
    body = []
    for index in chosen:
        epoch = run.epochs[index]
        cells: list[Cell | Child] = [f"{epoch.epoch + 1}", f"{epoch.step:,}"]
        for column in columns:
            value = getattr(epoch, column.replace(" ", "_"))
            if column == "peak memory bytes":
                value = value or None  # 0 on a CPU, where nothing counts it
            written = share if "share" in column else size if "bytes" in column else number
            cells.append(Cell(written(value), value))
        body.append(cells)
    return table(caption, ("epoch", "updates", *columns), body)


def _files_section(run: TrainingRun) -> Section:
    if not run.weights:
        return Section("weights", "Weights", "", empty("None were written yet."))
    body: list[Cells] = [
        [str(run.path / name), Cell(size(bytes_), float(bytes_))] for name, bytes_ in run.weights
    ]
    lead = (
        "With these and the vocabularies beside them the folder translates: headrace translate RUN."
    )
    return Section("weights", "Weights", lead, table("Files of weights", ("file", "size"), body))
