"""`headrace tune`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.bench import TuneSettings
from headrace.cli.options import (
    Json,
    Quiet,
    Work,
    WorkOptions,
    check_output_file,
    is_typed,
    parse_list,
    parse_set_options,
    work_errors,
)
from headrace.cli.output import print_line, results_only
from headrace.cli.settings import with_settings
from headrace.errors import TuneError, usage_errors

EXAMPLE = """\
Examples:
$ headrace tune --work resnet --minutes 10
$ headrace tune --work my_module:make_work --out plan.yaml
$ headrace train --plan plan.yaml
"""
_PANELS = {
    "Search space": ("plans", "workers"),
    "Measurement": ("steps", "repeats", "warmup", "compare", "tolerance", "minutes"),
    "Execution": ("precision", "device", "seed"),
}
_EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}


@with_settings(TuneSettings, _PANELS)
def tune(
    context: typer.Context,
    work: Work = "translation",
    options: WorkOptions = None,
    project: Annotated[Path, typer.Option(help="Folder for new searches.")] = Path("runs/tune"),
    name: Annotated[
        str | None, typer.Option(help="Name of the search.", show_default="exp, exp2, …")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the fastest plan to this file, too.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    **given: Any,
) -> None:
    """Find the fastest plan for a workload on this machine.

    The search tries presets, numbers of loader processes and prefetch
    depths. It drops slow plans early, repeats those that are close and
    writes the winner as plan.yaml. Ctrl-C ends it with what was measured so far.
    """
    # Set before PyTorch is loaded: the losses of plans are compared, so kernels must be
    # deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from headrace.atomic_files import replace_file
    from headrace.bench import Stopped, Tuning, find_work
    from headrace.plan import refuse_plan_variable

    given = {key: value for key, value in given.items() if is_typed(context, key)}
    if is_typed(context, "work"):
        given["work"] = work
    if options:
        given["options"] = parse_set_options(options)
    if "plans" in given:
        given["plans"] = parse_list(given["plans"])
    if "workers" in given:
        given["workers"] = _numbers("--workers", given["workers"])
    with usage_errors():
        refuse_plan_variable("tune")
        if out is not None:
            check_output_file(out)
    with results_only():
        with usage_errors():
            settings = TuneSettings.from_dict(given, where="settings")
        with work_errors(settings.work):
            find_work(settings.work, dict(settings.options))
        with usage_errors():
            command = shlex.join(["headrace", *sys.argv[1:]])
            tuning = Tuning.create(
                settings, project=project, name=name, command=command, quiet=quiet
            )
        try:
            result = tuning.run()
        except Stopped as stopped:
            typer.echo(f"stopped by {stopped}: nothing was measured", err=True)
            raise typer.Exit(_EXIT_CODES[str(stopped)]) from None
    # One of the two may fail, at a full disk say: then the other still has the result.
    try:
        print_line(json.dumps(result.to_dict(), indent=1) if as_json else result.text())
    finally:
        if out is not None:
            replace_file(out, result.plan_yaml().encode(), TuneError)
        typer.echo(f"wrote {out or tuning.plan_file}; result in {tuning.folder.path}", err=True)
    if (ended_by := result.outcome.ended_by) in _EXIT_CODES:
        raise typer.Exit(_EXIT_CODES[ended_by])


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(word) for word in parse_list(text) or ()]
    except ValueError:
        raise typer.BadParameter(
            f"{text}: expected whole numbers separated by commas", param_hint=option
        ) from None
