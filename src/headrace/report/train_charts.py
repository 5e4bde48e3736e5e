"""The charts of a training run's page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from headrace.records import EpochLine, TrainingRun
from headrace.report.charts import Bar, BarChart, Cell, Segment, Table, figure, meter, table
from headrace.report.figures import number, score, share, size, words
from headrace.report.lines import Axis, Line, LineChart
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

_MAX_EPOCHS = 100


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


def run_losses(run: TrainingRun) -> dict[str, Any] | None:
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
        "table": epochs_table(run, ("loss", "validation loss")),
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


def bleu_chart(run: TrainingRun) -> LineChart | None:
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


def speed_chart(run: TrainingRun) -> LineChart | None:
    points = _points(run, "tokens_per_s")
    if not points:
        return None
    return LineChart(
        f"Tokens per second of each epoch, last {number(points[-1][1])}",
        [Line("tokens per second", points, 0, dots=True)],
        _UPDATES,
        Axis("tokens per second", 0.0),
    )


def run_waits(run: TrainingRun) -> dict[str, Any] | None:
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


def run_use(run: TrainingRun) -> dict[str, Any]:
    points = {sensor: sensor.points(run.uses) for sensor in _SENSORS}
    points = {sensor: found for sensor, found in points.items() if found}
    return {
        "charts": [
            sensor_view(sensor, found, sensor.scale_top([value for _, value in found]), "the run")
            for sensor, found in points.items()
        ],
        "table": sensor_table([(None, sensor, found) for sensor, found in points.items()]),
    }


def run_gpu(run: TrainingRun) -> dict[str, Any] | None:
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


def epochs_table(run: TrainingRun, columns: Iterable[str]) -> Table:
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


def known_columns(run: TrainingRun) -> list[str]:
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
