"""Trains epoch after epoch, validates after each, and saves checkpoints."""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import dataclass, replace

from headrace.engine import EpochResult
from headrace.lifecycle import StopRequests
from headrace.parallel import Agreement
from headrace.records import EpochLine, StepMetrics
from headrace.text_table import counted
from headrace.translation.build import RunParts
from headrace.translation.ending import how_to_resume
from headrace.translation.first_batches import FirstBatchNotes
from headrace.translation.observers import RunObservers, batches_left, is_done, updates_left
from headrace.translation.run_checkpoints import Checkpoints, EpochLoss
from headrace.translation.settings import time_text
from headrace.translation.start_up import StartUp
from headrace.translation.validation import Validation, averaged_weights, validate
from headrace.translation.weights import WeightFiles

log = logging.getLogger("headrace")

_STEP_METRICS_EVERY_S = 5.0


TIME_LIMIT, PATIENCE = "time limit", "patience"


@dataclass(frozen=True)
class TrainingEnd:
    """How training ended: by a signal, early by `TIME_LIMIT` or `PATIENCE`, or with all done."""

    signal: str | None = None
    early: str | None = None


class TrainingLoop:
    """Trains epoch after epoch, validates after each, and saves checkpoints."""

    def __init__(
        self,
        parts: RunParts,
        checkpoints: Checkpoints,
        weight_files: WeightFiles,
        losses: EpochLoss,
        observers: RunObservers,
        stop: StopRequests,
        ends_at_s: float | None = None,
        start_up: StartUp | None = None,
    ) -> None:
        self._parts, self._checkpoints, self._weight_files = parts, checkpoints, weight_files
        self._losses, self._observers, self._stop = losses, observers, stop
        self._ends_at_s = ends_at_s
        self._agreement = Agreement(parts.ranks, parts.device)
        self._first_batches = FirstBatchNotes(parts, observers, start_up, ends_at_s)
        self._has_trained = False

    def train(self, first_batch: int) -> TrainingEnd:
        """Train to the end, starting at `first_batch` of the current epoch."""
        while not is_done(self._parts.settings, self._parts.engine):
            ending = self._out_of_patience() or self._requested_end() or self._epoch(first_batch)
            if ending is not None:
                return ending
            first_batch = 0
        return TrainingEnd()

    def _out_of_patience(self) -> TrainingEnd | None:
        settings, best = self._parts.settings, self._weight_files.best
        waited = self._weight_files.epochs_without_better(self._parts.engine.epochs - 1)
        if not settings.patience or waited < settings.patience:
            return None
        bleu, likelihood = best["value"]
        score = (
            f"BLEU than {bleu:.2f}"
            if settings.valid_sentences
            else f"loss than {-likelihood:.4f} (without label smoothing)"
        )
        self._observers.progress.final(
            f"stopping early: no better validation {score} of epoch {best['epoch'] + 1} in the "
            f"last {counted(waited, 'epoch')} (--patience)"
        )
        return TrainingEnd(early=PATIENCE)

    def _requested_end(self) -> TrainingEnd | None:
        """The end that a signal or the time limit asks for, between two epochs. If one rank
        received a signal, all stop."""
        # The requests of `poll`, in its order: `wait` also returns those that are on their way.
        number, _, late = self._agreement.wait(self._stop.number, 0, self._is_late())
        if number:
            return TrainingEnd(signal=_signal_name(number))
        return self._end_by_time() if late else None

    def _is_late(self) -> int:
        """1 if the time limit is over, on the first rank. At least one batch is trained on: else
        there would be no weights to score."""
        if self._ends_at_s is None or not (self._has_trained and self._parts.ranks.is_first):
            return 0
        return int(time.monotonic() >= self._ends_at_s)

    def _end_by_time(self) -> TrainingEnd:
        self._observers.progress.final(
            f"the time limit of {time_text(self._parts.settings.time_limit)} is reached after "
            f"{counted(self._parts.engine.updates, 'update')}; "
            f"{how_to_resume(self._checkpoints.folder)}"
        )
        return TrainingEnd(early=TIME_LIMIT)

    def _epoch(self, first_batch: int) -> TrainingEnd | None:
        """Train one epoch. Returns what ended it before its last batch, or None."""
        settings, ranks = self._parts.settings, self._parts.ranks
        engine, loader = self._parts.engine, self._parts.loader
        losses, observers = self._losses, self._observers
        epoch, left = engine.epochs, updates_left(settings, engine)
        loader.sampler.set_epoch(epoch)
        loader.sampler.start_at(first_batch)
        if first_batch == 0:
            losses.reset(0.0, 0.0)
        loss_at_start = losses.loss, losses.weight
        batches = len(loader.sampler.batches)
        limit = None if left is None else left * settings.accumulate
        observers.epoch_begins(epoch, batches, first_batch=first_batch, limit=limit)
        saved_at = written_at = time.monotonic()
        written_weight: float | None = None
        validation: Validation | None = None  # set if the time limit ends the epoch
        for info in engine.steps(loader, first_batch=first_batch, max_steps=left):
            self._has_trained = True
            observers.watchdog.progress(f"batch {info.batch + 1} of epoch {epoch + 1}")
            losses.add_arrived(info.arrived)
            if written_weight is None:  # restored values do not count for this run's speed
                written_weight = losses.weight
            left_in_run = batches_left(settings, engine, batches, info.batch)
            observers.on_step(
                info,
                engine.updates,
                left_in_run=left_in_run,
                left_in_epoch=batches - info.batch - 1,
            )
            now = time.monotonic()
            self._first_batches.on_batch(now, left_in_run)
            if now - written_at > _STEP_METRICS_EVERY_S:
                self._write_step_metrics((losses.weight - written_weight) / (now - written_at))
                written_at, written_weight = now, losses.weight
            if ranks.several and not engine.is_between_updates:
                continue  # several ranks can only save between two updates
            due = ranks.is_first and now - saved_at > settings.save_every
            stop, save, late = self._agreement.poll(self._stop.number, int(due), self._is_late())
            if stop or save:
                self._checkpoints.save()
                saved_at = time.monotonic()
            if stop:
                engine.leave()
                # The report then counts the same updates as the terminal.
                self._write_step_metrics(None)
                return TrainingEnd(signal=_signal_name(stop))
            if late and info.batch + 1 < batches:  # else the epoch ends now anyway
                # Before the pass ends: only then can the checkpoint continue within the epoch.
                observers.watchdog.pause()
                validation = self._validate()
                self._keep(epoch, validation)
                engine.leave()
                break
        self._first_batches.say_start_up()
        observers.steps_end(engine.updates)
        result = engine.last_result
        assert result is not None
        # Sum again in batch order: the result must not depend on when the values arrived.
        losses.reset(*loss_at_start)
        for loss, weight in zip(result.losses, result.weights, strict=True):
            losses.add(loss, weight)
        if validation is not None:
            self._write_epoch(result, validation)
            return self._end_by_time()
        validation = self._validate()
        self._write_epoch(result, validation)
        self._keep(epoch, validation)
        return None

    def _write_step_metrics(self, tokens_per_s: float | None) -> None:
        engine, losses, observers = self._parts.engine, self._losses, self._observers
        line = StepMetrics(
            engine.updates, engine.epochs, losses.recent.mean, tokens_per_s, losses.mean
        )
        observers.metrics.write("step", line.step, **line.values())
        observers.monitor.write(engine.updates)

    def _validate(self) -> Validation:
        self._observers.progress.status("validating")
        return validate(self._parts)

    def _keep(self, epoch: int, validation: Validation) -> None:
        """Save the weights that were validated, and a checkpoint."""
        with averaged_weights(self._parts.engine):
            self._weight_files.keep(epoch, validation.scores)
        self._checkpoints.save()

    def _write_epoch(self, result: EpochResult, validation: Validation) -> None:
        """Write and show an epoch's metrics and sample translations."""
        engine, progress = self._parts.engine, self._observers.progress
        scores, statistics = validation.scores, result.statistics
        line = EpochLine(
            engine.updates,
            epoch=result.epoch,
            loss=self._losses.mean,
            tokens_per_s=statistics.weight_per_s,
            data_wait_share=statistics.data_wait_share,
            host_blocked_share=statistics.host_blocked_share,
            peak_memory_bytes=statistics.peak_memory_bytes,
            waits={wait.reason: wait.count for wait in result.waits.reasons},
            replays=statistics.replays,
            validation_s=validation.seconds,
            samples=validation.samples or None,
            **scores,
        )
        self._observers.metrics.write("epoch", line.step, **line.values())
        # The mean over the whole epoch, including the part before a resume.
        result = replace(result, mean_loss=self._losses.mean)
        progress.epoch_ends(result, {k: v for k, v in scores.items() if k != "valid_nll"})
        for source, reference, found in validation.samples:
            progress.details((f"    {source}", f"  = {reference}", f"  > {found}"))


def _signal_name(number: int) -> str | None:
    return signal.Signals(number).name if number else None
