"""The trainer: takes a run from its settings to its scores, and resumes it after interruptions.

    result = Trainer.create(TrainSettings(preset="tiny", epochs=5)).run()
    print(result.scores, result.folder.path)

A run depends only on its settings, which include the seed. It may be killed at any moment:
`Trainer.resume(folder).run()` continues with the batch after the last checkpoint.

Read this file from top to bottom. `Trainer.run` prepares the corpus, builds the run (`build.py`),
opens observers and the checkpoint writer, restores the last checkpoint, trains with a
`TrainingLoop`, and scores the best weights.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from headrace.atomic_files import replace_file
from headrace.checkpoint import CheckpointWriter, agreed_checkpoint, load_checkpoint
from headrace.data import end_workers, loader_error
from headrace.device import Ledger
from headrace.engine import DeferredValues, Engine, EpochResult
from headrace.errors import (
    CheckpointError,
    HeadraceError,
    LoaderError,
    NonFiniteError,
    OutOfMemoryError,
    RunError,
    StepError,
    TranslationError,
)
from headrace.parallel import SINGLE, Agreement, Ranks, kill_children, parallelism_of
from headrace.report import try_report
from headrace.runs import (
    MetricsLog,
    NoMetrics,
    ProgressLine,
    RunFolder,
    StopRequests,
    shared_folder,
)
from headrace.runs.records import EpochLine, StepLine
from headrace.translation.build import RunParts, build_run, check_settings
from headrace.translation.corpus.prepare import check_data, prepared_for
from headrace.translation.corpus.prepared import Prepared
from headrace.translation.observers import (
    EpochGauges,
    Observers,
    batches_left,
    new_metrics,
    new_monitor,
    new_progress,
    new_watchdog,
)
from headrace.translation.result import TrainResult, stored_result
from headrace.translation.saved_model import (
    TrainedModel,
    save_vocabularies,
    score_on_ranks,
    unsharded_copy,
)
from headrace.translation.settings import PLAN_FILE, TrainSettings, is_plan_file
from headrace.translation.weights import WeightFiles, load_weights

log = logging.getLogger("headrace")
_STEP_METRICS_EVERY_S = 5.0
_EXAMPLES = 8
# What loading a checkpoint of another model raises, or of something else altogether.
_CHECKPOINT_MISMATCH = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, StepError)
# A run can be resumed after these. Any other error is a bug, or its settings are wrong.
_RESUMABLE = (LoaderError, OutOfMemoryError, NonFiniteError, CheckpointError)


class Trainer:
    """One training run in its folder. Make it with `create` or `resume`."""

    def __init__(
        self,
        settings: TrainSettings,
        folder: RunFolder,
        *,
        cache: Path | None = None,
        quiet: bool = False,
        ranks: Ranks = SINGLE,
    ) -> None:
        self.settings, self.folder = settings, folder
        self._cache, self._quiet, self._ranks = cache, quiet, ranks

    @classmethod
    def create(
        cls,
        settings: TrainSettings,
        *,
        project: Path = Path("runs/train"),
        name: str | None = None,
        cache: Path | None = None,
        quiet: bool = False,
        ranks: Ranks = SINGLE,
    ) -> Trainer:
        """Start a new run: check settings and data, then make its folder with `config.yaml`.

        With several `ranks`, rank 0 makes the folder for all.
        """
        check_settings(settings)
        check_data(settings)
        folder = _new_folder(settings, ranks, project, name)
        settings = TrainSettings.read(folder.config)
        return cls(settings, folder, cache=cache, quiet=quiet, ranks=ranks)

    @classmethod
    def resume(
        cls,
        run: Path,
        *,
        cache: Path | None = None,
        quiet: bool = False,
        ranks: Ranks = SINGLE,
    ) -> Trainer:
        """Open the run in this folder. `run` then continues from its last checkpoint, or starts
        over if it has none."""
        folder = RunFolder.open(run)
        settings = TrainSettings.read(folder.config)
        return cls(settings, folder, cache=cache, quiet=quiet, ranks=ranks)

    def run(self) -> TrainResult:
        """Train to the end, or until a signal asks to stop. Does nothing if the run is finished."""
        settings, folder, ranks = self.settings, self.folder, self._ranks
        stored = stored_result(folder)
        if stored is not None:
            log.warning(
                "%s: this run is finished; to train further from its weights: "
                "headrace train --weights %s",
                folder.path,
                folder.path,
            )
            return stored
        gauges, losses = EpochGauges(), EpochLoss()
        checkpoints: Checkpoints  # made below; the engine uses it when a step fails
        with (
            folder.locked() if ranks.is_first else nullcontext(),
            new_progress(settings, ranks, self._quiet, gauges) as progress,
        ):
            # No StopRequests yet: nothing is worth saving, and Ctrl-C ends the run at once.
            data = self._prepare(progress)
            parts = build_run(
                settings, data, ranks, on_error=lambda error: checkpoints.rescue(error)
            )
            engine, device = parts.engine, parts.device
            progress.message(f"{_description(parts)}; {folder.path}")
            on_overdue = partial(exit_after_grace, settings.grace, folder, progress.final)
            with (
                StopRequests(settings.grace, on_overdue, ignore_repeats=ranks.several) as stop,
                new_watchdog(settings, ranks, folder, device) as watchdog,
                new_metrics(settings, ranks, folder) as metrics,
                CheckpointWriter(device, folder.state, settings.keep, ranks=ranks) as writer,
                _closing_loader(parts, folder, progress.final),
            ):
                weight_files = WeightFiles(
                    folder.weights, parts.model, device, ranks, settings.average_last
                )
                checkpoints = Checkpoints(parts, folder, writer, weight_files, losses)
                path, first_batch = checkpoints.restore()
                metrics.rewind(engine.updates, partial(will_be_rewritten, engine.epochs))
                if path is not None:
                    progress.message(
                        f"resuming from {path}: epoch {engine.epochs + 1}, batch {first_batch:,}"
                    )
                with new_monitor(settings, ranks, folder, metrics, engine) as monitor:
                    observers = Observers(device, progress, gauges, metrics, watchdog, monitor)
                    loop = TrainingLoop(parts, checkpoints, weight_files, losses, observers, stop)
                    stopped = loop.train(first_batch)
                if stopped is None:
                    result = _score(parts, folder, weight_files, progress, metrics)
                    _close_unneeded(writer)
                else:
                    writer.close()
                    result = TrainResult(folder, stopped, engine.updates)
                    progress.final(
                        f"stopped by {stopped} after {engine.updates:,} updates; "
                        f"{_how_to_resume(folder)}"
                    )
        if ranks.is_first:
            try_report(folder.path)
        return result

    def _prepare(self, progress: ProgressLine) -> Prepared:
        """The run's encoded corpus. Rank 0 prepares it; the others then find it in the cache."""
        ledger = Ledger()
        if not self._ranks.is_first:
            self._ranks.barrier(ledger)
        data = prepared_for(self.settings, self._cache, progress.status)
        progress.message(data.table())
        save_vocabularies(self.folder.path / "vocabulary", data.vocabularies)
        if self._ranks.is_first:
            self._ranks.barrier(ledger)
        return data


def _new_folder(
    settings: TrainSettings, ranks: Ranks, project: Path, name: str | None
) -> RunFolder:
    """Make the folder of a new run on rank 0, for all ranks.

    A plan file is copied into it, so that the run does not depend on the original.
    """
    path = Path()
    if ranks.is_first:
        folder = RunFolder.create(project, name)
        if is_plan_file(settings.plan):
            replace_file(folder.path / PLAN_FILE, Path(settings.plan).read_bytes(), RunError)
            settings = settings.replace(plan=PLAN_FILE)
        folder.write_config(settings.to_dict())
        path = folder.path
    return shared_folder(Path(ranks.broadcast(str(path), Ledger())))


def _description(parts: RunParts) -> str:
    settings, ranks, plan = parts.settings, parts.ranks, parts.plan
    parameters = sum(p.numel() for p in parts.model.parameters())
    batches = parts.loader.sampler.batches
    on_ranks = f", {ranks.size} ranks ({settings.parallel})" if ranks.several else ""
    return (
        f"{settings.preset} model, {parameters / 1e6:.1f} M parameters, plan "
        f"{plan.name} ({plan.precision}) on {parts.device.description()}{on_ranks}; "
        f"{len(batches):,} batches per epoch, {batches.shapes} shapes, "
        f"{batches.padding_share:.1%} padding"
    )


# --- training -------------------------------------------------------------------------------------


class TrainingLoop:
    """Trains epoch after epoch, validates after each, and saves checkpoints."""

    def __init__(
        self,
        parts: RunParts,
        checkpoints: Checkpoints,
        weight_files: WeightFiles,
        losses: EpochLoss,
        observers: Observers,
        stop: StopRequests,
    ) -> None:
        self._parts, self._checkpoints, self._weight_files = parts, checkpoints, weight_files
        self._losses, self._observers, self._stop = losses, observers, stop
        self._agreement = Agreement(parts.ranks, parts.device)

    def train(self, first_batch: int) -> str | None:
        """Train to the end, starting at `first_batch` of the current epoch.

        Returns the name of the signal that stopped training, or None if it is done.
        """
        while not self._is_done():
            # If one rank received a signal, all stop.
            (number,) = self._agreement.wait(self._stop.number)
            stopped = _signal_name(number) or self._epoch(first_batch)
            if stopped is not None:
                return stopped
            first_batch = 0
        return None

    def _is_done(self) -> bool:
        return self._parts.engine.epochs >= self._parts.settings.epochs or self._updates_left() == 0

    def _updates_left(self) -> int | None:
        limit = self._parts.settings.max_steps
        return None if limit is None else max(0, limit - self._parts.engine.updates)

    def _epoch(self, first_batch: int) -> str | None:
        """Train one epoch. Returns the name of the signal that stopped it early, or None."""
        settings, ranks = self._parts.settings, self._parts.ranks
        engine, loader = self._parts.engine, self._parts.loader
        losses, observers = self._losses, self._observers
        epoch, left = engine.epochs, self._updates_left()
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
        for info in engine.steps(loader, first_batch=first_batch, max_steps=left):
            observers.watchdog.progress(f"batch {info.batch} of epoch {epoch}")
            losses.add_arrived(info.arrived)
            if written_weight is None:  # restored values do not count for this run's speed
                written_weight = losses.weight
            observers.on_step(
                info,
                engine.updates,
                left_in_run=batches_left(settings, engine, batches, info.batch),
                left_in_epoch=batches - info.batch - 1,
            )
            now = time.monotonic()
            if now - written_at > _STEP_METRICS_EVERY_S:
                self._write_step_metrics((losses.weight - written_weight) / (now - written_at))
                written_at, written_weight = now, losses.weight
            if ranks.several and not engine.is_between_updates:
                continue  # several ranks can only save between two updates
            due = ranks.is_first and now - saved_at > settings.save_every
            stop, save = self._agreement.poll(self._stop.number, int(due))
            if stop or save:
                self._checkpoints.save()
                saved_at = time.monotonic()
            if stop:
                engine.leave()
                return _signal_name(stop)
        observers.steps_end(engine.updates)
        result = engine.last_result
        assert result is not None
        # Sum again in batch order: the result must not depend on when the values arrived.
        losses.reset(*loss_at_start)
        for loss, weight in zip(result.losses, result.weights, strict=True):
            losses.add(loss, weight)
        self._end_epoch(result)
        return None

    def _write_step_metrics(self, tokens_per_s: float) -> None:
        engine, observers = self._parts.engine, self._observers
        line = StepLine(engine.updates, engine.epochs, self._losses.mean, tokens_per_s)
        observers.metrics.write("step", line.step, **line.values())
        observers.monitor.write(engine.updates)

    def _end_epoch(self, result: EpochResult) -> None:
        """Validate, write the epoch's metrics, and save its weights and a checkpoint."""
        engine, progress = self._parts.engine, self._observers.progress
        progress.status("validating")
        scores = _validate(self._parts)
        statistics = result.statistics
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
            **scores,
        )
        self._observers.metrics.write("epoch", line.step, **line.values())
        # The mean over the whole epoch, including the part before a resume.
        result = replace(result, mean_loss=self._losses.mean)
        progress.epoch_ends(result, {k: v for k, v in scores.items() if k != "valid_nll"})
        with _averaged_weights(engine):
            self._weight_files.keep(result.epoch, scores)
        self._checkpoints.save()


@dataclass
class EpochLoss:
    """Sums of loss and weight over the epoch so far, including the part before a resume."""

    loss: float = 0.0
    weight: float = 0.0

    @property
    def mean(self) -> float:
        return self.loss / self.weight if self.weight else float("nan")

    def add_arrived(self, arrived: Iterable[DeferredValues]) -> None:
        for entry in arrived:
            self.add(entry.values["loss"], entry.values["weight"])

    def add(self, loss: float, weight: float) -> None:
        if math.isfinite(loss):  # the engine reports the others
            self.loss += loss * weight
            self.weight += weight

    def reset(self, loss: float, weight: float) -> None:
        self.loss, self.weight = loss, weight


def _signal_name(number: int) -> str | None:
    return signal.Signals(number).name if number else None


def _validate(parts: RunParts) -> dict[str, float]:
    """The loss on all of valid, and BLEU on a sample of it. With an EMA, its weights are used."""
    with _averaged_weights(parts.engine):
        result = parts.engine.evaluate(parts.valid_loader)
        found = {"valid_loss": result.mean_loss, "valid_nll": result.metrics["nll"]}
        sample = parts.data.texts("valid")[: parts.settings.valid_sentences]
        if sample:
            scores, _ = score_on_ranks(_trained_model(parts), sample, 1, parts.ranks)
            found["bleu"] = scores.bleu
    return found


def _averaged_weights(engine: Engine) -> AbstractContextManager[object]:
    """Inside the block the model has its EMA weights, if the run keeps an EMA."""
    return nullcontext() if engine.ema is None else engine.ema.applied()


def _trained_model(parts: RunParts, weights: Path | None = None) -> TrainedModel:
    """The model with its current weights, or with those in the file `weights`. An FSDP model is
    copied unsharded."""
    model, vocabularies = parts.model, parts.data.vocabularies
    if parallelism_of(parts.engine.model) == "fsdp":
        model = unsharded_copy(parts.settings, vocabularies, parts.model, parts.device)
    if weights is not None:
        load_weights(model, weights)
    return TrainedModel(model, vocabularies, parts.settings, parts.device, parts.plan.precision)


# --- checkpoints ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoints:
    """Saves and restores what a run needs to resume: the engine's state, the loss of the epoch so
    far, and which epoch had the best weights."""

    parts: RunParts
    folder: RunFolder
    writer: CheckpointWriter
    weight_files: WeightFiles
    losses: EpochLoss

    def save(self) -> None:
        """Save a checkpoint of the current state.

        While the device copies the state, the host waits for the losses that led to it. If one of
        them is not finite, that error ends the run and the checkpoint is not written.
        """
        if self.parts.ranks.several:
            self._wait_for_losses()  # values can only be stored once they are summed over ranks
        engine = self.parts.engine
        state = {
            "engine": engine.state_dict(),
            "sums": [self.losses.loss, self.losses.weight],
            "best": self.weight_files.best,
        }
        save = partial(self.writer.save, state, engine.updates, unless_raised=self._wait_for_losses)
        try:
            save()
        except CheckpointError as problem:  # from the previous one, written in the background
            log.warning("%s; training continues and writes a new checkpoint now", problem)
            save()

    def rescue(self, error: BaseException) -> None:
        """Save a checkpoint after `error` ended the loop between two batches.

        Not after a non-finite loss: the weights may be non-finite, too.
        """
        if not isinstance(error, Exception) or isinstance(error, NonFiniteError):
            return
        try:
            self.save()
        except HeadraceError as other:  # not raised: the error that ended the loop matters more
            log.warning("%s", other)

    def restore(self) -> tuple[Path | None, int]:
        """Load the last checkpoint, if there is one. Returns its path and the next batch of the
        current epoch."""
        parts = self.parts
        path = agreed_checkpoint(self.folder.state, parts.ranks, parts.device.ledger)
        if path is None:
            return None, 0
        state = load_checkpoint(path, parts=parts.ranks.several)
        try:
            batch = parts.engine.load_state_dict(state["engine"])
            self.losses.reset(*map(float, state["sums"]))
            self.weight_files.restore(dict(state["best"]))
        except _CHECKPOINT_MISMATCH as problem:
            raise TranslationError(
                f"{path}: does not fit the model or optimizer in {self.folder.config}: "
                f"{' '.join(str(problem).split())[:200]}"
            ) from problem
        return path, batch

    def _wait_for_losses(self) -> None:
        self.losses.add_arrived(self.parts.engine.settle("checkpoint"))


def will_be_rewritten(epochs: int, line: Mapping[str, Any]) -> bool:
    """Whether a run that resumes after `epochs` finished epochs will write this line again.

    Such lines are there if a run was killed after it wrote the line and before the checkpoint.
    """
    kind, epoch = line.get("kind"), line.get("epoch")
    if kind == "epoch" and isinstance(epoch, int):
        return epoch >= epochs
    return kind in ("test", "valid")


# --- scores and the end of a run ------------------------------------------------------------------


def _score(
    parts: RunParts,
    folder: RunFolder,
    weight_files: WeightFiles,
    progress: ProgressLine,
    metrics: MetricsLog | NoMetrics,
) -> TrainResult:
    """Translate the test split with the best weights and store the scores."""
    parts.engine.close()
    name, updates = weight_files.final_weights(), parts.engine.updates
    model = _trained_model(parts, weight_files.path(name))
    split = "test" if "test" in parts.data.splits else "valid"
    pairs = parts.data.texts(split)
    progress.status(f"translating {split}")
    scores, translations = score_on_ranks(model, pairs, parts.settings.beam, parts.ranks)
    scores = replace(scores, scored_on=parts.data.describe_novelty(split))
    metrics.write(
        split,
        updates,
        weights=name,
        bleu=scores.bleu,
        chrf=scores.chrf,
        signature=scores.bleu_signature,
    )
    examples = [(*pair, text) for pair, text in zip(pairs, translations, strict=True)]
    result = TrainResult(folder, None, updates, scores, examples[:_EXAMPLES])
    if parts.ranks.is_first:
        result.store()
    return result


def _close_unneeded(writer: CheckpointWriter) -> None:
    """Close the writer of a finished run. If its last checkpoint failed, a warning is enough."""
    try:
        writer.close()
    except CheckpointError as problem:
        log.warning("%s", problem)


def exit_after_grace(grace_s: float, folder: RunFolder, show: Callable[[str], object]) -> None:
    """End the process, because the run has not stopped within the grace time after SIGTERM."""
    show(f"not stopped {grace_s:g} s after SIGTERM: exiting now; {_how_to_resume(folder)}")
    kill_children()
    os._exit(128 + signal.SIGTERM)


@contextmanager
def _closing_loader(
    parts: RunParts, folder: RunFolder, show: Callable[[str], object]
) -> Iterator[None]:
    """End the loader's workers after the block. If an error ended it, say how to resume."""
    try:
        yield
    except Exception as problem:
        known = loader_error(problem) or problem
        if isinstance(known, _RESUMABLE):
            show(
                f"an error ended the run after {parts.engine.updates:,} updates; "
                f"{_how_to_resume(folder)}"
            )
        if known is not problem:
            raise known from problem
        raise
    finally:
        end_workers(parts.loader)


def _how_to_resume(folder: RunFolder) -> str:
    return f"resume with: headrace train --resume {folder.path}"
