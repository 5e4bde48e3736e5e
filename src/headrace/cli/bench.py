"""`headrace bench`."""

from __future__ import annotations

import logging
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.bench import EarlierResults
from headrace.child_processes import fork_and_wait
from headrace.cli.options import (
    Json,
    Work,
    WorkOptions,
    check_output_file,
    parse_list,
    parse_set_options,
    work_errors,
)
from headrace.cli.output import OWN_PROCESS, print_line, results_only
from headrace.errors import BenchError, HeadraceError, usage_errors
from headrace.progress import StatusLine

if TYPE_CHECKING:
    from headrace.records import BenchResult

_EXECUTION, _MEASUREMENT = "Execution", "Measurement"
_SAME_REQUEST_S = 1.0
EXAMPLE = """\
Examples:
$ headrace bench --work resnet --set batch=64
$ headrace bench --plans baseline,pipeline,pipeline --peers lightning
$ headrace bench --work my_module:make_work --json > result.json
"""


def _count(help_text: str, minimum: int) -> Any:
    return typer.Option(
        min=minimum, metavar="INTEGER", help=help_text, rich_help_panel=_MEASUREMENT
    )


def bench(
    context: typer.Context,
    work: Work = "translation",
    options: WorkOptions = None,
    plans: Annotated[
        str | None,
        typer.Option(
            help="Presets and plan.yaml files, separated by commas. Name one twice to see the "
            "noise.",
            show_default="all presets that run here",
            rich_help_panel=_EXECUTION,
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Also measure lightning, accelerate or reduce-overhead, separated by commas.",
            rich_help_panel=_EXECUTION,
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="fp32, tf32, bf16 or fp16.",
            show_default="the plan's; in presets float32, TF32 as PyTorch is set",
            rich_help_panel=_EXECUTION,
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, cuda:1, …", rich_help_panel=_EXECUTION)
    ] = "auto",
    steps: Annotated[int, _count("Steps per round.", 1)] = 20,
    repeats: Annotated[int, _count("Rounds per plan.", 1)] = 5,
    warmup: Annotated[int, _count("Warmup steps per plan, before the first round.", 1)] = 10,
    seed: Annotated[int, _count("Random seed for weights, batches and dropout.", 0)] = 0,
    compare: Annotated[
        int, _count("Steps whose losses must match the baseline's; 0 skips the check.", 0)
    ] = 10,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="FLOAT",
            help="Relative difference allowed between losses that cannot match bit for bit.",
            rich_help_panel=_MEASUREMENT,
        ),
    ] = 0.01,
    watch: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="FLOAT",
            help="How long to sample each plan with NVML, in seconds; 0 disables it.",
            rich_help_panel=_MEASUREMENT,
        ),
    ] = 1.0,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait/--no-wait",
            help="Wait while another benchmark measures on this machine.",
            rich_help_panel=_MEASUREMENT,
        ),
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File for the result.", show_default="runs/bench/, named by workload and time"
        ),
    ] = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result.")] = False,
) -> None:
    """Compare the speed of plans on the same training workload.

    A workload of your own is a function in a module of yours:

    \b
        def make_work():
            model = MyModel()
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            return model, optimizer, loss, loader  # loss(model, batch)

    Or it returns (step, loader), where step(batch) does forward, backward and
    update itself.

    The exit code is 1 if a plan fails or its losses differ from the
    baseline's. Results are stored as they come: a plan that ends the process,
    or its CUDA context, costs its own row.
    """
    known = _continue_in_child(context) if context.obj is OWN_PROCESS else None
    # Set before PyTorch is loaded. The first makes kernels deterministic; the profiler needs the
    # others.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    from headrace.bench import (
        Bench,
        DeviceLost,
        entries_of,
        find_work,
        peers_of,
        plans_here,
        text_of,
    )
    from headrace.device import open_device
    from headrace.plan import refuse_plan_variable

    if precision not in (None, "fp32", "tf32", "bf16", "fp16"):
        raise typer.BadParameter(
            f"{precision}: expected fp32, tf32, bf16 or fp16", param_hint="--precision"
        )
    for name, value in (("--watch", watch), ("--tolerance", tolerance)):
        if not math.isfinite(value):
            raise typer.BadParameter(f"{value}: expected a finite number", param_hint=name)
    with usage_errors():
        refuse_plan_variable("bench")
        if out is not None:
            check_output_file(out)
        given, target = parse_set_options(options or []), open_device(device)
        entries = entries_of(parse_list(plans) or plans_here(target), precision)
        chosen_peers = peers_of(parse_list(peers) or [])
    with (
        _going_on_elsewhere(known, DeviceLost),
        StatusLine(quiet, log_level=logging.WARNING) as line,
        results_only(),
    ):
        with work_errors(work):
            chosen = find_work(work, given, small=not target.asynchronous)
        if not target.asynchronous and chosen.options != find_work(work, given).options:
            line.message(
                f"no GPU: training a smaller {work}, {chosen.description}; --set makes it larger"
            )
        path = out or _free_path(chosen.name)
        if known is not None:
            path = Path(known.settled("path", str(path)))
        bench = Bench(
            work=chosen,
            device=target,
            entries=entries,
            peers=chosen_peers,
            steps=steps,
            repeats=repeats,
            warmup=warmup,
            seed=seed,
            precision=precision,
            tolerance=tolerance,
            compared_steps=compare,
            watched_s=watch,
            command=shlex.join(["headrace", *sys.argv[1:]]),
            wait=wait,
            on_progress=_progress_on(line),
            on_result=partial(_store, path),
            known=known,
        )
        with _signals_as_interrupt() as signals:
            result = bench.run()
    # One of the two may fail, at a full disk say: then the other still has the result.
    try:
        print_line(result.to_json() if as_json else text_of(result))
    finally:
        result.write(path)
        typer.echo(f"wrote {path}", err=True)
    if result.interrupted:
        raise typer.Exit(143 if signal.SIGTERM in signals else 130)
    if result.failed:
        raise typer.Exit(1)


@contextmanager
def _signals_as_interrupt() -> Iterator[list[int]]:
    """Inside the block, Ctrl-C and SIGTERM raise KeyboardInterrupt, also during an import: the
    results so far must be printed. Yields a list of the signals received.

    A terminal, Slurm or systemd sends a signal to each process, and the first process passes it on
    as well: what comes within a second is the same request. It may come while results are printed.
    """
    signals: list[int] = []
    first_s = 0.0

    def stop(number: int, frame: object) -> None:
        nonlocal first_s
        is_repeated = bool(signals) and time.monotonic() < first_s + _SAME_REQUEST_S
        if is_repeated or (signals and number == signal.SIGTERM):
            return
        first_s = time.monotonic()
        signals.append(number)
        raise KeyboardInterrupt

    caught = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as under nohup
        caught.append(signal.SIGINT)
    before = {number: signal.signal(number, stop) for number in caught}
    try:
        yield signals
    finally:
        if not signals:
            for number, handler in before.items():
                signal.signal(number, handler)


def _continue_in_child(context: typer.Context) -> EarlierResults | None:
    """Go on in a child process, and return what its predecessors have measured. A child that a
    contestant has ended is followed by another; this process ends as the last one has."""
    if not hasattr(os, "fork"):
        return None
    known = EarlierResults()
    while (ending := fork_and_wait()) is not None:
        if known.is_over or ending.requested:
            raise typer.Exit(ending.exit_code)
        if not known.has_grown():
            raise BenchError(f"the process ended ({ending}) before anything was measured")
        known.ended(str(ending))
    context.call_on_close(known.end)  # also after an error
    return known


@contextmanager
def _going_on_elsewhere(known: EarlierResults | None, lost: type[Exception]) -> Iterator[None]:
    """If a contestant leaves the device unusable, another process goes on."""
    try:
        yield
    except lost:
        if known is None:
            raise
        known.start_again()


def _store(path: Path, result: BenchResult) -> None:
    with suppress(HeadraceError):  # a full disk, say: at the end, the result is printed even so
        result.write(path)


def _progress_on(line: StatusLine) -> Callable[[str, float, float | None], None]:
    """A callback for `Bench` that shows what it measures, and the seconds left if known."""

    def show(what: str, done: float, left_s: float | None) -> None:
        line.status(what if left_s is None else f"{what}, about {left_s:.0f} s left")

    return show


def _free_path(work: str) -> Path:
    """A path in runs/bench that does not exist yet."""
    stem = "".join(letter if letter.isalnum() else "-" for letter in work).strip("-")
    when = time.strftime("%Y-%m-%d-%H%M%S")
    path, number = Path("runs/bench") / f"{stem}-{when}.json", 1
    while path.exists():
        number += 1
        path = path.with_name(f"{stem}-{when}-{number}.json")
    return path
