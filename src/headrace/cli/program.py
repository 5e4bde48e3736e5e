"""The program: its commands, its exit codes, and how it starts and ends.

Results go to stdout and everything else to stderr, so that `headrace … --json | jq` works.
Exit codes: 0 success, 1 failure (one line says why), 2 usage error, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

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
    run,
    train,
    translate,
    tune,
    watch,
)
from headrace.cli.help import HelpfulCommand, HelpfulGroup
from headrace.errors import HeadraceError

_ABOUT = (headrace.__doc__ or "").partition("\n")[0]
_EXAMPLE = """\
Examples:
$ headrace diagnose train.py     # what does the GPU wait for?
$ headrace run train.py          # the script as it is, sped up
$ headrace bench --work resnet   # compare plans
$ headrace races train.py        # find stream races, without a GPU
$ headrace doctor                # check this machine

Run headrace COMMAND --help for the options of a command.

Exit codes: 0 success, 1 failure, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM.
diagnose, run and races end with the exit code of the script that they run.
"""
_TRANSLATOR = "Translator (a complete trainer, built on Headrace)"


app = typer.Typer(
    name="headrace",
    cls=HelpfulGroup,
    help=_ABOUT,
    epilog=_EXAMPLE,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line. Prints a `HeadraceError` as one line; a traceback is a bug."""
    is_script = sys.argv[1:2] == ["run"]  # the process is the script's
    if not is_script:
        # Set before PyTorch is loaded: OpenMP threads sleep while they wait. If they spin, they
        # slow down everything else on the same cores, such as loader processes.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        output.replace_unknown_characters()
        end_workers_with_this()
    has_script_output = False
    try:
        app(obj=output.OWN_PROCESS)
    except output.ScriptExit:
        has_script_output = True
        raise
    except output.ScriptInterrupted:
        has_script_output = True
        sys.excepthook = lambda *error: None  # printed already; Python ends with the signal
        raise KeyboardInterrupt from None
    except KeyboardInterrupt:  # before a command began, or after it ended
        typer.echo("interrupted", err=True)
        sys.exit(130)
    except HeadraceError as problem:
        typer.echo(f"error: {problem}", err=True)
        sys.exit(problem.exit_code)
    finally:
        # The streams of a script that has the process are Python's: it says if a flush fails.
        if not (is_script and has_script_output):
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


def _add(
    command: Callable[..., None],
    epilog: str,
    panel: str = "Commands",
    settings: dict[str, Any] | None = None,
) -> None:
    app.command(
        cls=HelpfulCommand, epilog=epilog, rich_help_panel=panel, context_settings=settings
    )(command)


# In the order of `headrace --help`.
_add(diagnose.diagnose, diagnose.EXAMPLE, settings=options.PROGRAM_SETTINGS)
_add(run.run, run.EXAMPLE, settings=options.PROGRAM_SETTINGS)
_add(bench.bench, bench.EXAMPLE)
_add(tune.tune, tune.EXAMPLE)
_add(races.races, races.EXAMPLE, settings=options.PROGRAM_SETTINGS)
_add(report.report, report.EXAMPLE)
_add(watch.watch, watch.EXAMPLE)
_add(plan.plan, plan.EXAMPLE)
_add(doctor.doctor, doctor.EXAMPLE)
_add(train.train, train.EXAMPLE, _TRANSLATOR)
_add(evaluate.evaluate, evaluate.EXAMPLE, _TRANSLATOR)
_add(translate.translate, translate.EXAMPLE, _TRANSLATOR)
_add(export.export, export.EXAMPLE, _TRANSLATOR)
_add(prepare.prepare, prepare.EXAMPLE, _TRANSLATOR)
