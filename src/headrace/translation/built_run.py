"""A run that is built, from its last checkpoint to its scores."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from headrace.checkpoint import CheckpointWriter
from headrace.lifecycle import MetricsLog, NoMetrics, RunFolder, StopRequests, Watchdog
from headrace.progress import ProgressLine
from headrace.text_table import counted
from headrace.translation.announcements import nothing_to_do
from headrace.translation.build import RunParts
from headrace.translation.ending import (
    close_unneeded,
    closing_loader,
    exit_after_grace,
    how_to_resume,
    score_run,
)
from headrace.translation.observers import (
    EpochGauges,
    RunObservers,
    is_done,
    new_metrics,
    new_monitor,
    new_watchdog,
)
from headrace.translation.result import TrainResult
from headrace.translation.run_checkpoints import Checkpoints, EpochLoss, will_be_rewritten
from headrace.translation.start_up import StartUp
from headrace.translation.training_loop import TIME_LIMIT, TrainingEnd, TrainingLoop
from headrace.translation.weights import WeightFiles

log = logging.getLogger("headrace")


@dataclass(frozen=True)
class BuiltRun:
    """A run whose parts are built. `stored` is its result if it was finished before."""

    parts: RunParts
    folder: RunFolder
    progress: ProgressLine
    gauges: EpochGauges
    start_up: StartUp
    ends_at_s: float | None
    stored: TrainResult | None
    losses: EpochLoss = field(default_factory=EpochLoss)

    def run(
        self,
        path: Path | None,
        on_checkpoints: Callable[[Checkpoints], object],
        on_restored: Callable[[], object],
    ) -> TrainResult:
        """Restore the checkpoint in `path`, if there is one, train and score. `on_checkpoints` gets
        what can save a checkpoint from now on."""
        parts, folder, progress = self.parts, self.folder, self.progress
        settings, ranks, device = parts.settings, parts.ranks, parts.device
        on_overdue = partial(exit_after_grace, settings.grace, folder, progress.final)
        with (
            StopRequests(settings.grace, on_overdue, ignore_repeats=ranks.several) as stop,
            new_watchdog(settings, ranks, folder, device) as watchdog,
            new_metrics(settings, ranks, folder) as metrics,
            CheckpointWriter(device, folder.state, settings.keep, ranks=ranks) as writer,
            closing_loader(parts, folder, progress.final),
        ):
            weight_files = WeightFiles(
                folder.weights, parts.model, device, ranks, settings.average_last
            )
            checkpoints = Checkpoints(parts, folder, writer, weight_files, self.losses)
            on_checkpoints(checkpoints)
            first_batch = checkpoints.restore(path)
            if self.stored is not None:
                if is_done(settings, parts.engine):
                    log.warning("%s", nothing_to_do(parts, folder))
                    return self.stored
                checkpoints.reopen(path, new_patience=self.stored.ended_early != TIME_LIMIT)
            on_restored()
            self._continue(path, first_batch, metrics)
            ending = self._train(first_batch, checkpoints, weight_files, stop, watchdog, metrics)
            if ending.signal is None:
                result = score_run(parts, folder, weight_files, progress, metrics, ending.early)
                close_unneeded(writer)
            else:
                writer.close()
                result = self._stopped(ending.signal)
        return result

    def _continue(
        self, path: Path | None, first_batch: int, metrics: MetricsLog | NoMetrics
    ) -> None:
        """Drop the metrics that come again, and say from where the run is resumed."""
        engine = self.parts.engine
        metrics.rewind(engine.updates, partial(will_be_rewritten, engine.epochs))
        if path is not None:
            self.progress.message(
                f"resuming from {path}: epoch {engine.epochs + 1}, batch {first_batch + 1:,}"
            )

    def _train(
        self,
        first_batch: int,
        checkpoints: Checkpoints,
        weight_files: WeightFiles,
        stop: StopRequests,
        watchdog: Watchdog,
        metrics: MetricsLog | NoMetrics,
    ) -> TrainingEnd:
        parts, ranks = self.parts, self.parts.ranks
        engine, device, settings = parts.engine, parts.device, parts.settings
        with new_monitor(settings, ranks, self.folder, metrics, engine) as monitor:
            observers = RunObservers(device, self.progress, self.gauges, metrics, watchdog, monitor)
            loop = TrainingLoop(
                parts,
                checkpoints,
                weight_files,
                self.losses,
                observers,
                stop,
                self.ends_at_s,
                self.start_up,
            )
            return loop.train(first_batch)

    def _stopped(self, by_signal: str) -> TrainResult:
        updates = self.parts.engine.updates
        self.progress.final(
            f"stopped by {by_signal} after {counted(updates, 'update')}; "
            f"{how_to_resume(self.folder)}"
        )
        return TrainResult(self.folder, by_signal, updates)
