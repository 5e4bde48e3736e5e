"""`headrace report`."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer


def report(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_RESULT",
            help="A run's folder, or what `bench` or `tune` wrote.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The file to write; none: report.html beside the input.")
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(help="Also write each timeline into this folder, for ui.perfetto.dev."),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in a browser.")] = False,
) -> None:
    """Make one HTML file of a result: verdict, bars, timelines, losses, waits.

    The file holds all it needs and asks nothing of any network.
    """
    from headrace.report import write_perfetto, write_report

    written = write_report(source, out)
    if perfetto is not None:
        traces = write_perfetto(source, perfetto)
        for trace in traces:
            typer.echo(str(trace))
        if not traces:
            typer.echo(f"{source}: holds no timeline, so no Perfetto file was written", err=True)
    typer.echo(str(written))
    if open_it:
        webbrowser.open(written.absolute().as_uri())
