"""`headrace diagnose`."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from headrace.cli.options import AsModule, Json, check_output_file, is_typed
from headrace.cli.output import OwnStderr, end_program, print_result, results_only
from headrace.errors import ProgramError, usage_errors
from headrace.extras import require
from headrace.main_program import running_threads

if TYPE_CHECKING:
    from headrace.records import DiagnosisResult

_WINDOWS, _OUTPUT = "Windows", "Output"
#: Parameters that a trace has no use for.
_OF_PROGRAMS = ("warmup", "steps", "profiled", "lines", "step_line", "cupti", "then", "fake")
EXAMPLE = """\
Examples:
$ headrace diagnose train.py --lr 3e-4
$ headrace diagnose --html diagnosis.html -m package.train
$ headrace diagnose --fake --fail-on "waits>2" train.py
$ headrace diagnose --html diagnosis.html trace.json.gz
$ headrace diagnose --compare --fail-on "slower>3%" before.json after.json
"""


class Then(StrEnum):
    STOP = "stop"
    CONTINUE = "continue"


def _count(help_text: str, minimum: int) -> Any:
    return typer.Option(min=minimum, metavar="INTEGER", help=help_text, rich_help_panel=_WINDOWS)


def diagnose(
    context: typer.Context,
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="PROGRAM [ARGS]...",
            help="The script to run (with -m: the module), then its own arguments; or traces of "
            "torch.profiler (.json, .json.gz), or folders of them; with --compare, two results.",
            show_default=False,
        ),
    ],
    module: AsModule = False,
    warmup: Annotated[int, _count("Steps before the first window.", 1)] = 10,
    steps: Annotated[int, _count("Steps of the clean window, which is timed.", 2)] = 20,
    profiled: Annotated[int, _count("Steps under the profiler.", 1)] = 8,
    lines: Annotated[int, _count("Steps in which waits are found by line.", 1)] = 5,
    step_line: Annotated[
        str | None,
        typer.Option(
            metavar="FILE:LINE",
            help="Line that runs once per step, if no optimizer says what a step is.",
            rich_help_panel=_WINDOWS,
        ),
    ] = None,
    cupti: Annotated[
        bool,
        typer.Option(
            "--cupti/--no-cupti",
            help="Trace kernels with CUPTI if it works here, or time them with CUDA events.",
            rich_help_panel=_WINDOWS,
        ),
    ] = True,
    then: Annotated[
        Then, typer.Option(help="Stop the script after the last window, or let it continue.")
    ] = Then.STOP,
    fake: Annotated[
        bool, typer.Option("--fake", help="Run without a GPU: waits and races, but no times.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Compare two results that --out has stored: before and after."
        ),
    ] = False,
    fail_on: Annotated[
        str | None,
        typer.Option(
            help='End with exit code 3 if a limit is exceeded, as in "waits>2,idle>20%"; with '
            '--compare, "slower>3%".'
        ),
    ] = None,
    as_json: Json = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write the result as JSON to this file.", rich_help_panel=_OUTPUT),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Also write an HTML report to this file.", rich_help_panel=_OUTPUT),
    ] = None,
) -> None:
    """Say what a training script's GPU waits for, line by line.

    The script runs unchanged, through a warm-up and three windows: clean,
    profiled, lines. A step is one round of its optimizer steps and graph
    replays. A trace of torch.profiler is read instead: its steps are those
    it names.

    The exit code is the script's own, 0 if diagnose ended it, or 3 if a limit of
    --fail-on is exceeded or could not be measured.
    """
    if html is not None:
        require("headrace diagnose --html", "jinja2")
    # Set before PyTorch is loaded: the profiler needs them for scripts that replay graphs.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    from headrace.diagnosis import (
        Settings,
        StepLine,
        diagnose_program,
        diagnose_traces,
        exit_code_of,
        is_trace,
        parse_limits,
        text_of,
    )

    with usage_errors():
        for path in filter(None, (out, html)):
            check_output_file(path)
        if compare:
            _require_alone(context, program, "a result", "html", "module")
            _compare(program, fail_on, as_json, out)
        limits = parse_limits(fail_on) if fail_on is not None else []
        if not module and is_trace(program[0]):
            _require_alone(context, program, "a trace")
        line = StepLine.parse(step_line) if step_line is not None else None
    command = shlex.join(["headrace", *sys.argv[1:]])
    if not module and is_trace(program[0]):
        with usage_errors():
            of_trace = diagnose_traces(program, command)
        if out is not None:
            of_trace.write(out)
        print_result(of_trace.to_dict(), text_of(of_trace), as_json)
        if html is not None:
            _write_page(of_trace, html)
            _tell(f"report: {html}")
        raise typer.Exit(exit_code_of(of_trace, limits, _tell))
    name, *arguments = program
    # torchrun sets the one, Slurm the other.
    is_first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    shown: list[DiagnosisResult] = []
    others = running_threads()
    stderr = OwnStderr()

    def show(result: DiagnosisResult) -> None:
        # The script's own output is on stdout.
        if is_first:
            stderr.tell(text_of(result))
        shown.append(result)

    with results_only() if as_json else nullcontext(), usage_errors():
        result = diagnose_program(
            name,
            arguments,
            as_module=module,
            settings=Settings(warmup, steps, profiled, lines, line, cupti),
            then=then.value,
            fake=fake,
            command=command,
            on_complete=show,
        )
    # Python would wait for the threads of a program that was ended, or that has called os._exit. It
    # does so after Ctrl-C, too, as without diagnose.
    leaves_threads = result.exit_code != 130 and bool(running_threads() - others)
    if not is_first:
        end_program(result.exit_code or 0, at_once=leaves_threads, has_script_output=not as_json)
    if out is not None:  # before the result is printed, which may fail
        result.write(out)
    if as_json:
        print_result(result.to_dict(), "", as_json)
    elif not shown:
        show(result)
    elif result.races != shown[-1].races:
        stderr.tell(result.verdict[-1])
    own = {flag for option in context.command.params for flag in option.opts} - {"-m"}
    misplaced = [word for word in arguments if word.partition("=")[0] in own]
    if misplaced and result.outcome in ("no step", "on the CPU"):  # the script may have such, too
        stderr.tell(
            f"{name} got {misplaced[0]}, which comes after it: an option of diagnose goes before "
            f"the {'module' if module else 'script'}"
        )
    if html is not None:
        _write_page(result, html)
        stderr.tell(f"report: {html}")
    if result.exit_code is None:
        stderr.tell(
            f"diagnose ended {name} after {result.steps} steps; with --then continue it runs on"
        )
    exit_code = exit_code_of(result, limits, stderr.tell)
    end_program(exit_code, at_once=leaves_threads, has_script_output=not as_json)


def _tell(text: str) -> None:
    typer.echo(text, err=True)


def _write_page(result: DiagnosisResult, page: Path) -> None:
    from headrace.report import write_report

    with TemporaryDirectory() as folder:
        stored = Path(folder) / "diagnosis.json"
        result.write(stored)
        write_report(stored, page)


def _compare(given: list[str], fail_on: str | None, as_json: bool, out: Path | None) -> NoReturn:
    from headrace.diagnosis import (
        compare_files,
        comparison_text,
        exit_code_of_change,
        parse_change_limits,
    )

    limits = parse_change_limits(fail_on) if fail_on is not None else []
    if len(given) != 2:
        raise ProgramError(
            f"--compare: found {len(given)} files; expected two results: before.json after.json"
        )
    found = compare_files(*given)
    if out is not None:
        found.write(out)
    print_result(found.to_dict(), comparison_text(found), as_json)
    raise typer.Exit(exit_code_of_change(found, limits, _tell))


def _require_alone(context: typer.Context, given: list[str], what: str, *others: str) -> None:
    """Raise an error for options that belong to a script, and for options after the files."""
    for word in given[1:]:
        if word.startswith("-"):
            raise ProgramError(f"{word}: expected {what}; options go before {given[0]}")
    for name in (*_OF_PROGRAMS, *others):
        if is_typed(context, name):
            option = "-m" if name == "module" else f"--{name.replace('_', '-')}"
            raise ProgramError(
                f"{option} does not go with {given[0]}, which is taken for {what}, not for a script"
            )
