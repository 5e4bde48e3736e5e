"""`headrace translate`."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import Beam, DeviceName, Quiet, Run, Weights
from headrace.cli.output import print_line
from headrace.errors import TranslationError, usage_errors
from headrace.extras import require
from headrace.progress import StatusLine

if TYPE_CHECKING:
    from headrace.translation import LengthCounts, TrainedModel

#: How many sentences are translated before their lines are printed. They are sorted by length into
#: batches: with fewer, batches would have more padding.
_PART = 2048

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
    quiet: Quiet = False,
) -> None:
    """Translate sentences with a trained model.

    The command prints one line per sentence, in the same order. The lines of a
    long input appear in parts, each as soon as it is translated. Sentences that
    you type on a terminal are translated one by one. Input and files are UTF-8.
    """
    require("headrace translate", "sentencepiece")
    begun_s = time.monotonic()
    from headrace.translation import TrainedModel

    with usage_errors():
        if file is not None and sentences:
            raise TranslationError(
                "found sentences and --file: expected one of them; leave out the other"
            )
        if file is None and not sentences and sys.stdin is None:
            raise TranslationError("stdin is closed: expected sentences as arguments, or --file")
        given = _typed_text(sentences or [])
        content = _read_file(file) if file is not None else b""
        model = TrainedModel.load(run, weights=weights, device=device)
    if file is not None:
        given = _lines(content, str(file))
    elif not sentences:
        if sys.stdin.isatty():
            _translate_typed_lines(model, beam, quiet)
            return
        given = _lines(sys.stdin.buffer.read(), "stdin")
    loaded_s = time.monotonic()
    _warn(model.count_lengths(given))
    # Where translations appear on the terminal, they show the progress.
    with StatusLine(quiet or bool(sentences) or sys.stdout.isatty()) as line:
        for start in range(0, len(given), _PART):
            show = partial(_show, line, start, len(given))
            part = model.translate(given[start : start + _PART], beam=beam, watch=show)
            print_line("\n".join(part))
    if not sentences and len(given) > 1 and not quiet:
        took_s = time.monotonic() - loaded_s
        typer.echo(
            f"{len(given):,} sentences translated in {took_s:.1f} s, after a start-up of "
            f"{loaded_s - begun_s:.1f} s",
            err=True,
        )


def _translate_typed_lines(model: TrainedModel, beam: int | None, quiet: bool) -> None:
    """Translate each line of a terminal as soon as it is typed."""
    if not quiet:
        typer.echo("Type a sentence and press Enter; Ctrl-D ends.", err=True)
    for number, line in enumerate(sys.stdin.buffer, 1):
        sentences = _lines(line, "stdin", number)
        if line.strip():  # the warning about empty lines is for files
            _warn(model.count_lengths(sentences))
        print_line("\n".join(model.translate(sentences, beam=beam)))


def _show(line: StatusLine, before: int, total: int, done: int, _: int) -> None:
    if before + done < total:  # else the command is about to say so itself
        line.status("translating", before + done, total)


def _typed_text(sentences: list[str]) -> list[str]:
    """The sentences, with bytes that the locale's encoding does not know read as UTF-8."""
    texts = []
    for number, sentence in enumerate(sentences, 1):
        is_decoded = not any("\ud800" <= letter <= "\udfff" for letter in sentence)
        try:
            texts.append(sentence if is_decoded else os.fsencode(sentence).decode("utf-8"))
        except (UnicodeEncodeError, UnicodeDecodeError) as problem:
            raise TranslationError(f"sentence {number}: is not UTF-8 text") from problem
    return texts


def _read_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as problem:
        raise TranslationError(f"{file}: cannot be read ({problem.strerror})") from problem


def _lines(content: bytes, name: str, first: int = 1) -> list[str]:
    """The lines of a file, from line `first` on. They end with "\\n" only, as in corpora: each gets
    one translation."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        number = problem.object.count(b"\n", 0, problem.start) + first
        raise TranslationError(
            f"{name}:{number}: is not UTF-8 text ({problem}); expected plain text, not compressed, "
            "in UTF-8. Decompress or convert it"
        ) from problem
    return text.removesuffix("\n").split("\n") if text else []


def _warn(counts: LengthCounts) -> None:
    """Warn of sentences that are cut or have no text."""
    of_all = f"of {counts.sentences:,} sentences"
    if counts.cut:
        typer.echo(
            f"warning: {counts.cut:,} {of_all} will be cut at {counts.model_limit} tokens, the "
            "model's maximum; split long lines into sentences",
            err=True,
        )
    if counts.empty:
        typer.echo(
            f"warning: {counts.empty:,} {of_all} without text; each gets an empty line", err=True
        )
