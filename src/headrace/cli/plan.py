"""`headrace plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.options import Json
from headrace.cli.output import print_result
from headrace.errors import usage_errors

EXAMPLE = """\
Examples:
$ headrace plan
$ headrace plan pipeline
"""


def plan(
    which: Annotated[
        str | None,
        typer.Argument(help="A preset or a plan.yaml file.", show_default="all presets"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show all presets side by side, or every field of one plan."""
    from headrace.plan import PRESETS, Plan, presets_table

    if which is None:
        content = {name: preset.to_dict() for name, preset in PRESETS.items()}
        print_result(content, presets_table(), as_json)
    else:
        with usage_errors():
            chosen = Plan.of(which)
        print_result(chosen.to_dict(), chosen.table(), as_json)
