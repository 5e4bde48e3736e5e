"""Validation after an epoch: the loss, BLEU, and translations of a few sentences."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from headrace.engine import Engine
from headrace.parallel import parallelism_of
from headrace.translation.build import RunParts
from headrace.translation.saved_model import TrainedModel, score_on_ranks, unsharded_copy
from headrace.translation.weights import load_weights


@dataclass(frozen=True)
class Validation:
    """Scores of the current weights, and (source, reference, translation) of some sentences."""

    scores: dict[str, float]
    samples: tuple[tuple[str, ...], ...]
    seconds: float


def validate(parts: RunParts) -> Validation:
    """The loss on all of valid, and BLEU on the first sentences of it. With an EMA, its weights are
    used. Neither random states nor the model's mode change."""
    begun_s = time.monotonic()
    settings, ranks = parts.settings, parts.ranks
    with averaged_weights(parts.engine):
        result = parts.engine.evaluate(parts.valid_loader)
        scores = {"valid_loss": result.mean_loss, "valid_nll": result.metrics["nll"]}
        pairs = parts.data.texts("valid")
        found: list[str] = []
        if pairs and (settings.valid_sentences or settings.samples):
            model = trained_model(parts)
            if scored := pairs[: settings.valid_sentences]:
                on_sample, found = score_on_ranks(model, scored, 1, ranks)
                scores["bleu"] = on_sample.bleu
            others = [source for source, _ in pairs[len(found) : settings.samples]]
            found = [*found, *(model.translate(others, beam=1) if others else ())]
    samples = zip(pairs[: settings.samples], found, strict=False)
    return Validation(
        scores, tuple((*pair, text) for pair, text in samples), time.monotonic() - begun_s
    )


def averaged_weights(engine: Engine) -> AbstractContextManager[object]:
    """Inside the block the model has its EMA weights, if the run keeps an EMA."""
    return nullcontext() if engine.ema is None else engine.ema.applied()


def trained_model(parts: RunParts, weights: Path | None = None) -> TrainedModel:
    """The model with its current weights, or with those in the file `weights`. An FSDP model is
    copied unsharded."""
    model, vocabularies = parts.model, parts.data.vocabularies
    if parallelism_of(parts.engine.model) == "fsdp":
        model = unsharded_copy(parts.settings, vocabularies, parts.model, parts.device)
    if weights is not None:
        load_weights(model, weights)
    return TrainedModel(model, vocabularies, parts.settings, parts.device, parts.plan.precision)
