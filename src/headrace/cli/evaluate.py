"""`headrace evaluate`."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import Beam, Cache, DeviceName, Quiet, Run, Weights
from headrace.cli.output import print_line
from headrace.errors import CorpusError, TranslationError, usage_errors
from headrace.extras import require
from headrace.progress import StatusLine

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.translation import LengthCounts, Prepared, ScoredPairs, TrainedModel

Scored = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Files or a folder of sentence pairs.",
        show_default="the held-out pairs of the training corpus",
    ),
]


EXAMPLE = """\
Examples:
$ headrace evaluate runs/train/exp
$ headrace evaluate runs/train/exp newstest.tsv --weights last --beam 5
"""


def evaluate(
    run: Run,
    data: Scored = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="valid or test, of a folder or of the held-out pairs.",
            show_default="test, or valid if there is no test",
        ),
    ] = None,
    weights: Weights = "best",
    beam: Beam = None,
    device: DeviceName = "auto",
    lowercase: Annotated[bool, typer.Option(help="Also print BLEU of lowercased text.")] = False,
    cache: Cache = None,
    quiet: Quiet = False,
) -> None:
    """Score a trained model with BLEU and chrF.

    The signatures that are printed say how sacrebleu computed each score.
    """
    require("headrace evaluate", "sacrebleu", "sentencepiece")
    from headrace.translation import TrainedModel, prepared_for, read_scored_pairs

    with usage_errors():
        if split not in (None, "valid", "test"):
            raise TranslationError(f"--split {split}: expected valid or test")
        model = TrainedModel.load(run, weights=weights, device=device)
    settings, left_out = model.settings, ""
    prepared_for_run = partial(prepared_for, settings, cache, vocabularies=model.given_vocabularies)
    with StatusLine(quiet, log_level=logging.INFO) as line:
        if data:
            scored = read_scored_pairs(
                data if len(data) > 1 else data[0],
                src=settings.src,
                trg=settings.trg,
                split=split,
                skip_bad=settings.skip_bad,
            )
            name, pairs, left_out = scored.name, scored.pairs, _left_out(scored)
            scored_on = _check_novelty(model, scored, prepared_for_run)
        else:
            prepared = prepared_for_run(progress=line.status)
            name = split or ("test" if "test" in prepared.splits else "valid")
            with usage_errors():  # the corpus may have no test split
                pairs = prepared.texts(name)
            scored_on = prepared.describe_scored(name)
        show = partial(line.status, f"translating {name}")
        scores, _ = model.score(pairs, beam=beam, lowercase=lowercase, watch=show)
    lengths = model.count_lengths([src for src, _ in pairs], [trg for _, trg in pairs])
    sentences = "1 sentence" if len(pairs) == 1 else f"{len(pairs):,} sentences"
    print_line(f"{sentences} of {name}, {weights} weights{left_out}{_long_sentences(lengths)}")
    print_line(scored_on)
    print_line(f"chrF {scores.chrf:.2f}   {scores.chrf_signature}")
    if scores.bleu_lower is not None:
        print_line(f"BLEU {scores.bleu_lower:.2f} lowercased")
    print_line(f"signature {scores.bleu_signature}")
    print_line(f"BLEU {scores.bleu:.2f}")


def _left_out(scored: ScoredPairs) -> str:
    """How many pairs of a user's files could not be scored."""
    counts = {"empty": scored.counts.empty, "malformed": scored.counts.malformed}
    return "".join(
        f"; {count:,} {name} pair{'' if count == 1 else 's'} left out"
        for name, count in counts.items()
        if count
    )


def _check_novelty(
    model: TrainedModel, scored: ScoredPairs, find_prepared: Callable[..., Prepared]
) -> str:
    """Whether training saw the sentences of a user's files. The run's prepared corpus must be in
    the cache: it is not prepared again for this."""
    from headrace.translation import describe_shared

    try:
        prepared = find_prepared(cached_only=True)
    except CorpusError as problem:
        return _unchecked(scored.name, str(problem))
    if prepared.vocabularies != model.vocabularies:
        return _unchecked(scored.name, "the corpus has changed since")
    return describe_shared(scored.name, prepared.count_shared(scored.pairs), len(scored.pairs))


def _unchecked(name: str, reason: str) -> str:
    return f"{name}: could not check whether train has its sentences ({reason})"


def _long_sentences(counts: LengthCounts) -> str:
    """What to know of a score: how many sentences are longer than those of training."""
    text = ""
    if counts.longer_than_trained:
        text += (
            f"; {counts.longer_than_trained:,} longer than in training "
            f"(over {counts.training_limit} tokens)"
        )
    if counts.cut:
        text += f"; {counts.cut:,} cut at {counts.model_limit} tokens, the model's maximum"
    return text
