"""The reference trainer: translation with a Transformer, from raw text to a scored model.

It takes settings and a corpus, and makes a run folder: weights, metrics, checkpoints and scores.
`headrace train`, `evaluate`, `translate` and `prepare` use it. Names are imported when first used.

    from headrace.translation import Trainer, TrainSettings

    result = Trainer.create(TrainSettings(preset="tiny", epochs=5)).run()
    print(result.scores)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.translation.corpus.batches import BatchPlan
    from headrace.translation.corpus.corpus import (
        Corpus,
        ScoredPairs,
        describe_shared,
        read_corpus,
        read_pairs,
        read_scored_pairs,
    )
    from headrace.translation.corpus.prepare import check_data, prepared_for
    from headrace.translation.corpus.prepared import Prepared
    from headrace.translation.decode import beam_search, greedy
    from headrace.translation.export import (
        Comparison,
        export_ctranslate2,
        require_ctranslate2,
    )
    from headrace.translation.loss import translation_loss
    from headrace.translation.model import EOS, MODEL_PRESETS, ModelSettings, Translator
    from headrace.translation.result import TrainResult, stored_result
    from headrace.translation.saved_model import LengthCounts, TrainedModel
    from headrace.translation.score import Scores
    from headrace.translation.settings import (
        CHANGED_BY_RESUME,
        SECTIONS,
        TrainSettings,
        stored_values,
    )
    from headrace.translation.trainer import Trainer

_HOMES = {
    "CHANGED_BY_RESUME": "settings",
    "EOS": "model",
    "MODEL_PRESETS": "model",
    "SECTIONS": "settings",
    "BatchPlan": "corpus.batches",
    "Comparison": "export",
    "Corpus": "corpus.corpus",
    "LengthCounts": "saved_model",
    "ModelSettings": "model",
    "Prepared": "corpus.prepared",
    "ScoredPairs": "corpus.corpus",
    "Scores": "score",
    "TrainResult": "result",
    "TrainSettings": "settings",
    "TrainedModel": "saved_model",
    "Trainer": "trainer",
    "Translator": "model",
    "beam_search": "decode",
    "check_data": "corpus.prepare",
    "describe_shared": "corpus.corpus",
    "export_ctranslate2": "export",
    "greedy": "decode",
    "prepared_for": "corpus.prepare",
    "read_corpus": "corpus.corpus",
    "read_pairs": "corpus.corpus",
    "read_scored_pairs": "corpus.corpus",
    "require_ctranslate2": "export",
    "stored_result": "result",
    "stored_values": "settings",
    "translation_loss": "loss",
}

__all__ = [
    "CHANGED_BY_RESUME",
    "EOS",
    "MODEL_PRESETS",
    "SECTIONS",
    "BatchPlan",
    "Comparison",
    "Corpus",
    "LengthCounts",
    "ModelSettings",
    "Prepared",
    "ScoredPairs",
    "Scores",
    "TrainResult",
    "TrainSettings",
    "TrainedModel",
    "Trainer",
    "Translator",
    "beam_search",
    "check_data",
    "describe_shared",
    "export_ctranslate2",
    "greedy",
    "prepared_for",
    "read_corpus",
    "read_pairs",
    "read_scored_pairs",
    "require_ctranslate2",
    "stored_result",
    "stored_values",
    "translation_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
