"""The end of a run: its scores, and what is said if it ends before."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from headrace.checkpoint import CheckpointWriter
from headrace.child_processes import exit_with_children
from headrace.data import end_workers, loader_error
from headrace.errors import CheckpointError, LoaderError, NonFiniteError, OutOfMemoryError
from headrace.lifecycle import MetricsLog, NoMetrics, RunFolder
from headrace.progress import ProgressLine
from headrace.text_table import counted
from headrace.translation.build import RunParts
from headrace.translation.result import TrainResult
from headrace.translation.saved_model import score_on_ranks
from headrace.translation.validation import trained_model
from headrace.translation.weights import WeightFiles

log = logging.getLogger("headrace")
EXAMPLES = 8

# A run can be resumed after these. Any other error is a bug, or its settings are wrong.
_RESUMABLE = (LoaderError, OutOfMemoryError, NonFiniteError, CheckpointError)


def score_run(
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
    model = trained_model(parts, weight_files.path(name))
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
    result = TrainResult(folder, None, updates, scores, examples[:EXAMPLES], ended_early)
    if parts.ranks.is_first:
        result.store()
    return result


def close_unneeded(writer: CheckpointWriter) -> None:
    """Close the writer of a finished run. If its last checkpoint failed, a warning is enough."""
    try:
        writer.close()
    except CheckpointError as problem:
        log.warning("%s", problem)


def exit_after_grace(grace_s: float, folder: RunFolder, show: Callable[[str], object]) -> None:
    """End the process, because the run has not stopped within the grace time after SIGTERM."""
    show(f"not stopped {grace_s:g} s after SIGTERM: exiting now; {how_to_resume(folder)}")
    exit_with_children(128 + signal.SIGTERM)


@contextmanager
def closing_loader(
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
                f"{how_to_resume(folder)}"
            )
        if known is not problem:
            raise known from problem
        raise
    finally:
        end_workers(parts.loader)


def how_to_resume(folder: RunFolder) -> str:
    return f"resume with: headrace train --resume {folder.path}"
