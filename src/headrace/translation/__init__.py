"""The reference trainer: translation with a Transformer, from raw text to a scored model.

    from headrace.translation import Trainer, TrainSettings

    result = Trainer.create(TrainSettings(preset="tiny", epochs=5)).run()
    print(result.scores)

`headrace train`, `evaluate`, `translate` and `prepare` are these. Names are loaded when used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.translation.batching import BatchPlan
    from headrace.translation.corpus import Corpus, read_corpus
    from headrace.translation.model import MODEL_PRESETS, ModelSettings, Translator
    from headrace.translation.objective import translation_loss
    from headrace.translation.outcome import TrainResult
    from headrace.translation.prepare import Prepared
    from headrace.translation.score import Scores
    from headrace.translation.search import beam_search, greedy
    from headrace.translation.settings import TrainSettings
    from headrace.translation.trained import TrainedModel
    from headrace.translation.trainer import Trainer

_HOMES = {
    "BatchPlan": "batching",
    "Corpus": "corpus",
    "MODEL_PRESETS": "model",
    "ModelSettings": "model",
    "Prepared": "prepare",
    "Scores": "score",
    "TrainResult": "outcome",
    "TrainSettings": "settings",
    "TrainedModel": "trained",
    "Trainer": "trainer",
    "Translator": "model",
    "beam_search": "search",
    "greedy": "search",
    "read_corpus": "corpus",
    "translation_loss": "objective",
}

__all__ = [
    "MODEL_PRESETS",
    "BatchPlan",
    "Corpus",
    "ModelSettings",
    "Prepared",
    "Scores",
    "TrainResult",
    "TrainSettings",
    "TrainedModel",
    "Trainer",
    "Translator",
    "beam_search",
    "greedy",
    "read_corpus",
    "translation_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace.translation' has no attribute {name!r}")
    return getattr(importlib.import_module(f"headrace.translation.{_HOMES[name]}"), name)
