"""`headrace evaluate`."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import Beam, Cache, DeviceName, Quiet, Run, Weights
from headrace.errors import TranslationError, usage_errors
from headrace.runs import StatusLine

if TYPE_CHECKING:
    from headrace.translation import LengthCounts

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
        typer.Option(help="valid or test.", show_default="test, or valid if there is no test"),
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
    from headrace.translation import TrainedModel, prepared_for, read_pairs

    with usage_errors():
        if split not in (None, "valid", "test"):
            raise TranslationError(f"--split {split}: expected valid or test")
        model = TrainedModel.load(run, weights=weights, device=device)
    settings, scored_on = model.settings, None
    with StatusLine(quiet, log_level=logging.INFO) as line:
        if data:
            split = split or "test"
            pairs = read_pairs(
                data if len(data) > 1 else data[0],
                src=settings.src,
                trg=settings.trg,
                split=split,
                skip_bad=settings.skip_bad,
            )
        else:
            prepared = prepared_for(settings, cache, line.status)
            split = split or ("test" if "test" in prepared.splits else "valid")
            with usage_errors():  # the corpus may have no test split
                pairs = prepared.texts(split)
            scored_on = prepared.describe_novelty(split)
        show = partial(line.status, f"translating {split}")
        scores, _ = model.score(pairs, beam=beam, lowercase=lowercase, watch=show)
    counts = model.count_lengths([src for src, _ in pairs], [trg for _, trg in pairs])
    typer.echo(f"{len(pairs):,} sentences of {split}, {weights} weights{_long_sentences(counts)}")
    if scored_on is not None:
        typer.echo(scored_on)
    typer.echo(f"chrF {scores.chrf:.2f}   {scores.chrf_signature}")
    if scores.bleu_lower is not None:
        typer.echo(f"BLEU {scores.bleu_lower:.2f} lowercased")
    typer.echo(f"signature {scores.bleu_signature}")
    typer.echo(f"BLEU {scores.bleu:.2f}")


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
