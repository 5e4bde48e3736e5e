"""The prepared corpus of a run, and the vocabularies that its folder keeps."""

from __future__ import annotations

from pathlib import Path

from headrace.device import Ledger
from headrace.lifecycle import RunFolder
from headrace.parallel import Ranks
from headrace.progress import ProgressLine
from headrace.translation.corpus.prepare import prepared_for
from headrace.translation.corpus.prepared import Prepared
from headrace.translation.corpus.vocabulary import Vocabulary
from headrace.translation.saved_model import (
    load_vocabularies,
    save_vocabularies,
    vocabularies_of_weights,
)
from headrace.translation.settings import TrainSettings


def prepare_run(
    settings: TrainSettings,
    folder: RunFolder,
    ranks: Ranks,
    cache: Path | None,
    progress: ProgressLine,
) -> Prepared:
    """The run's encoded corpus. Rank 0 prepares it; the others then find it in the cache."""
    ledger = Ledger()
    if not ranks.is_first:
        ranks.barrier(ledger)
    given = _given_vocabularies(settings, folder)
    data = prepared_for(settings, cache, progress.status, vocabularies=given)
    progress.end_status()
    progress.message(data.table())
    save_vocabularies(folder.path / "vocabulary", data.vocabularies)
    if ranks.is_first:
        ranks.barrier(ledger)
    return data


def _given_vocabularies(
    settings: TrainSettings, folder: RunFolder
) -> tuple[Vocabulary, Vocabulary] | None:
    """The vocabularies of the weights to start from, if they are a run's: with others, each of
    their embeddings would be that of another piece."""
    if settings.weights is None:
        return None
    own = folder.path / "vocabulary"
    if (own / "src.model").exists():  # the run has begun before
        return load_vocabularies(own, settings.joint)
    return vocabularies_of_weights(settings.weights, settings.joint)
