"""The observers of a run: progress line, metrics file, monitor and watchdog.

Rank 0 shows and writes for all ranks. Each rank has its own watchdog.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from headrace.device import Device
from headrace.engine import Engine, Progress
from headrace.lifecycle import MetricsLog, NoMetrics, RunFolder, UsageLog, Watchdog
from headrace.parallel import Ranks
from headrace.progress import Gauges, ProgressLine, silent_console
from headrace.translation.settings import TrainSettings


@dataclass(frozen=True)
class RunObservers:
    """Tells the observers of a run about each epoch and step."""

    device: Device
    progress: ProgressLine
    gauges: EpochGauges
    metrics: MetricsLog | NoMetrics
    watchdog: Watchdog
    monitor: UsageLog

    def epoch_begins(
        self, epoch: int, batches: int, *, first_batch: int, limit: int | None
    ) -> None:
        """An epoch of `batches` batches begins at `first_batch`. The run ends after `limit` more
        batches, if it is not None."""
        self.progress.epoch_begins(epoch, batches, first_batch=first_batch, limit=limit)
        self.gauges.epoch_begins(self.device, self.monitor)
        self.watchdog.progress(f"began epoch {epoch + 1} at batch {first_batch + 1}")

    def on_step(
        self, info: Progress, updates: int, *, left_in_run: int, left_in_epoch: int
    ) -> None:
        """A batch was trained on. `left_in_run` and `left_in_epoch` are batches still to come."""
        self.progress.on_step(info)
        self.monitor.on_step(updates, left_in_run, left_in_epoch)

    def steps_end(self, updates: int) -> None:
        """The last step of an epoch is over. No step is expected until the next epoch begins."""
        self.watchdog.pause()
        self.monitor.end_epoch(updates)


class EpochGauges:
    """Reads the gauges of the progress line. Empty until the first epoch begins: the line is shown
    before the device is open."""

    def __init__(self) -> None:
        self._read: Callable[[], Gauges] = Gauges

    def __call__(self) -> Gauges:
        return self._read()

    def epoch_begins(self, device: Device, monitor: UsageLog) -> None:
        self._read = partial(_read_gauges, device, monitor, device.ledger.now_ns())


def _read_gauges(device: Device, monitor: UsageLog, begun_ns: int) -> Gauges:
    """Memory, waits and GPU use in the epoch that began at `begun_ns`."""
    ledger = device.ledger
    elapsed_ms = max(1e-3, (ledger.now_ns() - begun_ns) / 1e6)
    waits = ledger.epoch_statistics()
    data_ms = waits["data"].total_ms
    return Gauges(
        memory_bytes=device.peak_memory() or None,
        data_wait_share=min(1.0, data_ms / elapsed_ms),
        host_blocked_share=min(1.0, max(0.0, waits.wall_ms - data_ms) / elapsed_ms),
        gpu_use_share=monitor.gpu_share(),
    )


def new_progress(
    settings: TrainSettings,
    ranks: Ranks,
    quiet: bool,
    gauges: EpochGauges,
    ends_at_s: float | None,
) -> ProgressLine:
    epochs = settings.epochs
    if ranks.is_first:
        return ProgressLine(epochs, quiet, gauges=gauges, ends_at_s=ends_at_s)
    return ProgressLine(epochs, quiet=True, console=silent_console())


def new_metrics(settings: TrainSettings, ranks: Ranks, folder: RunFolder) -> MetricsLog | NoMetrics:
    if not ranks.is_first:
        return NoMetrics()
    events = folder.events if settings.tensorboard else None
    return MetricsLog(folder.metrics, events, warn_only=True)


def new_watchdog(
    settings: TrainSettings, ranks: Ranks, folder: RunFolder, device: Device
) -> Watchdog:
    """A watchdog that reports hung steps, to a file per rank."""
    name = "hang.txt" if ranks.is_first else f"hang-rank-{ranks.rank}.txt"
    return Watchdog(device, settings.hang_after, file=folder.path / name, abort=settings.hang_abort)


def new_monitor(
    settings: TrainSettings,
    ranks: Ranks,
    folder: RunFolder,
    metrics: MetricsLog | NoMetrics,
    engine: Engine,
) -> UsageLog:
    def uses_graphs() -> bool:
        graphs = engine.graphs
        return graphs is not None and graphs.why is None and graphs.replays > 0

    return UsageLog(
        engine.device,
        metrics,
        folder.metrics,
        enabled=settings.monitor and ranks.is_first,
        trace_after=20 if engine.plan.graphs == "off" else 100,
        uses_graphs=uses_graphs,
    )


def batches_left(settings: TrainSettings, engine: Engine, batches: int, batch: int) -> int:
    """Batches that the run has left after this one, with `batches` in each epoch."""
    left = batches * (settings.epochs - engine.epochs) - batch - 1
    if settings.max_steps is None:
        return left
    in_group = (batch + 1) % settings.accumulate
    return min(left, (settings.max_steps - engine.updates) * settings.accumulate - in_group)


def is_done(settings: TrainSettings, engine: Engine) -> bool:
    """Whether all epochs or updates of a run have been trained."""
    return engine.epochs >= settings.epochs or updates_left(settings, engine) == 0


def updates_left(settings: TrainSettings, engine: Engine) -> int | None:
    limit = settings.max_steps
    return None if limit is None else max(0, limit - engine.updates)
