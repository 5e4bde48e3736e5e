"""`headrace evaluate`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import Beam, Cache, DeviceName, Quiet, Run, Weights
from headrace.errors import TranslationError

Scored = Annotated[
    list[Path] | None,
    typer.Argument(help="Sentence pairs; none: the run's own held-out ones.", show_default=False),
]


def evaluate(
    run: Run,
    data: Scored = None,
    split: Annotated[
        str | None, typer.Option(help="valid or test; none: test if there is one.")
    ] = None,
    weights: Weights = "best",
    beam: Beam = None,
    device: DeviceName = "auto",
    lowercase: Annotated[bool, typer.Option(help="Also BLEU of everything in lower case.")] = False,
    cache: Cache = None,
    quiet: Quiet = False,
) -> None:
    """Score a trained model: BLEU and chrF, with their signatures.

    Without DATA, on the held-out sentences of the corpus it was trained on.
    """
    from headrace.translation import TrainedModel, prepared_for, read_pairs

    if split not in (None, "valid", "test"):
        raise TranslationError(f"split = {split!r}: expected valid or test")
    model = TrainedModel.load(run, weights=weights, device=device)
    settings = model.settings
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
        prepared = prepared_for(settings, cache)
        split = split or ("test" if "test" in prepared.splits else "valid")
        pairs = prepared.texts(split)
    scores, _ = model.score(pairs, beam=beam, lowercase=lowercase, watch=_watch(quiet))
    typer.echo(f"{len(pairs):,} sentences of {split}, {weights} weights")
    typer.echo(f"chrF {scores.chrf:.2f}   {scores.chrf_signature}")
    if scores.bleu_lower is not None:
        typer.echo(f"BLEU {scores.bleu_lower:.2f} in lower case")
    typer.echo(f"signature {scores.bleu_signature}")
    typer.echo(f"BLEU {scores.bleu:.2f}")


def _watch(quiet: bool) -> Callable[[int, int], object] | None:
    if quiet or not sys.stderr.isatty():
        return None
    return lambda done, total: typer.echo(
        f"\r{done:,}/{total:,}" + ("\n" if done == total else ""), err=True, nl=False
    )
