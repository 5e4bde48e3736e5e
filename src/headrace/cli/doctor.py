"""`headrace doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.options import Json
from headrace.cli.output import print_result


def doctor(
    as_json: Json = False,
    measure: Annotated[
        bool, typer.Option(help="Time copies and launches on each GPU (two seconds).")
    ] = True,
) -> None:
    """Say what this machine has, what is missing, and the command that mends it.

    Exits with 1 when something keeps Headrace from working as it should.
    """
    from headrace.runs import diagnose

    if measure and not as_json:
        typer.echo("Looking at this machine …", err=True)
    diagnosis = diagnose(measure=measure)
    print_result(diagnosis.to_dict(), diagnosis.text(), as_json)
    if not diagnosis.healthy:
        raise typer.Exit(1)
