"""A trained model with its vocabularies: what translates.

A run's folder has all of it: `config.yaml`, `vocabulary/*.model`, `weights/*.safetensors`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.checkpoint import weights_from_file
from headrace.device import Device, open_device
from headrace.engine import autocast
from headrace.errors import TranslationError
from headrace.parallel import whole_weights
from headrace.runs import RunFolder
from headrace.translation.corpus.corpus import clean
from headrace.translation.corpus.vocabulary import Vocabulary
from headrace.translation.decode import translate_ids
from headrace.translation.model import EOS, Translator
from headrace.translation.score import Scores, score
from headrace.translation.settings import TrainSettings

Watch = Callable[[int, int], object]
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True)
class TrainedModel:
    """Translates sentences of `settings.src` into `settings.trg`."""

    model: Translator
    vocabularies: tuple[Vocabulary, Vocabulary]
    settings: TrainSettings
    device: Device
    precision: str | None = "fp32"

    @classmethod
    def load(
        cls, run: Path, *, weights: str = "best", device: str = "auto", precision: str = "auto"
    ) -> TrainedModel:
        """The model of a run's folder. `weights` is "best", "last", or a file's path."""
        folder = RunFolder.open(run)
        settings = TrainSettings.read(folder.config)
        where = open_device(device)
        vocabularies = load_vocabularies(folder.path / "vocabulary", settings.joint)
        model = new_model(settings, vocabularies)
        path = folder.weights / f"{weights}.safetensors" if "." not in weights else Path(weights)
        load_weights(model, path)
        model = model.to(where.torch_device).eval()
        chosen = settings.precision if precision == "auto" else precision
        return cls(model, vocabularies, settings, where, chosen_precision(chosen, where))

    def translate(
        self, sentences: Sequence[str], *, beam: int | None = None, watch: Watch | None = None
    ) -> list[str]:
        """One translation a sentence, in their order. An empty one has an empty translation."""
        source, target = self.vocabularies
        ids = [
            [*ids[: self.model.settings.max_length - 1], EOS] if ids else []
            for ids in source.encode([clean(sentence) for sentence in sentences])
        ]
        hypotheses = self.settings.beam if beam is None else beam
        with autocast(self.device, self.precision):
            found = translate_ids(self.model, ids, self.device, beam=hypotheses, progress=watch)
        # Pieces of single bytes may spell anything: a translation is one line of text.
        return [clean(_CONTROL.sub(" ", text)) for text in target.decode(found)]

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        beam: int | None = None,
        lowercase: bool = False,
        watch: Watch | None = None,
    ) -> tuple[Scores, list[str]]:
        """Translate the sources of `pairs` and compare with their targets."""
        found = self.translate([source for source, _ in pairs], beam=beam, watch=watch)
        references = [target for _, target in pairs]
        scores = score(found, references, language=self.settings.trg, lowercase=lowercase)
        return scores, found


def new_model(settings: TrainSettings, vocabularies: tuple[Vocabulary, Vocabulary]) -> Translator:
    """A model for these vocabularies, with weights drawn from the current random state."""
    source, target = vocabularies
    return Translator(settings.model(), len(source), len(target), joint=settings.joint)


def whole_copy(
    settings: TrainSettings,
    vocabularies: tuple[Vocabulary, Vocabulary],
    model: torch.nn.Module,
    device: Device,
) -> Translator:
    """A model of its own with all weights of one that is sharded over ranks: all of them have to
    ask for it. No random number is drawn."""
    drawn = torch.get_rng_state()
    copy = new_model(settings, vocabularies).to(device.torch_device)
    torch.set_rng_state(drawn)
    copy.load_state_dict(whole_weights(model))
    return copy


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Weights from a file, or from a run's folder (its best); what does not fit is named."""
    if path.is_dir():
        path = RunFolder.open(path).weights / "best.safetensors"
    if not path.exists():
        there = ", ".join(sorted(p.stem for p in path.parent.glob("*.safetensors")))
        if not there and (path.parent.parent / "config.yaml").exists():
            there = "none yet: a run has weights when its first epoch has ended"
        raise TranslationError(f"{path}: is not there; there is {there or 'none beside it'}")
    stored, own = weights_from_file(path), model.state_dict()
    for name in sorted(stored.keys() | own.keys()):
        found = tuple(stored[name].shape) if name in stored else "nothing"
        wanted = tuple(own[name].shape) if name in own else "nothing"
        if found != wanted:
            raise TranslationError(
                f"{path}: {name} is {found}, the model has {wanted}: expected weights of a model "
                "of the same size and vocabularies"
            )
    model.load_state_dict(stored)


def load_vocabularies(folder: Path, joint: bool) -> tuple[Vocabulary, Vocabulary]:
    source = Vocabulary.load(folder / "src.model")
    return source, source if joint else Vocabulary.load(folder / "trg.model")


def save_vocabularies(folder: Path, vocabularies: tuple[Vocabulary, Vocabulary]) -> None:
    """Keep a run's vocabularies. Those it has are never overwritten: its weights go with them."""
    if (folder / "src.model").exists():
        stored = load_vocabularies(folder, vocabularies[0] is vocabularies[1])
        if stored != vocabularies:
            raise TranslationError(
                f"{folder}: the corpus gives other vocabularies than this run was begun with: has "
                "it changed? Expected the same text and settings"
            )
        return
    folder.mkdir(exist_ok=True)
    source, target = vocabularies
    source.save(folder / "src.model")
    if target is not source:
        target.save(folder / "trg.model")


def chosen_precision(wanted: str, device: Device) -> str:
    """What "auto" means here: bf16 where the device is fast at it."""
    if wanted != "auto":
        return wanted
    return "bf16" if device.has_fast_bf16() else "fp32"
