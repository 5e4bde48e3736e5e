"""`headrace export`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import Cache, Quiet, Run, Weights, check_output_folder
from headrace.cli.output import print_line
from headrace.errors import CorpusError, TranslationError, usage_errors
from headrace.extras import require
from headrace.lifecycle import RunFolder
from headrace.progress import StatusLine

if TYPE_CHECKING:
    from headrace.translation import TrainedModel

_FORMATS = ("ctranslate2",)
_CHECKED_SENTENCES = 100
EXAMPLE = """\
Example:
$ headrace export runs/train/exp --to ctranslate2 --out my-model
"""


def export(
    run: Run,
    to: Annotated[str, typer.Option("--to", help="Format: ctranslate2.")] = "ctranslate2",
    out: Annotated[
        Path | None,
        typer.Option(help="New folder for the model.", show_default="RUN/ctranslate2"),
    ] = None,
    weights: Weights = "best",
    check: Annotated[
        bool,
        typer.Option(
            help="Translate up to 100 held-out sentences with both models, and fail if more than "
            "1 in 10 translations differ."
        ),
    ] = True,
    cache: Cache = None,
    quiet: Quiet = False,
) -> None:
    """Export a trained model for other programs.

    CTranslate2 translates fast on CPUs and GPUs, without PyTorch. Exporting
    needs CTranslate2: pip install 'headrace[export]'.
    """
    require("headrace export", "ctranslate2", "sentencepiece")
    from headrace.translation import TrainedModel, export_ctranslate2

    with usage_errors():
        if to not in _FORMATS:
            raise TranslationError(f"--to {to}: expected {' or '.join(_FORMATS)}")
        folder = out or RunFolder.open(run).path / to
        check_output_folder(folder)
        # Both models compute in float32 on the CPU, so that only rounding can differ.
        model = TrainedModel.load(run, weights=weights, device="cpu", precision="fp32")
    with StatusLine(quiet, log_level=logging.WARNING) as line:
        sentences = _held_out(model, run, cache, line) if check else []
        line.status(f"exporting {run}")
        comparison = export_ctranslate2(model, folder, check=sentences)
    if comparison is not None:
        print_line(f"{comparison.equal} of {comparison.sentences} translations are equal")
    print_line(str(folder))


def _held_out(model: TrainedModel, run: Path, cache: Path | None, line: StatusLine) -> list[str]:
    """Sentences that the model was not trained on: of the corpus, or those in `result.json`."""
    from headrace.translation import prepared_for, stored_result

    try:
        prepared = prepared_for(
            model.settings, cache, line.status, vocabularies=model.given_vocabularies
        )
        pairs = prepared.texts("test" if "test" in prepared.splits else "valid")
        sentences = [src for src, _ in pairs]
    except CorpusError as problem:
        stored = stored_result(RunFolder.open(run))
        if stored is None:
            raise CorpusError(
                f"there are no held-out sentences to check the export with: {problem}; --no-check "
                "exports without"
            ) from problem
        line.message(
            f"the corpus cannot be read ({problem}); checking with the run's examples",
            logging.WARNING,
        )
        sentences = [src for src, _, _ in stored.examples]
    return sentences[:: -(-len(sentences) // _CHECKED_SENTENCES) or 1]
