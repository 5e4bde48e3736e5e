"""`headrace watch`."""

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
$ headrace watch runs/train/exp --open
$ headrace watch result.json --port 8080
"""


def watch(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_RESULT",
            help="Run folder of `train` or `tune`, or result file of `bench` or `diagnose`.",
            show_default=False,
        ),
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1.", show_default="a free one")
    ] = 0,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve a run's report on this machine while it trains.

    The page is that of `headrace report`. It is loaded again when the run has
    written something. Ctrl-C ends the server; it changes nothing.
    """
    require("headrace watch", "jinja2")
    from headrace.report import LiveServer

    with usage_errors():
        server = LiveServer(source, port)
    with server:
        print_line(server.url)
        if open_it:
            webbrowser.open(server.url)
        server.wait()
