"""A trained model with its vocabularies, for translating and scoring.

It is loaded from a run folder: `config.yaml`, `vocabulary/*.model`, `weights/*.safetensors`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.atomic_files import replace_file
from headrace.device import Device, open_device
from headrace.engine import autocast
from headrace.errors import RunError, TranslationError
from headrace.lifecycle import RunFolder
from headrace.parallel import Ranks, full_state_dict
from headrace.translation.corpus.corpus import clean
from headrace.translation.corpus.vocabulary import Vocabulary
from headrace.translation.decode import translate_ids
from headrace.translation.model import EOS, Translator, new_model
from headrace.translation.score import Scores, score
from headrace.translation.settings import TrainSettings, resolve_precision
from headrace.translation.weights import load_weights, run_of_weights

#: Called with the number of translated sentences and of all.
Watch = Callable[[int, int], object]
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True, slots=True)
class LengthCounts:
    """How many sentences are empty, and how many are too long. Lengths are in tokens, with eos."""

    sentences: int
    empty: int
    cut: int  # longer than `model_limit`: only their beginning is translated
    model_limit: int
    longer_than_trained: int  # longer than `training_limit`: training dropped such pairs
    training_limit: int


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
        """Load the model of a run folder. `weights` is "best", "last" or the path of a file."""
        folder = RunFolder.open(run)
        settings = TrainSettings.read(folder.config)
        opened = open_device(device)
        vocabularies = load_vocabularies(folder.path / "vocabulary", settings.joint)
        model = new_model(settings.model(), vocabularies)
        path = folder.weights / f"{weights}.safetensors" if "." not in weights else Path(weights)
        load_weights(model, path)
        model = model.to(opened.torch_device).eval()
        chosen = settings.precision if precision == "auto" else precision
        return cls(model, vocabularies, settings, opened, resolve_precision(chosen, opened))

    @property
    def given_vocabularies(self) -> tuple[Vocabulary, Vocabulary] | None:
        """What `prepared_for` needs to find this run's corpus in the cache."""
        return None if self.settings.weights is None else self.vocabularies

    def translate(
        self, sentences: Sequence[str], *, beam: int | None = None, watch: Watch | None = None
    ) -> list[str]:
        """Translate sentences, in order. An empty sentence gets an empty translation.

        `watch` is called with the number of translated sentences and of all.
        """
        ids = self.encode(sentences)
        hypotheses = self.settings.beam if beam is None else beam
        with autocast(self.device, self.precision):
            found = translate_ids(self.model, ids, self.device, beam=hypotheses, progress=watch)
        return self.decode(found)

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """The source ids of each sentence with eos, cut at the model's maximum length. An empty
        sentence has none."""
        longest = self.model.settings.max_length - 1
        encoded = self.vocabularies[0].encode([clean(sentence) for sentence in sentences])
        return [[*ids[:longest], EOS] if ids else [] for ids in encoded]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The text of target ids, each on one line."""
        # Byte pieces may spell control characters.
        return [clean(_CONTROL.sub(" ", text)) for text in self.vocabularies[1].decode(ids)]

    def count_lengths(
        self, sentences: Sequence[str], references: Sequence[str] = ()
    ) -> LengthCounts:
        """Count the sentences that are empty or too long for this model.

        A pair counts as longer than training's if its sentence or its reference is, as in training.
        """
        source, target = self.vocabularies
        lengths = [len(ids) + 1 for ids in source.encode([clean(text) for text in sentences])]
        longer = [length > self.settings.max_length for length in lengths]
        if references:
            encoded = target.encode([clean(text) for text in references])
            # The target side has bos and eos.
            trg_longer = [len(ids) + 2 > self.settings.max_length for ids in encoded]
            longer = [src or trg for src, trg in zip(longer, trg_longer, strict=True)]
        model_limit = self.model.settings.max_length
        return LengthCounts(
            sentences=len(lengths),
            empty=lengths.count(1),
            cut=sum(length > model_limit for length in lengths),
            model_limit=model_limit,
            longer_than_trained=sum(longer),
            training_limit=self.settings.max_length,
        )

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        beam: int | None = None,
        lowercase: bool = False,
        watch: Watch | None = None,
    ) -> tuple[Scores, list[str]]:
        """Translate the sources of `pairs` and score the translations against their targets."""
        found = self.translate([source for source, _ in pairs], beam=beam, watch=watch)
        references = [target for _, target in pairs]
        scores = score(found, references, language=self.settings.trg, lowercase=lowercase)
        return scores, found


def unsharded_copy(
    settings: TrainSettings,
    vocabularies: tuple[Vocabulary, Vocabulary],
    model: torch.nn.Module,
    device: Device,
) -> Translator:
    """A copy of a model that is sharded over ranks, with all its weights.

    All ranks must call it. The random state does not change.
    """
    random_state = torch.get_rng_state()
    copy = new_model(settings.model(), vocabularies).to(device.torch_device)
    torch.set_rng_state(random_state)
    copy.load_state_dict(full_state_dict(model))
    return copy


def score_on_ranks(
    model: TrainedModel, pairs: Sequence[tuple[str, str]], beam: int, ranks: Ranks
) -> tuple[Scores, list[str]]:
    """Translate and score `pairs`, divided among the ranks. All ranks return the same result."""
    mine = model.translate([src for src, _ in pairs[ranks.rank :: ranks.size]], beam=beam)
    shares = ranks.all_gather(mine, model.device.ledger)
    found = [shares[at % ranks.size][at // ranks.size] for at in range(len(pairs))]
    return score(found, [trg for _, trg in pairs], language=model.settings.trg), found


def load_vocabularies(folder: Path, joint: bool) -> tuple[Vocabulary, Vocabulary]:
    source = Vocabulary.load(folder / "src.model")
    return source, source if joint else Vocabulary.load(folder / "trg.model")


def vocabularies_of_weights(weights: str, joint: bool) -> tuple[Vocabulary, Vocabulary] | None:
    """The vocabularies of the run whose weights these are. None if there is no such run."""
    run = run_of_weights(weights)
    if run is None or not (run / "vocabulary" / "src.model").is_file():
        return None
    is_joint = TrainSettings.read(run / "config.yaml").joint
    if joint != is_joint:
        raise TranslationError(
            f"joint = {str(joint).lower()}: the run of weights = {weights} has joint = "
            f"{str(is_joint).lower()}; expected the same"
        )
    return load_vocabularies(run / "vocabulary", joint)


def save_vocabularies(folder: Path, vocabularies: tuple[Vocabulary, Vocabulary]) -> None:
    """Store a run's vocabularies. Raises if it already has others: its weights belong to those."""
    if (folder / "src.model").exists():
        stored = load_vocabularies(folder, vocabularies[0] is vocabularies[1])
        if stored != vocabularies:
            raise TranslationError(
                f"{folder}: differs from the vocabularies that the corpus gives now; expected the "
                "same corpus as when this run started. Has it changed?"
            )
        return
    try:
        folder.mkdir(exist_ok=True)
    except OSError as problem:
        raise RunError(f"{folder}: cannot be made ({problem.strerror})") from problem
    source, target = vocabularies
    # The source comes last: where it is, the other is, too.
    if target is not source:
        replace_file(folder / "trg.model", target.model, RunError)
    replace_file(folder / "src.model", source.model, RunError)
