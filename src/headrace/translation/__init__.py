"""The reference trainer: translation with a Transformer, from raw text to a scored model.

It takes settings and a corpus, and makes a run folder: weights, metrics, checkpoints and scores.
`headrace train`, `evaluate`, `translate` and `prepare` use it. Names are imported when first used.

    from headrace.translation import Trainer, TrainSettings

    result = Trainer.create(TrainSettings(preset="tiny", epochs=5)).run()
    print(result.scores)
"""

from __future__ import annotations

from headrace.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headrace.translation.corpus.batches import BatchPlan as BatchPlan
    from headrace.translation.corpus.corpus import Corpus as Corpus
    from headrace.translation.corpus.corpus import ScoredPairs as ScoredPairs
    from headrace.translation.corpus.corpus import read_corpus as read_corpus
    from headrace.translation.corpus.corpus import read_scored_pairs as read_scored_pairs
    from headrace.translation.corpus.corpus_report import describe_shared as describe_shared
    from headrace.translation.corpus.prepare import check_data as check_data
    from headrace.translation.corpus.prepare import prepared_for as prepared_for
    from headrace.translation.corpus.prepared import Prepared as Prepared
    from headrace.translation.decode import beam_search as beam_search
    from headrace.translation.decode import greedy as greedy
    from headrace.translation.export import ExportCheck as ExportCheck
    from headrace.translation.export import export_ctranslate2 as export_ctranslate2
    from headrace.translation.loss import translation_loss as translation_loss
    from headrace.translation.model import EOS as EOS
    from headrace.translation.model import Translator as Translator
    from headrace.translation.model_settings import MODEL_PRESETS as MODEL_PRESETS
    from headrace.translation.model_settings import ModelSettings as ModelSettings
    from headrace.translation.result import TrainResult as TrainResult
    from headrace.translation.result import stored_result as stored_result
    from headrace.translation.saved_model import LengthCounts as LengthCounts
    from headrace.translation.saved_model import TrainedModel as TrainedModel
    from headrace.translation.score import Scores as Scores
    from headrace.translation.settings import CHANGED_BY_RESUME as CHANGED_BY_RESUME
    from headrace.translation.settings import SECTIONS as SECTIONS
    from headrace.translation.settings import TrainSettings as TrainSettings
    from headrace.translation.settings import stored_values as stored_values
    from headrace.translation.trainer import Trainer as Trainer

__all__, __getattr__, __dir__ = lazy(__name__, __file__)
