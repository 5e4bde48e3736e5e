"""`headrace translate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import Beam, DeviceName, Run, Weights
from headrace.errors import TranslationError

EXAMPLE = """\
Examples:
$ headrace translate runs/train/exp "你好。"
$ headrace translate runs/train/exp --file input.txt > output.txt
"""


def translate(
    run: Run,
    sentences: Annotated[
        list[str] | None,
        typer.Argument(help="Sentences to translate.", show_default="stdin, one per line"),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Text file with one sentence per line.")
    ] = None,
    weights: Weights = "best",
    beam: Beam = None,
    device: DeviceName = "auto",
) -> None:
    """Translate sentences with a trained model.

    The command prints one line per sentence, in the same order.
    """
    from headrace.translation import TrainedModel

    if file is not None and sentences:
        raise TranslationError(
            "found sentences and --file: expected one of them; leave out the other"
        )
    if file is not None:
        try:
            # Split at "\n" only, as corpora are: one line of output for each line.
            text = file.read_bytes().decode("utf-8-sig")
        except OSError as problem:
            raise TranslationError(f"{file}: cannot be read ({problem.strerror})") from problem
        except UnicodeDecodeError as problem:
            number = problem.object.count(b"\n", 0, problem.start) + 1
            raise TranslationError(f"{file}:{number}: is not UTF-8 text ({problem})") from problem
        given = text.removesuffix("\n").split("\n") if text else []
    elif sentences:
        given = sentences
    else:
        given = [line.rstrip("\n") for line in sys.stdin]
    for number, line in enumerate(given, 1):
        if any("\ud800" <= letter <= "\udfff" for letter in line):
            raise TranslationError(f"sentence {number}: is not UTF-8 text")
    model = TrainedModel.load(run, weights=weights, device=device)
    for line in model.translate(given, beam=beam):
        typer.echo(line)
