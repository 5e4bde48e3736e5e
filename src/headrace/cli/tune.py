"""`headrace tune`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.options import (
    check_output_file,
    parse_list,
    parse_set_options,
    require_resume_alone,
    usage_errors,
    work_errors,
)
from headrace.cli.output import results_only
from headrace.errors import TuneError


def tune(
    work: Annotated[
        str | None,
        typer.Option(help="translation (if none is given), resnet, mlp, or your_module:make_work."),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", help="An option of the work, as in --set batch=64; may be repeated."),
    ] = None,
    plans: Annotated[
        str | None, typer.Option(help="Presets, with commas; none: all that run here.")
    ] = None,
    workers: Annotated[
        str | None, typer.Option(help="Numbers of loading processes to try, with commas.")
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Batch sizes to try, with commas; none: the work's own.")
    ] = None,
    memory_cap: Annotated[
        str | None, typer.Option(help="Device memory a plan may take: 40GB, 512MiB, 50%.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the shortest runs (20).")] = None,
    repeats: Annotated[int | None, typer.Option(help="Runs of what is close (5).")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps of each before its runs (10).")] = None,
    compare: Annotated[
        int | None, typer.Option(help="Steps whose losses are compared (10); 0: none.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Relative difference where bits must differ (0.01).")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Time for the whole search; none: as it takes.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="fp32, tf32, bf16 or fp16.", show_default="float32, TF32 as PyTorch is set"
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, batches and dropout (0).")] = None,
    project: Annotated[
        Path | None, typer.Option(help="Where searches are made; none: runs/tune.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The search's name; none: exp, exp2, …")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with this search; needs no other option.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the winner's plan.yaml here, too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The result alone.")] = False,
) -> None:
    """Find the plan under which a work is trained fastest here, and write it to a plan.yaml.

    Tries presets, loader workers and single fields of the best plan; drops early what is behind,
    repeats what is close. Ctrl-C keeps what was measured and says how to go on.
    """
    # Before PyTorch is loaded: losses are compared with deterministic kernels.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from headrace.bench import Stopped, TuneSettings, Tuning, find_work
    from headrace.plan import refuse_replaced_plans
    from headrace.runs import replace_file

    given: dict[str, Any] = {
        "work": work,
        "options": parse_set_options(options) if options else None,
        "plans": parse_list(plans),
        "workers": _numbers("workers", workers),
        "batch_sizes": _numbers("batch_sizes", batch_sizes),
        "memory_cap": memory_cap,
        "steps": steps,
        "repeats": repeats,
        "warmup": warmup,
        "compare": compare,
        "tolerance": tolerance,
        "minutes": minutes,
        "precision": precision,
        "device": device,
        "seed": seed,
    }
    given = {key: value for key, value in given.items() if value is not None}
    with usage_errors():
        refuse_replaced_plans("tune")
        if out is not None:
            check_output_file(out)
    told: dict[str, Any] = {
        "command": shlex.join(["headrace", *sys.argv[1:]]),
        "quiet": quiet,
    }
    with results_only():
        if resume is not None:
            with usage_errors():
                typed = {"set" if key == "options" else key: value for key, value in given.items()}
                require_resume_alone(resume, project, {"name": name, **typed}, TuneError)
            tuning = Tuning.resume(resume, **told)
        else:
            with usage_errors():
                settings = TuneSettings.from_dict(given, where="settings")
            with work_errors(settings.work):
                find_work(settings.work, dict(settings.options))
            runs = project or Path("runs/tune")
            tuning = Tuning.create(settings, project=runs, name=name, **told)
        try:
            result = tuning.run()
        except Stopped as stopped:
            go_on = f"headrace tune --resume {tuning.folder.path}"
            typer.echo(f"stopped by {stopped.signal}; go on with: {go_on}", err=True)
            raise typer.Exit(130 if stopped.signal == "SIGINT" else 143) from None
    # Printed first: whatever becomes of the file, what was found is not lost.
    typer.echo(json.dumps(result.to_dict(), indent=1) if as_json else result.text())
    if out is not None:
        replace_file(out, result.plan_yaml().encode())
    typer.echo(f"written to {out or tuning.plan_file}; result in {tuning.folder.path}", err=True)


def _numbers(name: str, text: str | None) -> list[int] | None:
    words = parse_list(text)
    try:
        return None if words is None else [int(word) for word in words]
    except ValueError:
        hint = f"--{name.replace('_', '-')}"
        raise typer.BadParameter(
            f"{text}: expected whole numbers with commas", param_hint=hint
        ) from None
