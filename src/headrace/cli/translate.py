"""`headrace translate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import Beam, DeviceName, Run, Weights
from headrace.errors import TranslationError


def translate(
    run: Run,
    sentences: Annotated[
        list[str] | None, typer.Argument(help="Sentences; none: one a line from stdin.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="A text file, one sentence a line.")
    ] = None,
    weights: Weights = "best",
    beam: Beam = None,
    device: DeviceName = "auto",
) -> None:
    """Translate: one line of output for each sentence, in their order."""
    from headrace.translation import TrainedModel

    if file is not None and sentences:
        raise TranslationError("sentences were given and a file too: expected one of them")
    if file is not None:
        try:
            # Only a newline ends a line, as in a corpus: one line of output for each.
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
