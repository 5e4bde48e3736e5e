"""The trainer: a run from its settings to its scores, and from any interruption on.

    result = Trainer.create(TrainSettings(preset="tiny", epochs=5)).run()
    print(result.scores, result.folder.path)

What a run does follows from its settings and its seed alone. It may be killed at any moment:
`Trainer.resume(folder).run()` goes on from the last checkpoint, from the very next batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from headrace.checkpoint import (
    CheckpointWriter,
    latest_checkpoint,
    load_checkpoint,
    weights_from_file,
    weights_to_file,
)
from headrace.deferred import DeferredValues
from headrace.device import open_device
from headrace.errors import (
    CheckpointError,
    HeadraceError,
    NonFiniteError,
    StepError,
    TranslationError,
)
from headrace.metrics import MetricsLog
from headrace.plan import Plan
from headrace.progress import Gauges, Progress
from headrace.report import try_report
from headrace.results import EpochResult
from headrace.rundir import RunFolder
from headrace.runmonitor import RunMonitor
from headrace.stopping import StopRequests
from headrace.translation import guards
from headrace.translation.assembly import assemble, prepared_for
from headrace.translation.guards import Guards
from headrace.translation.outcome import Sums, TrainResult, stored_result
from headrace.translation.settings import TrainSettings
from headrace.translation.trained import (
    TrainedModel,
    load_weights,
    save_vocabularies,
)

log = logging.getLogger("headrace")
_STEP_METRICS_EVERY_S = 5.0
_EXAMPLES = 8
# What PyTorch and Python raise for a state that is of another model, or of no trainer's.
_DOES_NOT_FIT = (
    RuntimeError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    StepError,
)


class Trainer:
    """One run in one folder. Make it with `create` or `resume`."""

    def __init__(
        self,
        settings: TrainSettings,
        folder: RunFolder,
        *,
        cache: Path | None = None,
        quiet: bool = False,
    ) -> None:
        self.settings, self.folder = settings, folder
        self._cache = cache
        self._quiet = quiet
        self._best: dict[str, Any] = {}
        self._sums = Sums()
        self._left_early = False
        self._begun_ns: int | None = None

    @classmethod
    def create(
        cls,
        settings: TrainSettings,
        *,
        project: Path = Path("runs/train"),
        name: str | None = None,
        cache: Path | None = None,
        quiet: bool = False,
    ) -> Trainer:
        """A new run. What can be told to be wrong is told before there is a folder; then that and
        `config.yaml` come first."""
        settings.model()
        guards.check(settings, Plan.of(settings.plan))
        open_device(settings.device)
        if settings.weights is not None and not Path(settings.weights).exists():
            raise TranslationError(f"weights: {settings.weights} is not there")
        folder = RunFolder.create(project, name)
        folder.write_config(settings.to_dict())
        return cls(settings, folder, cache=cache, quiet=quiet)

    @classmethod
    def resume(cls, run: Path, *, cache: Path | None = None, quiet: bool = False) -> Trainer:
        """The run of a folder, to go on with: from its last checkpoint, or from the start if it
        was ended before the first."""
        folder = RunFolder.open(run)
        return cls(TrainSettings.read(folder.config), folder, cache=cache, quiet=quiet)

    def run(self) -> TrainResult:
        """Train to the end, or until a signal asks to stop. A finished run is left as it is."""
        stored = stored_result(self.folder)
        if stored is not None:
            log.warning(
                "%s is finished; to train its weights further: headrace train --weights %s …",
                self.folder.path,
                self.folder.path,
            )
            return stored
        with (
            self.folder.locked(),
            Progress(self.settings.epochs, self._quiet, gauges=self._gauges) as self._progress,
        ):
            guard = Guards(self.settings, self.folder, self._progress.final)
            self._set_up()  # nothing is lost yet: Ctrl-C ends it at once
            with (
                StopRequests(self.settings.grace, guard.overdue) as self._stop,
                guard.watchdog(self._device) as self._watchdog,
                MetricsLog(
                    self.folder.metrics,
                    self.folder.events if self.settings.tensorboard else None,
                    goes_on=True,
                ) as self._metrics,
                CheckpointWriter(
                    self._device, self.folder.state, self.settings.keep
                ) as self._writer,
                guard.telling(self._loader, lambda: self._engine.updates),
            ):
                first_batch = self._restore()
                with RunMonitor(
                    self._device,
                    self._metrics,
                    self.folder.metrics,
                    wanted=self.settings.monitor,
                    look_after=20 if self._plan.graphs == "off" else 100,
                ) as self._monitor:
                    while not self._is_done() and not self._stop.requested:
                        self._epoch(first_batch)
                        first_batch = 0
                result = self._end()
        try_report(self.folder.path)
        return result

    # --- setting up -------------------------------------------------------------------------------

    def _set_up(self) -> None:
        def tell(what: str, done: int, total: int) -> None:
            self._progress.status(f"{what} {done:,}/{total:,}")

        self._data = prepared_for(self.settings, self._cache, tell)
        self._progress.message(self._data.table())
        save_vocabularies(self.folder.path / "vocabulary", self._data.vocabularies)
        parts = assemble(self.settings, self._data, self._rescue)
        self._device, self._plan, self._model = parts.device, parts.plan, parts.model
        self._engine, self._loader, self._valid = parts.engine, parts.loader, parts.valid
        self._say_what_is_trained()

    def _say_what_is_trained(self) -> None:
        parameters = sum(p.numel() for p in self._model.parameters())
        batches = self._loader.sampler.batches
        self._progress.message(
            f"{self.settings.preset} model, {parameters / 1e6:.1f} M parameters, plan "
            f"{self._plan.name} ({self._plan.precision}) on {self._device.description()}; "
            f"{len(batches):,} batches an epoch, {batches.shapes} shapes, "
            f"{batches.waste:.1%} padding; {self.folder.path}"
        )

    # --- one epoch --------------------------------------------------------------------------------

    def _epoch(self, first_batch: int) -> None:
        engine, sampler, epoch = self._engine, self._loader.sampler, self._engine.epochs
        sampler.set_epoch(epoch)
        sampler.start_at(first_batch)
        if first_batch == 0:
            self._sums = Sums()
        before = Sums(self._sums.loss, self._sums.weight)
        self._progress.epoch_begins(epoch, len(sampler.batches), first_batch=first_batch)
        self._begun_ns = self._device.ledger.now_ns()
        self._watchdog.progress(f"epoch {epoch} begun at batch {first_batch}")
        saved_at = noted_at = time.monotonic()
        noted = self._sums.weight
        for info in engine.steps(
            self._loader, first_batch=first_batch, max_steps=self._steps_left()
        ):
            self._watchdog.progress(f"batch {info.batch} of epoch {epoch}")
            self._count(info.come_back)
            self._progress.on_step(info)
            self._monitor.on_step(engine.updates)
            now = time.monotonic()
            if now - noted_at > _STEP_METRICS_EVERY_S:
                self._note_step(tokens_per_s=(self._sums.weight - noted) / (now - noted_at))
                noted_at, noted = now, self._sums.weight
                self._monitor.note(engine.updates)
            if self._stop.requested:
                self._save()
                self._left_early = True
                return
            if now - saved_at > self.settings.save_every:
                self._save()
                saved_at = time.monotonic()
        self._watchdog.pause()
        self._monitor.end_epoch(engine.updates)
        result = engine.last_result
        assert result is not None
        self._sums = before
        for loss, weight in zip(result.losses, result.weights, strict=True):
            self._sums.add(loss, weight)
        self._end_epoch(result)

    def _steps_left(self) -> int | None:
        most = self.settings.max_steps
        return None if most is None else max(0, most - self._engine.updates)

    def _count(self, come_back: Iterable[DeferredValues]) -> None:
        for entry in come_back:
            self._sums.add(entry.values["loss"], entry.values["weight"])

    def _note_step(self, tokens_per_s: float) -> None:
        self._metrics.write(
            "step",
            self._engine.updates,
            epoch=self._engine.epochs,
            loss=self._sums.mean,
            tokens_per_s=tokens_per_s,
        )

    def _end_epoch(self, result: EpochResult) -> None:
        found = self._validate()
        figures = result.statistics
        self._metrics.write(
            "epoch",
            self._engine.updates,
            epoch=result.epoch,
            loss=self._sums.mean,
            tokens_per_s=figures.weight_per_s,
            data_wait_share=figures.data_wait_share,
            host_blocked_share=figures.host_blocked_share,
            peak_memory_bytes=figures.peak_memory_bytes,
            waits={wait.reason: wait.count for wait in result.waits.reasons},
            replays=figures.replays,
            **found,
        )
        self._progress.epoch_ends(result, found)
        self._keep_weights(result.epoch, found)
        self._save()

    def _validate(self) -> dict[str, float]:
        """Loss on the whole of valid, BLEU on a sample of it, with averaged weights if any."""
        self._progress.status("validating")
        with self._weights_to_use():
            result = self._engine.evaluate(self._valid)
            found = {"valid_loss": result.mean_loss, "valid_nll": result.metrics["nll"]}
            sample = self._data.texts("valid")[: self.settings.valid_sentences]
            if sample:
                scores, _ = self._trained().score(sample, beam=1)
                found["bleu"] = scores.bleu
        return found

    def _weights_to_use(self) -> Any:
        return nullcontext() if self._engine.ema is None else self._engine.ema.applied()

    def _trained(self) -> TrainedModel:
        return TrainedModel(
            self._model,
            self._data.vocabularies,
            self.settings,
            self._device,
            self._plan.precision,
        )

    # --- what is kept -----------------------------------------------------------------------------

    def _keep_weights(self, epoch: int, found: dict[str, float]) -> None:
        with self._weights_to_use():
            self._write_weights("last")
            value = (found.get("bleu", 0.0), -found["valid_nll"])
            if not self._best or value > tuple(self._best["value"]):
                self._best = {"epoch": epoch, "value": list(value)}
                self._write_weights("best")
            if self.settings.average_last:
                self._write_weights(f"epoch-{epoch:05}")
                for old in self._epochs_kept()[: -self.settings.average_last]:
                    old.unlink()

    def _write_weights(self, name: str) -> None:
        # On the run's own device, so that the wait for the copy is in its ledger.
        path = self.folder.weights / f"{name}.safetensors"
        weights_to_file(path, self._model.state_dict(), device=self._device)

    def _epochs_kept(self) -> list[Path]:
        return sorted(self.folder.weights.glob("epoch-*.safetensors"))

    def _save(self) -> None:
        """A checkpoint of this very moment. The losses up to here are waited for."""
        self._count(self._engine.settle("checkpoint"))
        state = {
            "engine": self._engine.state_dict(),
            "sums": [self._sums.loss, self._sums.weight],
            "best": self._best,
        }
        try:
            self._writer.save(state, self._engine.updates)
        except CheckpointError as problem:  # of the one before, written in the background
            log.warning("%s; training goes on, and another is written now", problem)
            self._writer.save(state, self._engine.updates)

    def _rescue(self, problem: BaseException) -> None:
        """An error has ended the loop between two batches: what was learned is kept. Not after a
        loss that is not finite: the weights may not be, either."""
        if not isinstance(problem, Exception) or isinstance(problem, NonFiniteError):
            return
        try:
            self._save()
        except HeadraceError as other:  # the error that ended the loop matters more
            log.warning("%s", other)

    def _restore(self) -> int:
        """Go back to the last checkpoint, if there is one. Returns the batch to go on with."""
        path = latest_checkpoint(self.folder.state)
        if path is None:
            return 0
        state = load_checkpoint(path)
        try:
            batch = self._engine.load_state_dict(state["engine"])
            self._sums, self._best = Sums(*map(float, state["sums"])), dict(state["best"])
        except _DOES_NOT_FIT as problem:
            raise TranslationError(
                f"{path}: does not fit the model or optimizer that {self.folder.config} asks for: "
                f"{' '.join(str(problem).split())[:200]}"
            ) from problem
        self._metrics.rewind(self._engine.updates)
        self._progress.message(
            f"going on from {path}: epoch {self._engine.epochs + 1}, batch {batch:,}"
        )
        return batch

    def _is_done(self) -> bool:
        return self._engine.epochs >= self.settings.epochs or self._steps_left() == 0

    # --- the end ----------------------------------------------------------------------------------

    def _end(self) -> TrainResult:
        updates = self._engine.updates
        if self._left_early or not self._is_done():
            self._writer.close()
            self._progress.final(
                f"stopped by {self._stop.requested} after {updates:,} updates; go on with: "
                f"headrace train --resume {self.folder.path}"
            )
            return TrainResult(self.folder, self._stop.requested, updates)
        self._engine.close()
        name = "best"
        if self._epochs_kept():
            name = "averaged"
            weights_to_file(self.folder.weights / "averaged.safetensors", self._averaged())
        load_weights(self._model, self.folder.weights / f"{name}.safetensors")
        split = "test" if "test" in self._data.splits else "valid"
        pairs = self._data.texts(split)
        self._progress.status(f"translating {split}")
        scores, found = self._trained().score(pairs, beam=self.settings.beam)
        self._metrics.write(
            split, updates, weights=name, bleu=scores.bleu, chrf=scores.chrf,
            signature=scores.bleu_signature,
        )  # fmt: skip
        examples = [(*pair, text) for pair, text in zip(pairs, found, strict=True)][:_EXAMPLES]
        result = TrainResult(self.folder, None, updates, scores, examples)
        result.store()
        try:
            self._writer.close()
        except CheckpointError as problem:  # it is finished: nobody will go on from there
            log.warning("%s", problem)
        return result

    def _averaged(self) -> dict[str, torch.Tensor]:
        """The mean of the last epochs' weights."""
        stored = [weights_from_file(path) for path in self._epochs_kept()]
        return {
            name: torch.stack([one[name].double() for one in stored]).mean(0).to(value.dtype)
            for name, value in stored[0].items()
        }

    def _gauges(self) -> Gauges:
        """For the progress line: what the ledger and the device say of this epoch so far."""
        if self._begun_ns is None:  # no epoch yet
            return Gauges()
        ledger = self._device.ledger
        elapsed_ms = max(1e-3, (ledger.now_ns() - self._begun_ns) / 1e6)
        waits = ledger.epoch_statistics()
        data_ms = waits["data"].total_ms
        return Gauges(
            memory_bytes=self._device.peak_memory() or None,
            data_wait_share=min(1.0, data_ms / elapsed_ms),
            host_blocked_share=min(1.0, max(0.0, waits.wall_ms - data_ms) / elapsed_ms),
            gpu_use_share=self._monitor.gpu_share(),
        )
