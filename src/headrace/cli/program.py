"""The program: its commands, its exit codes, and how it starts and ends.

Results go to stdout and everything else to stderr, so that `headrace … --json | jq` works.
Exit codes: 0 success, 1 failure (one line says why), 2 usage error, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import headrace
from headrace.child_processes import end_workers_with_this
from headrace.cli import (
    bench,
    diagnose,
    doctor,
    evaluate,
    export,
    options,
    output,
    plan,
    prepare,
    races,
    report,
    train,
    translate,
    tune,
)
from headrace.errors import HeadraceError

_ABOUT = "Keep the GPU busy while PyTorch trains, and measure that it is."
_EXAMPLE = """\
Examples:
$ headrace doctor                # check this machine
$ headrace train --preset tiny   # train a translation model
$ headrace bench --work resnet   # compare plans
$ headrace races train.py        # find stream races, without a GPU

Run headrace COMMAND --help for the options of a command.

Exit codes: 0 success, 1 failure, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM.
diagnose and races end with the exit code of the script that they run.
"""


class _Program(TyperGroup):
    """Prints "interrupted" on Ctrl-C. Typer alone would print nothing."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="headrace",
    cls=_Program,
    help=_ABOUT,
    epilog=_EXAMPLE,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line. Prints a `HeadraceError` as one line; a traceback is a bug."""
    # Set before PyTorch is loaded: OpenMP threads sleep while they wait. If they spin, they slow
    # down everything else on the same cores, such as loader processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    output.replace_unknown_characters()
    end_workers_with_this()
    has_script_output = False
    try:
        app(obj=output.OWN_PROCESS)
    except output.ScriptExit:
        has_script_output = True
        raise
    except KeyboardInterrupt:  # before a command began, or after it ended
        typer.echo("interrupted", err=True)
        sys.exit(130)
    except HeadraceError as problem:
        typer.echo(f"error: {problem}", err=True)
        sys.exit(problem.exit_code)
    finally:
        output.end_of_results(has_script_output=has_script_output)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {headrace.__version__}")
        raise typer.Exit


@app.callback(help=_ABOUT, epilog=_EXAMPLE)
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """The options of the program itself."""


# In the order of `headrace --help`.
app.command(epilog=doctor.EXAMPLE)(doctor.doctor)
app.command(epilog=plan.EXAMPLE)(plan.plan)
app.command(epilog=train.EXAMPLE)(train.train)
app.command(epilog=evaluate.EXAMPLE)(evaluate.evaluate)
app.command(epilog=translate.EXAMPLE)(translate.translate)
app.command(epilog=export.EXAMPLE)(export.export)
app.command(epilog=prepare.EXAMPLE)(prepare.prepare)
app.command(epilog=bench.EXAMPLE)(bench.bench)
app.command(epilog=tune.EXAMPLE)(tune.tune)
app.command(epilog=diagnose.EXAMPLE, context_settings=options.PROGRAM_SETTINGS)(diagnose.diagnose)
app.command(epilog=report.EXAMPLE)(report.report)
app.command(epilog=races.EXAMPLE, context_settings=options.PROGRAM_SETTINGS)(races.races)
