"""`headrace prepare`."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.options import Cache, Data, Quiet


def prepare(
    data: Data = None,
    src: Annotated[str, typer.Option(help="The side that is translated.")] = "zh",
    trg: Annotated[str, typer.Option(help="The side it is translated into.")] = "en",
    vocabulary: Annotated[int, typer.Option(help="Pieces of each vocabulary, at most.")] = 8000,
    joint: Annotated[bool, typer.Option(help="One vocabulary for both sides.")] = False,
    max_length: Annotated[int, typer.Option(help="Tokens of a side, at most.")] = 60,
    skip_bad: Annotated[bool, typer.Option(help="Count malformed lines; go on.")] = False,
    cache: Cache = None,
    quiet: Quiet = False,
) -> None:
    """Read a corpus, make its vocabularies and encode it; `train` does it when needed."""
    from headrace.translation import TrainSettings, prepared_for

    settings = TrainSettings(
        data=tuple(str(path) for path in data or ()),
        src=src,
        trg=trg,
        vocabulary=vocabulary,
        joint=joint,
        max_length=max_length,
        skip_bad=skip_bad,
    )
    found = prepared_for(settings, cache)
    if not quiet:
        typer.echo(found.table())
    typer.echo(str(found.folder))
