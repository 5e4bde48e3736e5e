"""The trainer: a run from its settings to its scores, and from any interruption on.

    result = Trainer.create(TrainSettings(preset="tiny", epochs=5)).run()
    print(result.scores, result.folder.path)

What a run does follows from its settings and its seed alone. It may be killed at any moment:
`Trainer.resume(folder).run()` goes on from the last checkpoint, from the very next batch.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from headrace.checkpoint import CheckpointWriter, agreed_checkpoint, load_checkpoint
from headrace.device import Ledger, open_device
from headrace.engine import DeferredValues, EpochResult
from headrace.errors import (
    CheckpointError,
    HeadraceError,
    NonFiniteError,
    StepError,
    TranslationError,
)
from headrace.parallel import SINGLE, Agreement, Ranks, own_device, spread_of
from headrace.plan import Plan, in_force
from headrace.report import try_report
from headrace.runs import Gauges, RunFolder, StopRequests
from headrace.translation import guards
from headrace.translation.build import assemble, check_files, prepared_for
from headrace.translation.guards import Guards
from headrace.translation.result import Sums, TrainResult, is_of_an_end_after, stored_result
from headrace.translation.saved_model import (
    TrainedModel,
    load_weights,
    save_vocabularies,
    whole_copy,
)
from headrace.translation.settings import TrainSettings
from headrace.translation.together import (
    batches_left,
    gauges_of,
    new_folder,
    new_metrics,
    new_monitor,
    new_progress,
    translate_and_score,
)
from headrace.translation.weights import KeptWeights

log = logging.getLogger("headrace")
_STEP_METRICS_EVERY_S = 5.0
_EXAMPLES = 8
# What PyTorch and Python raise for a state that is of another model, or of no trainer's.
_DOES_NOT_FIT = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, StepError)


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
        self._ranks = ranks
        self._stopped: str | None = None
        self.settings, self.folder = settings, folder
        self._cache = cache
        self._quiet = quiet
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
        ranks: Ranks = SINGLE,
    ) -> Trainer:
        """A new run. What can be told to be wrong is told before there is a folder; then that and
        `config.yaml` come first. Of several `ranks` the first makes it, for all."""
        settings.model()
        guards.check(settings, in_force(Plan.of(settings.plan)))
        open_device(own_device(settings.device))
        check_files(settings)
        folder = new_folder(ranks, settings, project, name)
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
        stored = stored_result(self.folder)
        if stored is not None:
            log.warning(
                "%s is finished; to train its weights further: headrace train --weights %s …",
                self.folder.path,
                self.folder.path,
            )
            return stored
        with (
            self.folder.locked() if self._ranks.is_first else nullcontext(),
            new_progress(self._ranks, self.settings, self._quiet, self._gauges) as self._progress,
        ):
            guard = Guards(self.settings, self.folder, self._progress.final, self._ranks.rank)
            self._set_up()  # nothing is lost yet: Ctrl-C ends it at once
            with (
                StopRequests(
                    self.settings.grace, guard.overdue, patient=self._ranks.several
                ) as self._stop,
                guard.watchdog(self._device) as self._watchdog,
                new_metrics(self._ranks, self.folder, self.settings) as self._metrics,
                CheckpointWriter(
                    self._device, self.folder.state, self.settings.keep, ranks=self._ranks
                ) as self._writer,
                guard.telling(self._loader, lambda: self._engine.updates),
            ):
                first_batch = self._restore()
                with new_monitor(
                    *(self._ranks, self._device, self._metrics, self.folder),
                    *(self.settings, self._engine),
                ) as self._monitor:
                    while not (self._left_early or self._is_done() or self._asked_to_stop()):
                        self._epoch(first_batch)
                        first_batch = 0
                result = self._end()
        if self._ranks.is_first:
            try_report(self.folder.path)
        return result

    # --- setting up -------------------------------------------------------------------------------

    def _set_up(self) -> None:
        def tell(what: str, done: int, total: int) -> None:
            self._progress.status(f"{what} {done:,}/{total:,}")

        ledger = Ledger()
        if not self._ranks.is_first:
            self._ranks.barrier(ledger)  # what the first has prepared is there for all
        self._data = prepared_for(self.settings, self._cache, tell)
        self._progress.message(self._data.table())
        save_vocabularies(self.folder.path / "vocabulary", self._data.vocabularies)
        if self._ranks.is_first:
            self._ranks.barrier(ledger)
        parts = assemble(self.settings, self._data, self._rescue, self._ranks)
        self._agreement = Agreement(self._ranks, parts.device)
        self._kept = KeptWeights(
            *(self.folder.weights, parts.model, parts.device, self._ranks),
            average_last=self.settings.average_last,
        )
        self._device, self._plan, self._model = parts.device, parts.plan, parts.model
        self._engine, self._loader, self._valid = parts.engine, parts.loader, parts.valid
        self._say_what_is_trained()

    def _say_what_is_trained(self) -> None:
        parameters = sum(p.numel() for p in self._model.parameters())
        batches, ranks = self._loader.sampler.batches, self._ranks
        among = f", {ranks.size} ranks ({self.settings.parallel})" if ranks.several else ""
        self._progress.message(
            f"{self.settings.preset} model, {parameters / 1e6:.1f} M parameters, plan "
            f"{self._plan.name} ({self._plan.precision}) on {self._device.description()}"
            f"{among}; "
            f"{len(batches):,} batches an epoch, {batches.shapes} shapes, "
            f"{batches.waste:.1%} padding; {self.folder.path}"
        )

    def _asked_to_stop(self) -> bool:
        """Between two epochs: whether any rank was asked to."""
        return self._note_stop(self._agreement.settle(self._stop.number)[0])

    def _note_stop(self, number: int) -> bool:
        if number:
            self._stopped = signal.Signals(number).name
        return number > 0

    # --- one epoch --------------------------------------------------------------------------------

    def _epoch(self, first_batch: int) -> None:
        engine, sampler, epoch = self._engine, self._loader.sampler, self._engine.epochs
        sampler.set_epoch(epoch)
        sampler.start_at(first_batch)
        if first_batch == 0:
            self._sums = Sums()
        before = Sums(self._sums.loss, self._sums.weight)
        left = self._steps_left()
        most = None if left is None else left * self.settings.accumulate
        each = len(sampler.batches)
        self._progress.epoch_begins(epoch, each, first_batch=first_batch, most=most)
        self._begun_ns = self._device.ledger.now_ns()
        self._watchdog.progress(f"epoch {epoch} begun at batch {first_batch}")
        saved_at = noted_at = time.monotonic()
        noted: float | None = None
        for info in engine.steps(self._loader, first_batch=first_batch, max_steps=left):
            self._watchdog.progress(f"batch {info.batch} of epoch {epoch}")
            self._count(info.come_back)
            if noted is None:  # what was restored is of an earlier time
                noted = self._sums.weight
            self._progress.on_step(info)
            left_in_run = batches_left(self.settings, engine, each, info.batch)
            self._monitor.on_step(engine.updates, left_in_run, each - info.batch - 1)
            now = time.monotonic()
            if now - noted_at > _STEP_METRICS_EVERY_S:
                self._note_step(tokens_per_s=(self._sums.weight - noted) / (now - noted_at))
                noted_at, noted = now, self._sums.weight
                self._monitor.note(engine.updates)
            if self._ranks.several and not engine.is_between_updates:
                continue
            due = self._ranks.is_first and now - saved_at > self.settings.save_every
            stop, save = self._agreement.look(self._stop.number, int(due))
            if self._note_stop(stop):
                self._save()
                engine.leave()
                self._left_early = True
                return
            if save:
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
        result = replace(result, mean_loss=self._sums.mean)  # of all of it, also if it was resumed
        self._progress.epoch_ends(result, {k: v for k, v in found.items() if k != "valid_nll"})
        with self._weights_to_use():
            self._kept.keep(result.epoch, found)
        self._save()

    def _validate(self) -> dict[str, float]:
        """Loss on the whole of valid, BLEU on a sample of it, with averaged weights if any."""
        self._progress.status("validating")
        with self._weights_to_use():
            result = self._engine.evaluate(self._valid)
            found = {"valid_loss": result.mean_loss, "valid_nll": result.metrics["nll"]}
            sample = self._data.texts("valid")[: self.settings.valid_sentences]
            if sample:
                scores, _ = translate_and_score(self._trained(), sample, 1, self._ranks)
                found["bleu"] = scores.bleu
        return found

    def _weights_to_use(self) -> Any:
        return nullcontext() if self._engine.ema is None else self._engine.ema.applied()

    def _trained(self, weights: Path | None = None) -> TrainedModel:
        """The model as it is, or with `weights`; of a sharded one, a copy that is whole."""
        model = self._model
        if spread_of(self._engine.model) == "fsdp":
            model = whole_copy(self.settings, self._data.vocabularies, self._model, self._device)
        if weights is not None:
            load_weights(model, weights)
        return TrainedModel(
            model,
            self._data.vocabularies,
            self.settings,
            self._device,
            self._plan.precision,
        )

    # --- what is kept -----------------------------------------------------------------------------

    def _save(self) -> None:
        """A checkpoint of this very moment. Its losses are waited for, while the device copies the
        state: one that is not finite is to end the run before it is written."""
        if self._ranks.several:
            self._settle()  # values that are not summed yet are no rank's to keep
        state = {
            "engine": self._engine.state_dict(),
            "sums": [self._sums.loss, self._sums.weight],
            "best": self._kept.best,
        }
        save = partial(self._writer.save, state, self._engine.updates, unless_raised=self._settle)
        try:
            save()
        except CheckpointError as problem:  # of the one before, written in the background
            log.warning("%s; training goes on, and another is written now", problem)
            save()

    def _settle(self) -> None:
        self._count(self._engine.settle("checkpoint"))

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
        path = agreed_checkpoint(self.folder.state, self._ranks, self._device.ledger)
        if path is None:
            self._metrics.rewind(0, partial(is_of_an_end_after, 0))
            return 0
        state = load_checkpoint(path, parts=self._ranks.several)
        try:
            batch = self._engine.load_state_dict(state["engine"])
            self._sums, self._kept.best = Sums(*map(float, state["sums"])), dict(state["best"])
        except _DOES_NOT_FIT as problem:
            raise TranslationError(
                f"{path}: does not fit the model or optimizer that {self.folder.config} asks for: "
                f"{' '.join(str(problem).split())[:200]}"
            ) from problem
        epochs = self._engine.epochs
        self._metrics.rewind(self._engine.updates, partial(is_of_an_end_after, epochs))
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
                f"stopped by {self._stopped} after {updates:,} updates; go on with: "
                f"headrace train --resume {self.folder.path}"
            )
            return TrainResult(self.folder, self._stopped, updates)
        self._engine.close()
        name = self._kept.to_use()
        trained = self._trained(self._kept.path(name))
        split = "test" if "test" in self._data.splits else "valid"
        pairs = self._data.texts(split)
        self._progress.status(f"translating {split}")
        scores, found = translate_and_score(trained, pairs, self.settings.beam, self._ranks)
        self._metrics.write(
            split, updates, weights=name, bleu=scores.bleu, chrf=scores.chrf,
            signature=scores.bleu_signature,
        )  # fmt: skip
        examples = [(*pair, text) for pair, text in zip(pairs, found, strict=True)][:_EXAMPLES]
        result = TrainResult(self.folder, None, updates, scores, examples)
        if self._ranks.is_first:
            result.store()
        try:
            self._writer.close()
        except CheckpointError as problem:  # it is finished: nobody will go on from there
            log.warning("%s", problem)
        return result

    def _gauges(self) -> Gauges:
        if self._begun_ns is None:  # no epoch yet
            return Gauges()
        return gauges_of(self._device, self._begun_ns, self._monitor)
