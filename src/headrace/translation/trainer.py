"""The trainer: a run from its settings to its scores, and from any interruption on.

    result = Trainer.create(TrainSettings(preset="tiny", epochs=5)).run()
    print(result.scores, result.folder.path)

What a run does follows from its settings and its seed alone. It may be killed at any moment:
`Trainer.resume(folder).run()` goes on from the last checkpoint, from the very next batch.

Read it from top to bottom: `Trainer.run` prepares the corpus, builds the run (`build.py`), opens
what surrounds it, restores the last checkpoint, lets a `TrainingLoop` train epoch after epoch, and
scores the best weights.
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
    StepError,
    TranslationError,
)
from headrace.parallel import SINGLE, Agreement, Ranks, end_children, spread_of
from headrace.report import try_report
from headrace.runs import (
    MetricsLog,
    NoMetrics,
    ProgressLine,
    RunFolder,
    StopRequests,
    replace_file,
    shared_folder,
)
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
    whole_copy,
)
from headrace.translation.settings import PLAN_FILE, TrainSettings, is_plan_file
from headrace.translation.weights import KeptWeights, load_weights

log = logging.getLogger("headrace")
_STEP_METRICS_EVERY_S = 5.0
_EXAMPLES = 8
# What PyTorch and Python raise for the state of another model, or of something else altogether.
_DOES_NOT_FIT = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, StepError)
# A run can be resumed after these; any other error is a bug, or comes from its settings.
_RESUMABLE = (LoaderError, OutOfMemoryError, NonFiniteError, CheckpointError)


class Trainer:
    """One run in one folder. Make it with `create` or `resume`."""

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
        """A new run. What can be told to be wrong is told before there is a folder; then that and
        `config.yaml` come first. Of several `ranks` the first makes it, for all."""
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
        """The run of a folder, to go on with: from its last checkpoint, or from the start if it
        was ended before the first."""
        folder = RunFolder.open(run)
        settings = TrainSettings.read(folder.config)
        return cls(settings, folder, cache=cache, quiet=quiet, ranks=ranks)

    def run(self) -> TrainResult:
        """Train to the end, or until a signal asks to stop. A finished run is left as it is."""
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
        checkpoints: Checkpoints  # made below; the engine saves through it when a step fails
        with (
            folder.locked() if ranks.is_first else nullcontext(),
            new_progress(settings, ranks, self._quiet, gauges) as progress,
        ):
            # Nothing is lost yet: Ctrl-C ends it at once.
            data = self._prepare(progress)
            parts = build_run(
                settings, data, ranks, on_error=lambda error: checkpoints.rescue(error)
            )
            engine, device = parts.engine, parts.device
            progress.message(f"{_description(parts)}; {folder.path}")
            overdue = partial(leave_overdue, settings.grace, folder, progress.final)
            with (
                StopRequests(settings.grace, overdue, patient=ranks.several) as stop,
                new_watchdog(settings, ranks, folder, device) as watchdog,
                new_metrics(settings, ranks, folder) as metrics,
                CheckpointWriter(device, folder.state, settings.keep, ranks=ranks) as writer,
                _explaining_errors(parts, folder, progress.final),
            ):
                kept = KeptWeights(
                    folder.weights, parts.model, device, ranks, settings.average_last
                )
                checkpoints = Checkpoints(parts, folder, writer, kept, losses)
                path, first_batch = checkpoints.restore()
                metrics.rewind(engine.updates, partial(is_written_again, engine.epochs))
                if path is not None:
                    progress.message(
                        f"resuming from {path}: epoch {engine.epochs + 1}, batch {first_batch:,}"
                    )
                with new_monitor(settings, ranks, folder, metrics, engine) as monitor:
                    observers = Observers(device, progress, gauges, metrics, watchdog, monitor)
                    loop = TrainingLoop(parts, checkpoints, kept, losses, observers, stop)
                    stopped = loop.train(first_batch)
                if stopped is None:
                    result = _score(parts, folder, kept, progress, metrics)
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
        """The run's corpus, encoded: by the first rank, for all."""

        def show(what: str, done: int, total: int) -> None:
            progress.status(f"{what} {done:,}/{total:,}")

        ledger = Ledger()
        if not self._ranks.is_first:
            self._ranks.barrier(ledger)
        data = prepared_for(self.settings, self._cache, show)
        progress.message(data.table())
        save_vocabularies(self.folder.path / "vocabulary", data.vocabularies)
        if self._ranks.is_first:
            self._ranks.barrier(ledger)
        return data


def _new_folder(
    settings: TrainSettings, ranks: Ranks, project: Path, name: str | None
) -> RunFolder:
    """A folder for a new run: the first rank makes it, for all. A plan that is a file of its own is
    copied into it: the run keeps to it, whatever becomes of the file."""
    path = Path()
    if ranks.is_first:
        folder = RunFolder.create(project, name)
        if is_plan_file(settings.plan):
            replace_file(folder.path / PLAN_FILE, Path(settings.plan).read_bytes())
            settings = settings.but(plan=PLAN_FILE)
        folder.write_config(settings.to_dict())
        path = folder.path
    return shared_folder(Path(ranks.told(str(path), Ledger())))


def _description(parts: RunParts) -> str:
    settings, ranks, plan = parts.settings, parts.ranks, parts.plan
    parameters = sum(p.numel() for p in parts.model.parameters())
    batches = parts.loader.sampler.batches
    among = f", {ranks.size} ranks ({settings.parallel})" if ranks.several else ""
    return (
        f"{settings.preset} model, {parameters / 1e6:.1f} M parameters, plan "
        f"{plan.name} ({plan.precision}) on {parts.device.description()}{among}; "
        f"{len(batches):,} batches per epoch, {batches.shapes} shapes, "
        f"{batches.padding_share:.1%} padding"
    )


# --- training -------------------------------------------------------------------------------------


class TrainingLoop:
    """Trains epoch after epoch, and saves as it goes."""

    def __init__(
        self,
        parts: RunParts,
        checkpoints: Checkpoints,
        kept: KeptWeights,
        losses: EpochLoss,
        observers: Observers,
        stop: StopRequests,
    ) -> None:
        self._parts, self._checkpoints, self._kept, self._losses = parts, checkpoints, kept, losses
        self._observers, self._stop = observers, stop
        self._agreement = Agreement(parts.ranks, parts.device)

    def train(self, first_batch: int) -> str | None:
        """Train to the end, beginning at `first_batch` of the current epoch. Returns the name of
        the signal that stopped it; None: it is done."""
        while not self._is_done():
            (number,) = self._agreement.settle(self._stop.number)
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
        """Train one epoch. Returns the name of the signal that stopped it before its end."""
        settings, ranks = self._parts.settings, self._parts.ranks
        engine, loader = self._parts.engine, self._parts.loader
        losses, observers = self._losses, self._observers
        epoch, left = engine.epochs, self._updates_left()
        loader.sampler.set_epoch(epoch)
        loader.sampler.start_at(first_batch)
        if first_batch == 0:
            losses.start_from(0.0, 0.0)
        before = losses.loss, losses.weight
        batches = len(loader.sampler.batches)
        limit = None if left is None else left * settings.accumulate
        observers.epoch_begins(epoch, batches, first_batch=first_batch, limit=limit)
        saved_at = noted_at = time.monotonic()
        noted: float | None = None
        for info in engine.steps(loader, first_batch=first_batch, max_steps=left):
            observers.watchdog.progress(f"batch {info.batch} of epoch {epoch}")
            losses.count(info.come_back)
            if noted is None:  # what was restored belongs to an earlier time
                noted = losses.weight
            observers.on_step(
                info,
                engine.updates,
                left_in_run=batches_left(settings, engine, batches, info.batch),
                left=batches - info.batch - 1,
            )
            now = time.monotonic()
            if now - noted_at > _STEP_METRICS_EVERY_S:
                self._note_step((losses.weight - noted) / (now - noted_at))
                noted_at, noted = now, losses.weight
            if ranks.several and not engine.is_between_updates:
                continue
            due = ranks.is_first and now - saved_at > settings.save_every
            stop, save = self._agreement.look(self._stop.number, int(due))
            if stop or save:
                self._checkpoints.save()
                saved_at = time.monotonic()
            if stop:
                engine.leave()
                return _signal_name(stop)
        observers.steps_end(engine.updates)
        result = engine.last_result
        assert result is not None
        # The same values in the order of their batches: sums that do not depend on when they came.
        losses.start_from(*before)
        for loss, weight in zip(result.losses, result.weights, strict=True):
            losses.add(loss, weight)
        self._end_epoch(result)
        return None

    def _note_step(self, tokens_per_s: float) -> None:
        engine, observers = self._parts.engine, self._observers
        observers.metrics.write(
            "step",
            engine.updates,
            epoch=engine.epochs,
            loss=self._losses.mean,
            tokens_per_s=tokens_per_s,
        )
        observers.monitor.note(engine.updates)

    def _end_epoch(self, result: EpochResult) -> None:
        """Validate, write the epoch's line, and keep its weights and a checkpoint."""
        engine, progress = self._parts.engine, self._observers.progress
        progress.status("validating")
        found = _validate(self._parts)
        figures = result.statistics
        self._observers.metrics.write(
            "epoch",
            engine.updates,
            epoch=result.epoch,
            loss=self._losses.mean,
            tokens_per_s=figures.weight_per_s,
            data_wait_share=figures.data_wait_share,
            host_blocked_share=figures.host_blocked_share,
            peak_memory_bytes=figures.peak_memory_bytes,
            waits={wait.reason: wait.count for wait in result.waits.reasons},
            replays=figures.replays,
            **found,
        )
        # The loss of the whole epoch, also if it was resumed.
        result = replace(result, mean_loss=self._losses.mean)
        progress.epoch_ends(result, {k: v for k, v in found.items() if k != "valid_nll"})
        with _averaged_weights(engine):
            self._kept.keep(result.epoch, found)
        self._checkpoints.save()


@dataclass
class EpochLoss:
    """The loss of the epoch so far, summed over its batches and across interruptions."""

    loss: float = 0.0
    weight: float = 0.0

    @property
    def mean(self) -> float:
        return self.loss / self.weight if self.weight else float("nan")

    def count(self, arrived: Iterable[DeferredValues]) -> None:
        for entry in arrived:
            self.add(entry.values["loss"], entry.values["weight"])

    def add(self, loss: float, weight: float) -> None:
        if math.isfinite(loss):  # the engine reports each one that is not
            self.loss += loss * weight
            self.weight += weight

    def start_from(self, loss: float, weight: float) -> None:
        self.loss, self.weight = loss, weight


def _signal_name(number: int) -> str | None:
    return signal.Signals(number).name if number else None


def _validate(parts: RunParts) -> dict[str, float]:
    """Loss on the whole of valid, BLEU on a sample of it, with averaged weights if any."""
    with _averaged_weights(parts.engine):
        result = parts.engine.evaluate(parts.valid)
        found = {"valid_loss": result.mean_loss, "valid_nll": result.metrics["nll"]}
        sample = parts.data.texts("valid")[: parts.settings.valid_sentences]
        if sample:
            scores, _ = score_on_ranks(_trained_model(parts), sample, 1, parts.ranks)
            found["bleu"] = scores.bleu
    return found


def _averaged_weights(engine: Engine) -> AbstractContextManager[object]:
    """Inside the block the model has its averaged weights, if the run keeps averages."""
    return nullcontext() if engine.ema is None else engine.ema.applied()


def _trained_model(parts: RunParts, weights: Path | None = None) -> TrainedModel:
    """The model as it is, or with `weights`. Of a model sharded over ranks, a whole copy."""
    model, vocabularies = parts.model, parts.data.vocabularies
    if spread_of(parts.engine.model) == "fsdp":
        model = whole_copy(parts.settings, vocabularies, parts.model, parts.device)
    if weights is not None:
        load_weights(model, weights)
    return TrainedModel(model, vocabularies, parts.settings, parts.device, parts.plan.precision)


# --- checkpoints ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoints:
    """Saves all that a run needs to go on, and restores it: the engine's state, the loss of the
    epoch so far, and which weights are the best."""

    parts: RunParts
    folder: RunFolder
    writer: CheckpointWriter
    kept: KeptWeights
    losses: EpochLoss

    def save(self) -> None:
        """Save a checkpoint of this very moment. While the device copies the state, the host waits
        for the losses that led to it: if one is not finite, that error ends the run, and the
        checkpoint is not written."""
        if self.parts.ranks.several:
            self._settle()  # no rank can store values that are not summed over ranks yet
        engine = self.parts.engine
        state = {
            "engine": engine.state_dict(),
            "sums": [self.losses.loss, self.losses.weight],
            "best": self.kept.best,
        }
        save = partial(self.writer.save, state, engine.updates, unless_raised=self._settle)
        try:
            save()
        except CheckpointError as problem:  # of the one before, written in the background
            log.warning("%s; training continues, and another one is written now", problem)
            save()

    def rescue(self, error: BaseException) -> None:
        """Save what was learned before `error` ended the loop between two batches. Not after a
        loss that is not finite: the weights may not be, either."""
        if not isinstance(error, Exception) or isinstance(error, NonFiniteError):
            return
        try:
            self.save()
        except HeadraceError as other:  # the error that ended the loop matters more
            log.warning("%s", other)

    def restore(self) -> tuple[Path | None, int]:
        """Go back to the last checkpoint, if there is one. Returns its path, and the batch of the
        current epoch to go on with."""
        parts = self.parts
        path = agreed_checkpoint(self.folder.state, parts.ranks, parts.device.ledger)
        if path is None:
            return None, 0
        state = load_checkpoint(path, parts=parts.ranks.several)
        try:
            batch = parts.engine.load_state_dict(state["engine"])
            self.losses.start_from(*map(float, state["sums"]))
            self.kept.restore(dict(state["best"]))
        except _DOES_NOT_FIT as problem:
            raise TranslationError(
                f"{path}: does not fit the model or optimizer in {self.folder.config}: "
                f"{' '.join(str(problem).split())[:200]}"
            ) from problem
        return path, batch

    def _settle(self) -> None:
        self.losses.count(self.parts.engine.settle("checkpoint"))


def is_written_again(epochs: int, line: Mapping[str, Any]) -> bool:
    """Whether a run that goes on after `epochs` whole epochs writes this line of metrics again: it
    was killed at the end of an epoch or of the run, after the line and before the checkpoint."""
    kind, epoch = line.get("kind"), line.get("epoch")
    if kind == "epoch" and isinstance(epoch, int):
        return epoch >= epochs
    return kind in ("test", "valid")


# --- the end --------------------------------------------------------------------------------------


def _score(
    parts: RunParts,
    folder: RunFolder,
    kept: KeptWeights,
    progress: ProgressLine,
    metrics: MetricsLog | NoMetrics,
) -> TrainResult:
    """Translate test with the best weights, and store the scores: the run is finished."""
    parts.engine.close()
    name, updates = kept.to_use(), parts.engine.updates
    model = _trained_model(parts, kept.path(name))
    split = "test" if "test" in parts.data.splits else "valid"
    pairs = parts.data.texts(split)
    progress.status(f"translating {split}")
    scores, found = score_on_ranks(model, pairs, parts.settings.beam, parts.ranks)
    metrics.write(
        split,
        updates,
        weights=name,
        bleu=scores.bleu,
        chrf=scores.chrf,
        signature=scores.bleu_signature,
    )
    examples = [(*pair, text) for pair, text in zip(pairs, found, strict=True)][:_EXAMPLES]
    result = TrainResult(folder, None, updates, scores, examples)
    if parts.ranks.is_first:
        result.store()
    return result


def _close_unneeded(writer: CheckpointWriter) -> None:
    """Close the writer of a finished run: if its last checkpoint failed, nobody needs it."""
    try:
        writer.close()
    except CheckpointError as problem:
        log.warning("%s", problem)


def leave_overdue(grace_s: float, folder: RunFolder, tell: Callable[[str], object]) -> None:
    """End the process: the grace time after SIGTERM is over, and the run has not stopped yet."""
    tell(f"not stopped {grace_s:g} s after SIGTERM: exiting now; {_how_to_resume(folder)}")
    end_children()
    os._exit(128 + signal.SIGTERM)


@contextmanager
def _explaining_errors(
    parts: RunParts, folder: RunFolder, tell: Callable[[str], object]
) -> Iterator[None]:
    """However the block ends, so do the loader's processes. After an error that a run can be
    resumed from, say how."""
    try:
        yield
    except Exception as problem:
        known = loader_error(problem) or problem
        if isinstance(known, _RESUMABLE):
            tell(
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
