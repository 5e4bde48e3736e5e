"""The values of a training run's page, `templates/train.html`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from headrace.records import EpochLine, TrainingRun
from headrace.report.charts import Bar, BarChart, Cell, Cells, Segment, Table, figure, meter, table
from headrace.report.environment import entries
from headrace.report.figures import number, score, seconds, share, size, words
from headrace.report.lines import Axis, Line, LineChart
from headrace.report.page import Stat, Summary, render_page
from headrace.report.sensors import (
    CPU_CORES,
    GPU_MEMORY,
    HOST_MEMORY,
    NVML,
    POWER,
    WORKER_CORES,
    sensor_table,
    sensor_view,
)
from headrace.report.thinning import Point, evenly_spaced
from headrace.text_table import counted

_MAX_EPOCHS = 100
_MAX_SAMPLED_EPOCHS = 5
_EARLY = {
    "time limit": "The time limit ended it before its last epoch; --resume trains on.",
    "patience": "It ended early, because its validation score did not get better (--patience).",
}
_REASON_LOOKS = 8
_SENSORS = (NVML, CPU_CORES, WORKER_CORES, GPU_MEMORY, POWER, HOST_MEMORY)
_UPDATES = Axis("update", low=0.0)
#: The columns of the table of epochs: heading, attribute of `EpochLine`, how a value is written.
_COLUMNS: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "loss": ("loss", number),
    "validation loss": ("valid_loss", number),
    "BLEU": ("bleu", score),
    "tokens/s": ("tokens_per_s", number),
    "data wait": ("data_wait_share", share),
    "device wait": ("host_blocked_share", share),
    "peak memory": ("peak_memory_bytes", size),
}


def train_page(run: TrainingRun, source: str) -> str:
    """The page of a training run."""
    settings = run.settings
    pair = f"{settings.get('src', '?')} → {settings.get('trg', '?')}"
    model = f"{settings.get('preset', '')} model, plan {settings.get('plan', '?')}"
    losses, use = _losses(run), _use(run)
    values = {
        "source": source,
        "kicker": " · ".join(("training run", run.path.name, pair, model)),
        "summary": _summary(run),
        "losses": losses,
        "bleu": _bleu(run),
        "speed": _speed(run),
        "waits": _waits(run),
        "use": use,
        "gpu": _gpu(run),
        "examples": run.finished.examples if run.finished is not None else (),
        "samples": _samples(run),
        "src": str(settings.get("src", "")),
        "trg": str(settings.get("trg", "")),
        "epochs": _epochs_table(run, _known_columns(run)) if run.epochs else None,
        "path": str(run.path),
        "weights": _weights(run),
        "run_settings": entries(settings),
    }
    has_lines = losses is not None or bool(run.epochs) or bool(use["charts"])
    return render_page("train.html", values, has_lines=has_lines)


def _summary(run: TrainingRun) -> Summary:
    last = run.epochs[-1] if run.epochs else None
    sentences = []
    if last is not None and last.data_wait_share is not None:
        sentences.append(_waiting_words(last.data_wait_share, last.host_blocked_share))
    if run.busy is not None and run.busy.busy_share is not None:
        sentences.append(
            f"In a profiler window the GPU was busy {share(run.busy.busy_share)} of the time."
        )
    done = counted(run.updates, "update")
    if run.finished is not None:
        final = run.finished.scores
        value, label = score(final.bleu), f"BLEU, chrF {score(final.chrf)}"
        headline = f"BLEU {score(final.bleu)} after {counted(len(run.epochs), 'epoch')}, {done}"
        if run.finished.ended_early in _EARLY:
            sentences.append(_EARLY[run.finished.ended_early])
    else:
        sentences.append(f"Continue with: headrace train --resume {run.path}")
        headline = (
            f"Not finished: {done} so far" if run.updates else "Not begun: nothing measured yet"
        )
        if last is not None and last.bleu is not None:
            value, label = score(last.bleu), "BLEU on a sample of validation sentences"
        else:
            loss = last.loss if last is not None else run.steps[-1].loss if run.steps else None
            value, label = number(loss), "loss"
    return Summary(headline, value, label, sentences, _stats(run))


def _waiting_words(data: float, blocked: float | None) -> str:
    if data > 0.1:
        return (
            f"The loop waited for data {share(data)} of the last epoch: more loader workers "
            "(--workers) would make it faster."
        )
    device = "" if blocked is None else f", and for the device {share(blocked)}"
    return (
        f"Data was ready when needed: the loop waited for it {share(data)} of the last epoch"
        f"{device}."
    )


def _stats(run: TrainingRun) -> list[Stat]:
    if not run.epochs:
        return []
    last = run.epochs[-1]
    stats = [Stat("Loss, last epoch", number(last.loss))]
    if last.valid_loss is not None:
        stats.append(Stat("Validation loss", number(last.valid_loss)))
    if last.tokens_per_s is not None:
        stats.append(Stat("Tokens per second", number(last.tokens_per_s)))
    if last.data_wait_share is not None:
        stats.append(Stat("Waiting for data", share(last.data_wait_share)))
    if run.busy is not None and run.busy.busy_share is not None:
        stats.append(Stat("GPU busy", share(run.busy.busy_share)))
    if last.peak_memory_bytes:
        stats.append(Stat("Peak memory", size(last.peak_memory_bytes)))
    if run.uses:
        stats.append(Stat("Monitored for", seconds(run.uses[-1].at_s)))
    return stats


def _losses(run: TrainingRun) -> dict[str, Any] | None:
    running = [(float(line.step), line.loss) for line in run.steps if line.loss is not None]
    valid = _points(run, "valid_loss")
    lines = [
        Line("train, recent batches", running, 0, 1.5),
        Line("train, whole epoch", _points(run, "loss"), 2, dots=True),
        Line("validation", valid, 1, dots=True),
    ]
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    last = number(lines[-1].points[-1][1])
    lead = f"Training loss {last} at the end."
    if valid:
        best = number(min(value for _, value in valid))
        lead = f"Validation loss {last} at the end, {best} at best."
    timed = [Line(line.name, _timed(run, line), line.look, line.width, line.dots) for line in lines]
    timed = [line for line in timed if len(line.points) > 1]
    clock = Axis("time", 0.0, format="clock")
    return {
        "lead": lead,
        "by_update": LineChart(f"Losses over updates. {lead}", lines, _UPDATES, Axis("loss")),
        "by_time": LineChart("Losses over time.", timed, clock, Axis("loss")) if timed else None,
        "table": _epochs_table(run, ("loss", "validation loss")),
    }


def _points(run: TrainingRun, attribute: str) -> list[Point]:
    """A value of each epoch that has it, over updates."""
    found = [(float(epoch.step), getattr(epoch, attribute)) for epoch in run.epochs]
    return [(step, value) for step, value in found if value is not None]


def _timed(run: TrainingRun, line: Line) -> list[Point]:
    """The line over seconds, as far as the monitor's samples tell when an update was done."""
    points = [line.points[at] for at in evenly_spaced(len(line.points), 2000)]
    found = [(run.seconds_at(round(step)), value) for step, value in points]
    return [(at, value) for at, value in found if at is not None]


def _samples(run: TrainingRun) -> list[dict[str, Any]]:
    """The held-out sentences that were translated after each epoch, with their translations after
    some of the epochs: the first, the last, and others between."""
    epochs = [epoch for epoch in run.epochs if epoch.samples]
    if not epochs:
        return []
    chosen = [epochs[at] for at in evenly_spaced(len(epochs), _MAX_SAMPLED_EPOCHS)]
    found: list[dict[str, Any]] = []
    for source, reference, _ in chosen[-1].samples or ():
        translations = [
            (f"epoch {epoch.epoch + 1}", one[2])
            for epoch in chosen
            for one in epoch.samples or ()
            if one[:2] == (source, reference)
        ]
        found.append({"source": source, "reference": reference, "translations": translations})
    return found


def _bleu(run: TrainingRun) -> LineChart | None:
    points = _points(run, "bleu")
    if not points:
        return None
    lead = (
        "On a sample of held-out sentences, translated greedily after each epoch: best "
        f"{score(max(value for _, value in points))}."
    )
    if run.finished is not None:
        final = run.finished.scores
        lead += f" At the end, with beam search: {score(final.bleu)} ({final.bleu_signature})."
        if final.scored_on:
            lead += f" {final.scored_on[0].upper()}{final.scored_on[1:]}."
    return LineChart(lead, [Line("BLEU", points, 2, dots=True)], _UPDATES, Axis("BLEU", 0.0))


def _speed(run: TrainingRun) -> LineChart | None:
    points = _points(run, "tokens_per_s")
    if not points:
        return None
    return LineChart(
        f"Tokens per second of each epoch, last {number(points[-1][1])}",
        [Line("tokens per second", points, 0, dots=True)],
        _UPDATES,
        Axis("tokens per second", 0.0),
    )


def _waits(run: TrainingRun) -> dict[str, Any] | None:
    totals: dict[str, float] = {}
    for epoch in run.epochs:
        for reason, count in epoch.waits.items():
            totals[reason] = totals.get(reason, 0.0) + count
    shares = [
        Line("for data", _points(run, "data_wait_share"), 1, dots=True),
        Line("for the device", _points(run, "host_blocked_share"), 3, dots=True),
    ]
    shares = [line for line in shares if line.points]
    if not shares and not totals:
        return None
    highest = max((value for line in shares for _, value in line.points), default=0.0)
    y = Axis("share of the epoch", 0.0, max(0.05, min(1.0, highest * 1.1)), "share")
    bars = [
        Bar(
            label=Cell(words(reason)),
            segments=[Segment(count, f"reason-{index % _REASON_LOOKS}")],
            value=f"{count:,.0f}",
            tip=f"{words(reason)}: {count:,.0f} times",
            note=f"{number(count / max(1, run.updates))} per update",
        )
        for index, (reason, count) in enumerate(sorted(totals.items(), key=lambda item: -item[1]))
    ]
    label = "Share of each epoch in which the host waited"
    top = max(totals.values(), default=0.0)
    return {
        "shares": LineChart(label, shares, _UPDATES, y) if shares else None,
        "counts": BarChart("Host waits by reason", bars, top, unit="") if bars else None,
    }


def _use(run: TrainingRun) -> dict[str, Any]:
    points = {sensor: sensor.points(run.uses) for sensor in _SENSORS}
    points = {sensor: found for sensor, found in points.items() if found}
    return {
        "charts": [
            sensor_view(sensor, found, sensor.scale_top([value for _, value in found]), "the run")
            for sensor, found in points.items()
        ],
        "table": sensor_table([(None, sensor, found) for sensor, found in points.items()]),
    }


def _gpu(run: TrainingRun) -> dict[str, Any] | None:
    busy = run.busy
    if busy is None or busy.busy_share is None:
        return None
    compute = min(busy.busy_share, busy.compute_share or 0.0)
    parts = [
        ("compute", "computing", compute),
        ("copy", "only copying", busy.busy_share - compute),
        ("idle", "idle", max(0.0, 1.0 - busy.busy_share)),
    ]
    bar = Bar(
        label=Cell(f"from update {busy.step:,}"),
        segments=[Segment(value * 100, look) for look, _, value in parts],
        value=share(busy.busy_share),
        tip="; ".join(f"{name} {share(value)}" for _, name, value in parts),
        note="busy",
    )
    streams = table(
        f"Streams; two or more ran at once {share(busy.overlap_share)} of the time",
        ("stream", "busy", "kernels per step", "copies per step"),
        [
            [
                stream.name,
                meter(stream.busy_share, stream.busy_share, share),
                figure(stream.kernels_per_step),
                figure(stream.copies_per_step),
            ]
            for stream in busy.streams
        ],
    )
    return {
        "steps": "a few steps" if busy.steps is None else f"{busy.steps} steps",
        "bars": BarChart("GPU use in the profiler window", [bar], top=100, unit="%"),
        "streams": streams if busy.streams else None,
    }


def _epochs_table(run: TrainingRun, columns: Iterable[str]) -> Table:
    chosen = [run.epochs[at] for at in evenly_spaced(len(run.epochs), _MAX_EPOCHS)]
    caption = "Each epoch"
    if len(chosen) < len(run.epochs):
        caption = f"{len(chosen)} of {len(run.epochs):,} epochs"
    return table(
        caption,
        ("epoch", "updates", *columns),
        [
            [
                f"{e.epoch + 1}",
                Cell(f"{e.step:,}", e.step),
                *(_epoch_cell(e, name) for name in columns),
            ]
            for e in chosen
        ],
    )


def _known_columns(run: TrainingRun) -> list[str]:
    """The columns that have a value in some epoch. A CPU has no peak memory."""
    return [
        name
        for name in _COLUMNS
        if any(_epoch_cell(epoch, name).value is not None for epoch in run.epochs)
    ]


def _epoch_cell(epoch: EpochLine, column: str) -> Cell:
    attribute, written = _COLUMNS[column]
    value = getattr(epoch, attribute)
    if attribute == "peak_memory_bytes":
        value = value or None  # 0 on a CPU, where nothing counts it
    return figure(value, written)


def _weights(run: TrainingRun) -> Table | None:
    files: list[Cells] = [
        [str(run.path / name), figure(float(size_), size)] for name, size_ in run.weights
    ]
    return table("Files of weights", ("file", "size"), files) if files else None
