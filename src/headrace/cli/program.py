"""The program: its commands, its exit codes, and how it starts and ends.

Results go to stdout and everything else to stderr, so that `headrace … --json | jq` works.
Exit codes: 0 done, 1 it failed (one line says why), 2 the command was typed wrong, 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import headrace
from headrace.cli import output
from headrace.cli.bench import bench
from headrace.cli.doctor import doctor
from headrace.cli.evaluate import evaluate
from headrace.cli.plan import plan
from headrace.cli.prepare import prepare
from headrace.cli.report import report
from headrace.cli.train import train
from headrace.cli.translate import translate
from headrace.cli.tune import tune
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


# In the order of `headrace --help`.
for command in (doctor, plan, train, evaluate, translate, prepare, bench, tune, report):
    app.command()(command)
