"""`headrace doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.options import Json
from headrace.cli.output import print_result

EXAMPLE = "Example:\n$ headrace doctor --json"


def doctor(
    as_json: Json = False,
    measure: Annotated[
        bool, typer.Option(help="Time copies and kernel launches on each GPU (2 s).")
    ] = True,
) -> None:
    """Check this machine and say how to fix what is missing.

    The exit code is 1 if a problem keeps Headrace from working properly.
    """
    from headrace.machine import diagnose

    if measure and not as_json:
        typer.echo("Checking this machine …", err=True)
    diagnosis = diagnose(measure=measure)
    print_result(diagnosis.to_dict(), diagnosis.text(), as_json)
    if not diagnosis.healthy:
        raise typer.Exit(1)
