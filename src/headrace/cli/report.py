"""`headrace report`."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.output import print_line
from headrace.errors import usage_errors
from headrace.extras import require

EXAMPLE = """\
Examples:
$ headrace report runs/train/exp --open
$ headrace report result.json --out report.html
"""


def report(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_RESULT",
            help="Run folder of `train` or `tune`, or result file of `bench` or `diagnose`.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File for the report.",
            show_default="report.html in a run folder, NAME.html beside NAME.json",
        ),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(help="Also write each timeline to this folder, for ui.perfetto.dev."),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
) -> None:
    """Write an HTML report of a run or a benchmark.

    The report shows the verdict, charts, timelines, losses and waits. It is
    one file that loads nothing from the network.
    """
    require("headrace report", "jinja2")
    from headrace.report import write_perfetto, write_report

    with usage_errors():
        written = write_report(source, out)
        traces = [] if perfetto is None else write_perfetto(source, perfetto)
    if perfetto is not None:
        for trace in traces:
            print_line(str(trace))
        if not traces:
            typer.echo(f"{source}: has no timeline; no Perfetto file was written", err=True)
    print_line(str(written))
    if open_it:
        webbrowser.open(written.absolute().as_uri())
