"""The trainer: takes a run from its settings to its scores, and resumes it after interruptions.

    result = Trainer.create(TrainSettings(preset="tiny", epochs=5)).run()
    print(result.scores, result.folder.path)

A run depends only on its settings, which include the seed. It may be killed at any moment:
`Trainer.resume(folder).run()` continues with the batch after the last checkpoint.

Read this file from top to bottom. `Trainer.run` prepares the corpus, chooses a preset and a plan if
none were given, builds the run (`build.py`), opens observers and the checkpoint writer, restores
the last checkpoint, trains with a `TrainingLoop`, and scores the best weights.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from headrace.atomic_files import replace_file
from headrace.checkpoint import CheckpointWriter, agreed_checkpoint, load_checkpoint
from headrace.child_processes import exit_with_children
from headrace.data import end_workers, loader_error
from headrace.device import Device, Ledger, open_device
from headrace.engine import DeferredValues, Engine, EpochResult, compiler_loading
from headrace.errors import (
    CheckpointError,
    CorpusError,
    HeadraceError,
    LoaderError,
    NonFiniteError,
    OutOfMemoryError,
    PlanError,
    RunError,
    StepError,
    TranslationError,
)
from headrace.lifecycle import MetricsLog, NoMetrics, RunFolder, StopRequests, shared_folder
from headrace.parallel import (
    SINGLE,
    Agreement,
    Ranks,
    parallelism_of,
    rank_device,
)
from headrace.progress import ProgressLine, RecentLoss
from headrace.records import EpochLine, StepMetrics
from headrace.report import try_report
from headrace.schema import refuse_unknown
from headrace.text_table import counted
from headrace.translation.build import RunParts, build_run, check_settings, may_compile, why_padded
from headrace.translation.corpus.batches import Division
from headrace.translation.corpus.prepare import check_data, prepared_for
from headrace.translation.corpus.prepared import Prepared
from headrace.translation.corpus.vocabulary import Vocabulary
from headrace.translation.observers import (
    EpochGauges,
    RunObservers,
    batches_left,
    expect_earlier_rates,
    new_metrics,
    new_monitor,
    new_progress,
    new_watchdog,
)
from headrace.translation.plan_choice import choose_plan
from headrace.translation.result import TrainResult, remove_result, stored_result
from headrace.translation.run_size import (
    FirstBatches,
    about,
    choose_preset,
    estimated_seconds,
    parameter_count,
    preset_of_weights,
    warmup_warning,
)
from headrace.translation.saved_model import (
    TrainedModel,
    load_vocabularies,
    save_vocabularies,
    score_on_ranks,
    unsharded_copy,
    vocabularies_of_weights,
)
from headrace.translation.settings import (
    CHANGED_BY_RESUME,
    PLAN_FILE,
    TrainSettings,
    is_plan_file,
    time_text,
)
from headrace.translation.start_up import StartUp
from headrace.translation.weights import WeightFiles, load_weights

log = logging.getLogger("headrace")
_STEP_METRICS_EVERY_S = 5.0
_EXAMPLES = 8
_SHORT_RUN_S = 60.0
# Up to this many tokens, attention over all pairs of tokens is a small part of a step.
_DENSE_TOKENS = 2048
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
        is_changed: bool = False,
        is_new: bool = False,
    ) -> None:
        self.settings, self.folder = settings, folder
        self._cache, self._quiet, self._ranks = cache, quiet, ranks
        self._is_changed = is_changed  # `config.yaml` has other settings
        self._is_new = is_new  # `create` made the folder, and nothing was built yet

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
        return cls(settings, folder, cache=cache, quiet=quiet, ranks=ranks, is_new=True)

    @classmethod
    def resume(
        cls,
        run: Path,
        *,
        changes: Mapping[str, Any] | None = None,
        cache: Path | None = None,
        quiet: bool = False,
        ranks: Ranks = SINGLE,
    ) -> Trainer:
        """Open the run in this folder. `run` then continues from its last checkpoint, or starts
        over if it has none.

        `changes` are new values for settings in `CHANGED_BY_RESUME`, such as more `epochs` for a
        finished run. `run` stores them in `config.yaml`.
        """
        folder = RunFolder.open(run)
        settings = TrainSettings.read(folder.config)
        refuse_unknown(changes or {}, list(CHANGED_BY_RESUME), "changes", TranslationError)
        settings = TrainSettings.from_dict(settings.to_dict() | dict(changes or {}))
        return cls(
            settings, folder, cache=cache, quiet=quiet, ranks=ranks, is_changed=bool(changes)
        )

    def run(self) -> TrainResult:
        """Train to the end, until a signal asks to stop, or until the time limit or the patience
        is over. Does nothing if the run is finished. If the corpus cannot be used, or the settings
        do not fit it, a new run is removed."""
        folder, ranks = self.folder, self._ranks
        limit_s = self.settings.time_limit
        ends_at_s = time.monotonic() + limit_s if limit_s else None
        stored = stored_result(folder)
        if stored is not None and not self._is_changed and stored.ended_early != TIME_LIMIT:
            log.warning(
                "%s: this run is finished; for more epochs: headrace train --resume %s --epochs N",
                folder.path,
                folder.path,
            )
            return stored
        gauges, losses = EpochGauges(), EpochLoss()
        checkpoints: Checkpoints  # made below; the engine uses it when a step fails
        with (
            folder.locked() if ranks.is_first else nullcontext(),
            self._removed_if_refused(),
            new_progress(self.settings, ranks, self._quiet, gauges, ends_at_s) as progress,
        ):
            # No StopRequests yet: nothing is worth saving, and Ctrl-C ends the run at once.
            begun_s = time.monotonic()
            compiles = may_compile(self.settings, self._open_device())
            with compiler_loading() if compiles else nullcontext():
                data = self._prepare(progress)
            prepared_s = time.monotonic()
            is_preset_chosen, why_plan = self.settings.preset == "auto", None
            if is_preset_chosen:
                self._choose_preset(data)
            if self.settings.plan == "auto":
                why_plan = self._choose_plan(data)
            if self.settings.packed == "auto":
                self._choose_packed(data)
            settings = self.settings
            path = agreed_checkpoint(folder.state, ranks, Ledger())
            parts = build_run(
                settings,
                data,
                ranks,
                loads_weights=path is None,  # they may be gone when the run is resumed
                on_error=lambda error: checkpoints.rescue(error),
            )
            self._is_new = False
            start_up = StartUp(prepared_s - begun_s, time.monotonic() - prepared_s)
            engine, device = parts.engine, parts.device
            if is_preset_chosen:
                progress.message(_choice(parts))
            if why_plan is not None:
                progress.message(f"plan {settings.plan}: {why_plan}")
            if settings.packed == "on":
                progress.message(
                    "batches are packed, and attention has no dropout (--packed off: padded "
                    "batches)"
                )
            progress.message(f"{_description(parts)}; {folder.path}")
            if (warning := warmup_warning(parts)) is not None and ranks.is_first:
                log.warning("%s", warning)
            _warn_of_dense_attention(parts, is_compiled=_will_compile(parts))
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
                first_batch = checkpoints.restore(path)
                if stored is not None:
                    if is_done(settings, engine):
                        log.warning("%s", _nothing_to_do(parts, folder))
                        return stored
                    checkpoints.reopen(path, new_patience=stored.ended_early != TIME_LIMIT)
                if self._is_changed:
                    self._write_config(settings)
                metrics.rewind(engine.updates, partial(will_be_rewritten, engine.epochs))
                if path is not None:
                    progress.message(
                        f"resuming from {path}: epoch {engine.epochs + 1}, "
                        f"batch {first_batch + 1:,}"
                    )
                    expect_earlier_rates(progress, folder.metrics, _tokens_per_batch(parts))
                with new_monitor(settings, ranks, folder, metrics, engine) as monitor:
                    observers = RunObservers(device, progress, gauges, metrics, watchdog, monitor)
                    loop = TrainingLoop(
                        parts,
                        checkpoints,
                        weight_files,
                        losses,
                        observers,
                        stop,
                        ends_at_s,
                        start_up,
                    )
                    ending = loop.train(first_batch)
                if ending.signal is None:
                    result = _score(parts, folder, weight_files, progress, metrics, ending.early)
                    _close_unneeded(writer)
                else:
                    writer.close()
                    result = TrainResult(folder, ending.signal, engine.updates)
                    progress.final(
                        f"stopped by {ending.signal} after {counted(engine.updates, 'update')}; "
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
        data = prepared_for(
            self.settings, self._cache, progress.status, vocabularies=self._given_vocabularies()
        )
        progress.end_status()
        progress.message(data.table())
        save_vocabularies(self.folder.path / "vocabulary", data.vocabularies)
        if self._ranks.is_first:
            self._ranks.barrier(ledger)
        return data

    def _given_vocabularies(self) -> tuple[Vocabulary, Vocabulary] | None:
        """The vocabularies of the weights to start from, if they are a run's: with others, each of
        their embeddings would be that of another piece."""
        weights, joint = self.settings.weights, self.settings.joint
        if weights is None:
            return None
        own = self.folder.path / "vocabulary"
        if (own / "src.model").exists():  # the run has begun before
            return load_vocabularies(own, joint)
        return vocabularies_of_weights(weights, joint)

    def _choose_preset(self, data: Prepared) -> None:
        """Set the preset of the weights to start from, or else one for this device and corpus."""
        preset = preset_of_weights(self.settings.weights)
        preset = preset or choose_preset(self._open_device(), len(data.splits["train"]))
        self._choose(preset=self._ranks.broadcast(preset, Ledger()))

    def _choose_plan(self, data: Prepared) -> str | None:
        """Set the plan for this device and corpus. Returns why, if the device had a choice."""
        device = self._open_device()
        choice = choose_plan(self.settings, data, self._ranks, device)
        self._choose(plan=self._ranks.broadcast(choice.plan, Ledger()))
        return choice.why if device.captures else None

    def _choose_packed(self, data: Prepared) -> None:
        """Set `packed` to on where it pays, else to off."""
        why = why_padded(self.settings, data, self._ranks, self._open_device())
        self._choose(packed=self._ranks.broadcast("on" if why is None else "off", Ledger()))
        if why is not None:
            log.debug("batches are padded: %s", why)

    def _choose(self, **choice: str) -> None:
        """Set what was left to the trainer. `config.yaml` gets it, too, so that the run keeps it
        wherever it is resumed."""
        self.settings = self.settings.replace(**choice)
        self._write_config(self.settings)

    def _open_device(self) -> Device:
        return open_device(rank_device(self.settings.device))

    @contextmanager
    def _removed_if_refused(self) -> Iterator[None]:
        """Remove a new run's folder if the corpus, the weights or the settings are wrong: the
        corrected command may then have its name. Most such errors are found before there is a
        folder, but not those that need the prepared corpus."""
        try:
            yield
        except (TranslationError, CorpusError, PlanError, CheckpointError):
            # Another process may have resumed the run meanwhile.
            if self._is_new and self._ranks.is_first:
                self.folder.remove_if_untrained()
            raise

    def _write_config(self, settings: TrainSettings) -> None:
        if self._ranks.is_first:
            plan = PLAN_FILE if is_plan_file(settings.plan) else settings.plan
            self.folder.write_config(settings.to_dict() | {"plan": plan})


def _new_folder(
    settings: TrainSettings, ranks: Ranks, project: Path, name: str | None
) -> RunFolder:
    """Make the folder of a new run on rank 0, for all ranks.

    A plan file is copied into it, so that the run does not depend on the original. Paths become
    absolute: the run can be resumed from any folder.
    """
    path = Path()
    if ranks.is_first:
        folder = RunFolder.create(project, name)
        settings = settings.replace(
            data=tuple(str(Path(path).absolute()) for path in settings.data),
            weights=settings.weights and str(Path(settings.weights).absolute()),
        )
        if is_plan_file(settings.plan):
            replace_file(folder.path / PLAN_FILE, Path(settings.plan).read_bytes(), RunError)
            settings = settings.replace(plan=PLAN_FILE)
        folder.write_config(settings.to_dict())
        path = folder.path
    return shared_folder(Path(ranks.broadcast(str(path), Ledger())))


def _choice(parts: RunParts) -> str:
    """Which preset was chosen and why, and how long the run will take."""
    settings = parts.settings
    pairs = len(parts.data.splits["train"])
    limit = f", at most {time_text(settings.time_limit)}" if settings.time_limit else ""
    reason = f"{parts.device.description()} and {pairs:,} pairs"
    if preset_of_weights(settings.weights) is not None:
        reason = f"weights of {settings.weights}"
    return (
        f"{reason}: preset {settings.preset}, "
        f"{parameter_count(parts) / 1e6:.1f} M parameters; {about(estimated_seconds(parts))} for "
        f"{counted(settings.epochs, 'epoch')}{limit}"
    )


def _will_compile(parts: RunParts) -> bool:
    """Whether the step is to be compiled. It may still fail."""
    return parts.plan.compile and parts.device.compiles


def _warn_of_dense_attention(parts: RunParts, *, is_compiled: bool) -> None:
    """Warn if packed batches are large and do without flex_attention."""
    if parts.settings.packed == "off" or is_compiled or not parts.ranks.is_first:
        return
    tokens = max(parts.loader.sampler.batches[0].lengths) // parts.ranks.size
    if tokens > _DENSE_TOKENS:
        log.warning(
            "packed batches of %s tokens, and the step is not compiled: attention computes all "
            "pairs of tokens, which is slow; use --plan max on a CUDA GPU, or --packed off",
            f"{tokens:,}",
        )


def _description(parts: RunParts) -> str:
    settings, ranks, plan = parts.settings, parts.ranks, parts.plan
    batches = parts.loader.sampler.batches
    on_ranks = f", {ranks.size} ranks ({settings.parallel})" if ranks.several else ""
    return (
        f"{settings.preset} model, {parameter_count(parts) / 1e6:.1f} M parameters, plan "
        f"{plan.name} ({plan.precision}) on {parts.device.description()}{on_ranks}; "
        f"{batches}"
    )


def _tokens_per_batch(parts: RunParts) -> float:
    """Target tokens that a batch trains on, in the mean: all but bos."""
    train = parts.data.splits["train"]
    return (train.tokens[1] - len(train)) / max(1, len(parts.loader.sampler.batches))


def is_done(settings: TrainSettings, engine: Engine) -> bool:
    """Whether all epochs or updates of a run have been trained."""
    return engine.epochs >= settings.epochs or _updates_left(settings, engine) == 0


def _updates_left(settings: TrainSettings, engine: Engine) -> int | None:
    limit = settings.max_steps
    return None if limit is None else max(0, limit - engine.updates)


def _nothing_to_do(parts: RunParts, folder: RunFolder) -> str:
    settings, engine = parts.settings, parts.engine
    if engine.epochs >= settings.epochs:
        return (
            f"{folder.path}: this run is finished after {counted(engine.epochs, 'epoch')}, and "
            f"--epochs {settings.epochs:,} asks for no more; expected a larger number"
        )
    return f"{folder.path}: this run is finished: max_steps = {settings.max_steps:,} is reached"


# --- training -------------------------------------------------------------------------------------

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
        self._start_up = start_up  # None once it was said
        self._agreement = Agreement(parts.ranks, parts.device)
        # Under a plan with graphs, the first batches capture them.
        self._first_batches = FirstBatches(skip=5 if parts.plan.graphs == "off" else 100)
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
            f"{_how_to_resume(self._checkpoints.folder)}"
        )
        return TrainingEnd(early=TIME_LIMIT)

    def _epoch(self, first_batch: int) -> TrainingEnd | None:
        """Train one epoch. Returns what ended it before its last batch, or None."""
        settings, ranks = self._parts.settings, self._parts.ranks
        engine, loader = self._parts.engine, self._parts.loader
        losses, observers = self._losses, self._observers
        epoch, left = engine.epochs, _updates_left(settings, engine)
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
            if not self._has_trained and _will_compile(self._parts):
                report = engine.compiled
                is_compiled = report is not None and report.compiled
                _warn_of_dense_attention(self._parts, is_compiled=is_compiled)
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
            self._say_measured_time(now, left_in_run)
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
        self._say_start_up()
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

    def _say_measured_time(self, now_s: float, batches: int) -> None:
        """Say how long the other `batches` take, once, if it is worth saying."""
        batch_s = self._first_batches.on_batch(now_s)
        if batch_s is not None:
            self._say_start_up()
        if batch_s is None or batches * batch_s < _SHORT_RUN_S:
            return
        is_limited = self._ends_at_s is not None and now_s + batches * batch_s > self._ends_at_s
        self._observers.progress.message(
            f"measured over the first batches: {about(batches * batch_s)} of training left, "
            f"without validation{'; --time-limit ends it before' if is_limited else ''}"
        )

    def _say_start_up(self) -> None:
        """Say how long the start took, once, if there was something to compile or capture."""
        if self._start_up is None:
            return
        start_up, self._start_up = self._start_up.with_first_batches(self._parts.engine), None
        observers = self._observers
        observers.metrics.write("start", self._parts.engine.updates, **start_up.values)
        if start_up.compile_s is not None or start_up.capture_s is not None:
            observers.progress.message(str(start_up))

    def _write_step_metrics(self, tokens_per_s: float | None) -> None:
        engine, losses, observers = self._parts.engine, self._losses, self._observers
        line = StepMetrics(
            engine.updates, engine.epochs, losses.recent.mean, tokens_per_s, losses.mean
        )
        observers.metrics.write("step", line.step, **line.values())
        observers.monitor.write(engine.updates)

    def _validate(self) -> Validation:
        self._observers.progress.status("validating")
        return _validate(self._parts)

    def _keep(self, epoch: int, validation: Validation) -> None:
        """Save the weights that were validated, and a checkpoint."""
        with _averaged_weights(self._parts.engine):
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


@dataclass
class EpochLoss:
    """Sums of loss and weight over the epoch so far, including the part before a resume. `recent`
    has the last batches of this process."""

    loss: float = 0.0
    weight: float = 0.0
    recent: RecentLoss = field(default_factory=RecentLoss)

    @property
    def mean(self) -> float:
        return self.loss / self.weight if self.weight else float("nan")

    def add_arrived(self, arrived: Iterable[DeferredValues]) -> None:
        for entry in arrived:
            self.add(entry.values["loss"], entry.values["weight"])
            if math.isfinite(entry.values["loss"]):
                self.recent.add(entry.values["loss"], entry.values["weight"])

    def add(self, loss: float, weight: float) -> None:
        if math.isfinite(loss):  # the engine reports the others
            self.loss += loss * weight
            self.weight += weight

    def reset(self, loss: float, weight: float) -> None:
        self.loss, self.weight = loss, weight


def _signal_name(number: int) -> str | None:
    return signal.Signals(number).name if number else None


@dataclass(frozen=True)
class Validation:
    """Scores of the current weights, and (source, reference, translation) of some sentences."""

    scores: dict[str, float]
    samples: tuple[tuple[str, ...], ...]
    seconds: float


def _validate(parts: RunParts) -> Validation:
    """The loss on all of valid, and BLEU on the first sentences of it. With an EMA, its weights are
    used. Neither random states nor the model's mode change."""
    begun_s = time.monotonic()
    settings, ranks = parts.settings, parts.ranks
    with _averaged_weights(parts.engine):
        result = parts.engine.evaluate(parts.valid_loader)
        scores = {"valid_loss": result.mean_loss, "valid_nll": result.metrics["nll"]}
        pairs = parts.data.texts("valid")
        found: list[str] = []
        if pairs and (settings.valid_sentences or settings.samples):
            model = _trained_model(parts)
            if scored := pairs[: settings.valid_sentences]:
                on_sample, found = score_on_ranks(model, scored, 1, ranks)
                scores["bleu"] = on_sample.bleu
            others = [source for source, _ in pairs[len(found) : settings.samples]]
            found = [*found, *(model.translate(others, beam=1) if others else ())]
    samples = zip(pairs[: settings.samples], found, strict=False)
    return Validation(
        scores, tuple((*pair, text) for pair, text in samples), time.monotonic() - begun_s
    )


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
    """Saves and restores what a run needs to resume: the engine's state, the corpus and how the
    epoch divides it into batches, its loss so far, and which epoch had the best weights."""

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
            "corpus": self.parts.data.digests,
            "division": self.parts.loader.sampler.division._asdict(),
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

    def reopen(self, path: Path | None, *, new_patience: bool) -> None:
        """Make a finished run unfinished. With `new_patience`, count its patience from 0. `path` is
        the checkpoint that it continues from; without one this is an error."""
        if path is None:
            raise TranslationError(
                f"{self.folder.state}: has no checkpoint from which this finished run could "
                f"continue; to train from its weights: headrace train --weights {self.folder.path}"
            )
        if new_patience:
            self.weight_files.count_from(self.parts.engine.epochs)
        if self.parts.ranks.is_first:
            remove_result(self.folder)

    def restore(self, path: Path | None) -> int:
        """Load a checkpoint, if there is one. Returns the next batch of the current epoch."""
        parts = self.parts
        found = parts.data.digests  # now, and not while training: it reads the whole corpus
        if path is None:
            return 0
        state = load_checkpoint(path, parts=parts.ranks.several)
        try:
            batch = parts.engine.load_state_dict(state["engine"])
            corpus, division = dict(state["corpus"]), Division(**state["division"])
            self.losses.reset(*map(float, state["sums"]))
            self.weight_files.restore(dict(state["best"]))
        except _CHECKPOINT_MISMATCH as problem:
            raise TranslationError(
                f"{path}: does not fit the model or optimizer in {self.folder.config}: "
                f"{' '.join(str(problem).split())[:200]}"
            ) from problem
        self._check_corpus(path, found, corpus)
        if batch:
            self._check_division(path, batch, division)
        return batch

    def _check_corpus(
        self, path: Path, found: Mapping[str, str], expected: Mapping[str, str]
    ) -> None:
        """Raise if train or valid has other pairs than before: the run would not be the one that
        its settings describe, and its validation scores could not be compared."""
        changed = [split for split in found if found[split] != expected.get(split)]
        if changed:
            raise TranslationError(
                f"{path}: was saved with other pairs of {' and '.join(changed)} than the corpus "
                "has now; expected the same corpus as when this run started. To train on the new "
                f"one, start from this run's weights: headrace train --weights {self.folder.path}"
            )

    def _check_division(self, path: Path, batch: int, expected: Division) -> None:
        """Raise if the current epoch is not divided into batches as it was for its first ones."""
        engine, sampler = self.parts.engine, self.parts.loader.sampler
        sampler.set_epoch(engine.epochs)
        if sampler.division != expected:
            raise TranslationError(
                f"{path}: was saved after batch {batch:,} of epoch {engine.epochs + 1}, which had "
                f"{expected}; now the epoch has {sampler.division}, and the run would train on "
                "some pairs twice and on others never; expected the same batches. Resume with the "
                "settings, corpus, kind of device and version of Headrace that the run had, or "
                f"start a new run from its weights: headrace train --weights {self.folder.path}"
            )

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
    ended_early: str | None,
) -> TrainResult:
    """Translate the test split with the best weights and store the scores."""
    parts.engine.close()
    name, updates = weight_files.final_weights(), parts.engine.updates
    model = _trained_model(parts, weight_files.path(name))
    split = "test" if "test" in parts.data.splits else "valid"
    pairs = parts.data.texts(split)
    progress.status(f"translating {split}")
    scores, translations = score_on_ranks(model, pairs, parts.settings.beam, parts.ranks)
    scores = replace(scores, scored_on=parts.data.describe_scored(split))
    metrics.write(
        split,
        updates,
        weights=name,
        bleu=scores.bleu,
        chrf=scores.chrf,
        signature=scores.bleu_signature,
    )
    examples = [(*pair, text) for pair, text in zip(pairs, translations, strict=True)]
    result = TrainResult(folder, None, updates, scores, examples[:_EXAMPLES], ended_early)
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
    exit_with_children(128 + signal.SIGTERM)


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
                f"an error ended the run after {counted(parts.engine.updates, 'update')}; "
                f"{_how_to_resume(folder)}"
            )
        if known is not problem:
            raise known from problem
        raise
    finally:
        end_workers(parts.loader)


def _how_to_resume(folder: RunFolder) -> str:
    return f"resume with: headrace train --resume {folder.path}"
