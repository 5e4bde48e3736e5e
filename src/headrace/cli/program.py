"""The command line: parses, calls, prints.

Results go to stdout and everything else to stderr, so that `headrace … --json | jq` works.
Exit codes: 0 done, 1 it failed (one line says why), 2 the command was typed wrong, 130 Ctrl-C.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import headrace
from headrace.cli import bench, output, report, translation, tune
from headrace.errors import HeadraceError


class _Program(TyperGroup):
    """Says that it was interrupted: by itself Typer ends without a word."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="headrace",
    cls=_Program,
    help="Keep a GPU busy during training, and show that it is.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def main() -> None:
    """Run the command line. Errors that Headrace knows are one line; a traceback is a bug."""
    # Before PyTorch is loaded: threads that wait for each other sleep. Spinning, they take ages
    # as soon as anything else runs on the same cores: a loader's workers, say.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except HeadraceError as problem:
        typer.echo(f"error: {problem}", err=True)
        sys.exit(problem.exit_code)
    finally:
        output.end_of_results()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {headrace.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which it is.")
    ] = False,
) -> None:
    """Keep a GPU busy during training, and show that it is."""


@app.command()
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
    _show(diagnosis.to_dict(), diagnosis.text(), as_json)
    if not diagnosis.healthy:
        raise typer.Exit(1)


@app.command()
def plan(
    which: Annotated[
        str | None, typer.Argument(help="A preset's name or a plan.yaml; none: all presets.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the plans: all presets side by side, or every field of one."""
    from headrace.plan import PRESETS, Plan, presets_table

    if which is None:
        content = {name: preset.to_dict() for name, preset in PRESETS.items()}
        _show(content, presets_table(), as_json)
    else:
        chosen = Plan.of(which)
        _show(chosen.to_dict(), chosen.table(), as_json)


translation.add_to(app)
bench.add_to(app)
tune.add_to(app)
report.add_to(app)


def _show(content: dict[str, Any], text: str, as_json: bool) -> None:
    typer.echo(json.dumps(content, indent=2) if as_json else text)
