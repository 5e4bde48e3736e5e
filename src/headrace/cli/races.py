"""`headrace races`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.atomic_files import replace_file
from headrace.cli.options import AsModule, Json, Program, check_output_file
from headrace.cli.output import end_program, print_result, results_only
from headrace.errors import ReportError, usage_errors
from headrace.extras import require
from headrace.main_program import running_threads

if TYPE_CHECKING:
    from headrace.fake import ProgramResult
    from headrace.races import Access, CodeLine
    from headrace.records import RacesResult

EXAMPLE = """\
Examples:
$ headrace races train.py --epochs 1
$ headrace races --html races.html -m package.train --epochs 1
"""


def races(
    program: Program,
    module: AsModule = False,
    as_json: Json = False,
    html: Annotated[
        Path | None, typer.Option(help="Also write the report to this file, with pictures.")
    ] = None,
) -> None:
    """Find stream races in a program that uses CUDA, without a GPU.

    The command runs a script or module on the CPU as if PyTorch had one CUDA
    device, and checks that the work on its streams is in order. Use small data:
    a few steps are enough.

    The exit code is 1 if there are races, else the program's own.
    """
    if html is not None:
        require("headrace races --html", "jinja2")
        with usage_errors():
            check_output_file(html)
    from headrace.fake import run_program
    from headrace.races import race_page, race_report

    name, *arguments = program
    others = running_threads()
    with results_only() if as_json else nullcontext(), usage_errors():
        result = run_program(name, arguments, as_module=module)
    if html is not None:
        replace_file(html, race_page(result.findings, title=name).encode(), ReportError)
    if as_json:
        print_result(_record(name, result).to_dict(), "", as_json)
    else:
        # The script's own output is on stdout.
        if not result.launches:
            nothing = "the program put no work on the CUDA device: nothing was checked"
            typer.echo(nothing, err=True)
        else:
            typer.echo(race_report(result.findings), err=True)
            if result.exit_code:
                end = f"the program ended with exit code {result.exit_code}"
                typer.echo(f"{end}: only what it did until then was checked", err=True)
        if result.accepted:
            typer.echo(f"{result.accepted} accepted by a comment", err=True)
        if html is not None:
            typer.echo(f"report: {html}", err=True)
    leaves_threads = bool(running_threads() - others)  # the program has called os._exit
    exit_code = 1 if result.findings else result.exit_code
    end_program(exit_code, at_once=leaves_threads, has_script_output=not as_json)


def _record(name: str, result: ProgramResult) -> RacesResult:
    from headrace.records import AccessRecord, LineRecord, RaceRecord, RacesResult
    from headrace.source_lines import short_path

    def access(one: Access, lines: Sequence[CodeLine]) -> AccessRecord:
        return AccessRecord(
            operation=one.operation,
            writes=one.writes,
            where=one.where,
            on_host=one.on_host,
            lines=tuple(
                LineRecord(short_path(line.site.file), line.site.line, line.function, line.text)
                for line in lines
            ),
        )

    return RacesResult(
        program=name,
        exit_code=result.exit_code,
        accepted=result.accepted,
        races=tuple(
            RaceRecord(
                kind=finding.race.kind,
                tensor=finding.race.tensor,
                freed=finding.race.freed.tensor if finding.race.freed else None,
                first=access(finding.race.first, finding.first),
                second=access(finding.race.second, finding.second),
                missing=finding.race.missing,
                times=finding.times,
            )
            for finding in result.findings
        ),
    )
