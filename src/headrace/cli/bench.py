"""`headrace bench`."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import (
    check_output_file,
    parse_list,
    parse_set_options,
    usage_errors,
    work_errors,
)
from headrace.cli.output import results_only

_WORK = """\
translation, resnet, mlp, or your_module:make_work: a function that returns model, optimizer, loss \
and loader."""


def bench(
    work: Annotated[str, typer.Option(help=_WORK)] = "translation",
    options: Annotated[
        list[str] | None,
        typer.Option("--set", help="An option of the work, as in --set batch=64; may be repeated."),
    ] = None,
    plans: Annotated[
        str | None,
        typer.Option(
            help="Presets and plan.yaml files, with commas; one entered twice shows the noise. "
            "None: all presets that run here.",
        ),
    ] = None,
    peers: Annotated[
        str | None, typer.Option(help="lightning, accelerate, reduce-overhead; with commas.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="fp32, tf32, bf16 or fp16.",
            show_default="the plan's; the presets compute in float32, TF32 as PyTorch is set",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    steps: Annotated[int, typer.Option(min=1, help="Steps of a turn.")] = 20,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each plan.")] = 5,
    warmup: Annotated[int, typer.Option(min=1, help="Steps of each before the first turn.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, batches and dropout.")] = 0,
    compare: Annotated[
        int, typer.Option(min=0, help="Steps whose losses are compared; 0: none.")
    ] = 10,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Relative difference allowed where bits must differ.")
    ] = 0.01,
    watch: Annotated[
        float, typer.Option(min=0.0, help="Seconds of each under the driver's eyes; 0: none.")
    ] = 1.0,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the result here; none: runs/bench/, by work and time."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The result alone.")] = False,
) -> None:
    """Train the same work under every plan, and say which is fastest, and why.

    A work of your own is a function in a module of yours:

        def make_work():
            model = MyModel()
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            return model, optimizer, loss, loader     # loss(model, batch) -> a number

    Exits with 1 if a plan failed, or had other losses than baseline.
    """
    # Before PyTorch is loaded: deterministic products need the one, the profiler the others.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    from headrace.bench import Bench, entries_of, find_work, peers_of, plans_here, text_of
    from headrace.device import open_device
    from headrace.plan import refuse_replaced_plans

    if precision not in (None, "fp32", "tf32", "bf16", "fp16"):
        raise typer.BadParameter(
            f"{precision}: expected fp32, tf32, bf16 or fp16", param_hint="--precision"
        )
    for name, value in (("--watch", watch), ("--tolerance", tolerance)):
        if not math.isfinite(value):
            raise typer.BadParameter(f"{value}: expected a finite number", param_hint=name)
    with usage_errors():
        refuse_replaced_plans("bench")
        if out is not None:
            check_output_file(out)
        given, on, progress = parse_set_options(options or []), open_device(device), Lines(quiet)
        entries = entries_of(parse_list(plans) or plans_here(on), precision)
        rivals = peers_of(parse_list(peers) or [])
    with results_only():
        with work_errors(work):
            chosen = find_work(work, given, small=not on.asynchronous)
        if not on.asynchronous and chosen.options != find_work(work, given).options:
            progress.say(f"no GPU: a smaller {work}, {chosen.description}; --set makes it larger")
        bench = Bench(
            work=chosen,
            device=on,
            entries=entries,
            peers=rivals,
            steps=steps,
            repeats=repeats,
            warmup=warmup,
            seed=seed,
            precision=precision,
            tolerance=tolerance,
            compared_steps=compare,
            watched_s=watch,
            command=shlex.join(["headrace", *sys.argv[1:]]),
            watcher=progress,
        )
        with _interrupted_by_sigterm() as asked:
            result = bench.run()
    progress.end()
    # Printed first: whatever becomes of the file, what was measured is not lost.
    typer.echo(result.to_json() if as_json else text_of(result))
    path = out or _free_path(chosen.name, result.environment.date)
    result.write(path)
    typer.echo(f"written to {path}", err=True)
    if result.interrupted:
        raise typer.Exit(143 if asked else 130)
    if result.failed:
        raise typer.Exit(1)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[list[int]]:
    """Inside the block SIGTERM does what Ctrl-C does, and is noted."""
    asked: list[int] = []

    def stop(number: int, frame: object) -> None:
        asked.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)


class Lines:
    """Says on stderr what is going on: in one line on a terminal, else a line for each thing."""

    def __init__(self, quiet: bool, write: Callable[[str], object] | None = None) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._write = write or self._to_stderr
        self._shown = False

    def __call__(self, what: str, done: float, left_s: float | None) -> None:
        if self._quiet:
            return
        left = "" if left_s is None else f", about {left_s:.0f} s left"
        text = f"{what}{left}"
        self._write(f"\r\x1b[2K{text}" if self._live else f"{text}\n")
        self._shown = self._live

    def say(self, text: str) -> None:
        if not self._quiet:
            self._write(f"{text}\n")

    def end(self) -> None:
        if self._shown:
            self._write("\r\x1b[2K")

    def _to_stderr(self, text: str) -> None:
        typer.echo(text, err=True, nl=False)


def _free_path(work: str, date: str) -> Path:
    """A name that no result has yet."""
    stem = "".join(letter if letter.isalnum() else "-" for letter in work).strip("-")
    when = date[:19].replace(":", "").replace("T", "-")
    path, number = Path("runs/bench") / f"{stem}-{when}.json", 1
    while path.exists():
        number += 1
        path = path.with_name(f"{stem}-{when}-{number}.json")
    return path
