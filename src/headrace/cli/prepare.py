"""`headrace prepare`."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from headrace.cli.options import Cache, Data, note_default_languages
from headrace.cli.output import print_line
from headrace.errors import usage_errors
from headrace.extras import require
from headrace.progress import StatusLine

EXAMPLE = "Example:\n$ headrace prepare corpus.tsv --src de --trg en --vocabulary 16000"


def prepare(
    context: typer.Context,
    data: Data = None,
    src: Annotated[str, typer.Option(help="Language to translate from.")] = "zh",
    trg: Annotated[str, typer.Option(help="Language to translate into.")] = "en",
    vocabulary: Annotated[
        int, typer.Option(help="Maximum size of each subword vocabulary.")
    ] = 8000,
    joint: Annotated[
        bool, typer.Option(help="Share one vocabulary between the two languages.")
    ] = False,
    max_length: Annotated[
        int,
        typer.Option(help="Drop pairs with more tokens than this on one side, markers included."),
    ] = 60,
    skip_bad: Annotated[
        bool,
        typer.Option(help="Skip and count malformed lines instead of stopping at the first one."),
    ] = False,
    cache: Cache = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only the folder of the prepared corpus.")
    ] = False,
) -> None:
    """Build a corpus's vocabularies and encode it.

    `headrace train` does this by itself when needed.
    """
    require("headrace prepare", "sentencepiece")
    from headrace.translation import TrainSettings, check_data, prepared_for

    with usage_errors():
        settings = TrainSettings(
            data=tuple(str(path) for path in data or ()),
            src=src,
            trg=trg,
            vocabulary=vocabulary,
            joint=joint,
            max_length=max_length,
            skip_bad=skip_bad,
        )
        check_data(settings)
    if not quiet:
        note_default_languages(context, data, src, trg)
    with StatusLine(quiet, log_level=logging.INFO) as line:
        found = prepared_for(settings, cache, line.status)
    if not quiet:
        print_line(found.table())
    print_line(str(found.folder))
