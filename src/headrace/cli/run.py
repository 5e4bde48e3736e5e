"""`headrace run`."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace.cli.options import AsModule, Json, Program, check_output_file, parse_list
from headrace.cli.output import OWN_PROCESS, OwnStderr, end_as_script, print_result, results_only
from headrace.errors import ProgramError, usage_errors
from headrace.run import KINDS, RunSettings, run_sped_up

if TYPE_CHECKING:
    from headrace.records import RunResult

EXAMPLE = """\
Examples:
$ headrace run train.py --lr 3e-4
$ headrace run --check 20 -m package.train
$ torchrun --nproc-per-node 2 -m headrace run train.py
"""
_NOT_EQUAL = 4


def run(
    context: typer.Context,
    program: Program,
    module: AsModule = False,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="PARTS", help="Speed up only these: model, optimizer, data.", show_default="all"
        ),
    ] = None,
    compile_models: Annotated[
        bool, typer.Option("--compile", help="Compile the models with torch.compile first.")
    ] = False,
    check: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="<int>",
            help="Compare the first N replays of each part with what it does without graphs.",
        ),
    ] = 0,
    after: Annotated[
        int,
        typer.Option(
            min=1, metavar="<int>", help="Calls of a part that run as they are before its capture."
        ),
    ] = 10,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="auto|graph",
            help="Keep graphs only if steps are faster with them, or always.",
            show_default="auto; with --fake: graph",
        ),
    ] = None,
    fake: Annotated[
        bool, typer.Option("--fake", help="Run on a fake CUDA device, without a GPU.")
    ] = False,
    as_json: Json = False,
    report: Annotated[
        Path | None, typer.Option(help="Also write an HTML report to this file.")
    ] = None,
) -> None:
    """Run a training script unchanged, and speed it up.

    Models and optimizers run as CUDA graphs once they have been seen to repeat
    themselves, and batches are copied to the GPU ahead of their use. Some of the
    first steps run with graphs and some without, in turns, and what is faster
    stays. What cannot be sped up runs as it is, and stderr says why.

    The exit code is the script's own, or 4 if --check has found a difference.
    """
    with usage_errors():
        if report is not None:
            check_output_file(report)
        settings = RunSettings(_kinds(only), compile_models, check, after, _plan(plan, fake))
    name, *arguments = program
    stderr, is_first = OwnStderr(), os.environ.get("RANK", "0") == "0"  # torchrun sets it
    results: list[RunResult] = []

    def tell(text: str) -> None:
        if is_first:
            stderr.tell(f"headrace: {text}")

    def ended(result: RunResult | None) -> None:
        if result is None:
            tell(f"{name} has not imported PyTorch: nothing was done")
            return
        from headrace.run import table_of

        results.append(result)
        if is_first and not as_json:
            stderr.tell(table_of(result))
        if is_first and report is not None:
            from headrace.report import write_run_page

            write_run_page(result, report)
            stderr.tell(f"report: {report}")

    command = shlex.join(["headrace", *sys.argv[1:]])
    is_own = context.obj is OWN_PROCESS
    if is_own and signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.SIG_DFL, None):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with results_only() if as_json else nullcontext(), usage_errors():
        exit_code = run_sped_up(
            name,
            arguments,
            as_module=module,
            settings=settings,
            tell=tell,
            ended=ended,
            fake=fake,
            is_own_process=is_own,
            command=command,
        )
    result = results[0] if results else None
    if as_json and is_first:
        print_result({} if result is None else result.to_dict(), "", as_json)
    checks = () if result is None else tuple(part.check for part in result.parts)
    if not exit_code and any(one is not None and not one.is_equal for one in checks):
        exit_code = _NOT_EQUAL
    end_as_script(exit_code, has_script_output=not as_json)


def _plan(given: str | None, fake: bool) -> Literal["auto", "graph"]:
    """The times of a fake device say nothing about what is faster."""
    if given == "graph" or (given is None and fake):
        return "graph"
    if given == "auto" or given is None:
        return "auto"
    raise ProgramError(f"--plan {given}: expected auto or graph")


def _kinds(given: str | None) -> frozenset[str]:
    found = parse_list(given) or list(KINDS)
    for one in found:
        if one not in KINDS:
            raise ProgramError(f"--only {one}: expected {', '.join(KINDS)}, separated by commas")
    return frozenset(found)
