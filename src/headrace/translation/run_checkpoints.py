"""What a run needs to resume, saved and restored."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from headrace.checkpoint import CheckpointWriter, load_checkpoint
from headrace.engine import DeferredValues
from headrace.errors import (
    CheckpointError,
    HeadraceError,
    NonFiniteError,
    StepError,
    TranslationError,
)
from headrace.lifecycle import RunFolder
from headrace.progress import RecentLoss
from headrace.translation.build import RunParts
from headrace.translation.corpus.division import Division
from headrace.translation.result import remove_result
from headrace.translation.weights import WeightFiles

log = logging.getLogger("headrace")

# What loading a checkpoint of another model raises, or of something else altogether.
_CHECKPOINT_MISMATCH = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, StepError)


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
