"""The works of benchmarks/inputs/works on this machine's GPU: the plain script against every plan.

    python benchmarks/measurements/eleven_works.py --out result.json
    python benchmarks/measurements/eleven_works.py --works dcgan,lstm --budget-seconds 500
        --out part.json

For each work, `headrace bench` measures the loop of the plain script and the plans side by side: in
turns, in one process, the order rotated from round to round. A speed-up is the median over the
rounds of the plain script's time divided by the plan's, with the lowest and the highest. Losses are
compared with deterministic kernels. Busy time is the union of all kernel and copy times that the
profiler sees.

At the end it says what does not hold: that no plan but `baseline` is slower than the plain script
(3 % and disjoint spreads), that losses match, and that a step of one's own is twice as fast, or
within 10 % of the busy time.
"""

from __future__ import annotations

import os

# Before PyTorch is loaded: the first makes kernels deterministic, the profiler needs the others.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("TEARDOWN_CUPTI", "0")
os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import gc
import inspect
import logging
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, save, table

from headrace.bench import Bench, entries_of, find_work
from headrace.bench.equality import difference
from headrace.bench.peers import Peer
from headrace.bench.trainable import Timing, timed
from headrace.bench.works.work import Workload
from headrace.data import end_workers
from headrace.device import Device, deterministic_kernels, open_device
from headrace.records import BenchResult, PlanResult

FOLDER = Path(__file__).resolve().parents[1] / "inputs" / "works"
PLAIN = "plain"
PLANS = ("baseline", "pipeline", "graph", "max")
READ_EVERY = 10
# Those with the most to say come first, in case the time is short.
ORDER = (
    *("dcgan", "actor_critic", "lstm", "bert_base", "nanogpt", "dlrm", "vit_small"),
    *("transformer", "gpt2_small", "unet", "convnext_tiny"),
)


class PlainScript:
    """The loop of a work's plain script, as a contestant of `bench`."""

    trained = 0

    def __init__(self, work: Workload, device: Device, precision: str | None, seed: int) -> None:
        self._work, self._device, self._precision, self._seed = work, device, precision, seed
        parameters = inspect.signature(work.build).parameters
        loading = {name: parameters[name].default for name in ("workers", "prefetch_factor")}
        loading |= {name: work.options[name] for name in loading if name in work.options}
        self.lead_in: int = loading["workers"] * loading["prefetch_factor"]
        self._losses = self._begin()

    def run(self, steps: int) -> Timing:
        with self._device.numerics(self._precision):
            return timed(self._device, steps, lambda: self._train(steps))

    def _train(self, steps: int) -> None:
        for step in range(1, steps + 1):
            loss = next(self._losses)
            if step % READ_EVERY == 0:
                loss.item()
            self.trained += 1

    def losses(self, batches: Sequence[Any]) -> tuple[float, ...]:
        """Its own first batches are the same: it has the same seed."""
        try:
            return self._first_losses(len(batches), deterministic=True)
        except RuntimeError as problem:
            if "deterministic" not in str(problem):
                raise
        self._losses = self._begin()
        return self._first_losses(len(batches), deterministic=False)

    def _first_losses(self, count: int, *, deterministic: bool) -> tuple[float, ...]:
        kernels = deterministic_kernels(True) if deterministic else nullcontext()
        with kernels, self._device.numerics(self._precision):
            found = list(islice(self._losses, count))
        return tuple(torch.stack(found).tolist())

    def graphs(self) -> None:
        return None

    def compiled(self) -> None:
        return None

    def close(self) -> None:
        loader = inspect.getgeneratorlocals(self._losses).get("loader")
        self._losses.close()
        end_workers(loader)

    def _begin(self) -> Iterator[torch.Tensor]:
        train = self._work.build.__globals__["train"]
        given = {
            name: value
            for name, value in self._work.options.items()
            if name in ("tiny", "workers") and value is not None
        }
        where = self._device.torch_device
        losses: Iterator[torch.Tensor] = train(
            where, seed=self._seed, pin=where.type != "cpu", **given
        )
        return losses


def measured(name: str, device: Device, options: argparse.Namespace) -> dict[str, Any]:
    """One work under the plain script and every plan."""
    given: dict[str, Any] = {"tiny": True, "workers": 0} if options.tiny else {}
    work = find_work(f"{FOLDER / name}.py:work", given)
    module = work.build.__globals__
    entries = entries_of(options.plans, module["PRECISION"])

    def show(activity: str, done: float, left_s: float | None) -> None:
        if options.verbose:
            print(f"{name}: {activity}", file=sys.stderr, flush=True)

    result = Bench(
        work=work,
        device=device,
        entries=entries,
        peers=[Peer(PLAIN, None, PlainScript)],
        steps=options.steps,
        repeats=options.repeats,
        warmup=options.warmup,
        precision=module["PRECISION"],
        compared_steps=options.compare,
        watched_s=0.0,
        traced_steps=options.traced_steps,
        on_progress=show,
    ).run()
    if result.interrupted:
        raise KeyboardInterrupt
    return {
        "description": work.description,
        "precision": module["PRECISION"],
        "own step": "step_of" in module,
        "plans": {row.plan: figures(row, result) for row in result.rows},
        "missing": list(result.missing),
    }


def figures(row: PlanResult, result: BenchResult) -> dict[str, Any]:
    """What is kept of a plan's result, compared with the plain script's."""
    plain = result.row(PLAIN)
    if row.error is not None or row.ms_per_step is None:
        return {"error": row.error or "not measured"}
    found: dict[str, Any] = {
        "ms": round(row.ms_per_step.median, 4),
        "all": [round(ms, 4) for ms in row.ms_per_step.repeats],
    }
    if plain.ms_per_step is not None:
        pairs = zip(plain.ms_per_step.repeats, row.ms_per_step.repeats, strict=False)
        ratios = [base / ms for base, ms in pairs]
        found["speed-up"] = [
            round(number, 3) for number in (statistics.median(ratios), min(ratios), max(ratios))
        ]
    if row.gpu is not None:
        found |= {"busy ms": row.gpu.busy_ms_per_step, "over busy": row.gpu.over_busy_share}
        found["launches"] = row.gpu.launches_per_step
    found |= {
        "waits for data ms": row.data_wait_ms,
        "peak MB": None if row.peak_memory_bytes is None else row.peak_memory_bytes >> 20,
        "losses": list(row.losses),
        "equal": row.equal.verdict,
        "equal why": row.equal.why,
        "from baseline": row.equal.largest,
        "from plain": largest_difference(plain.losses, row.losses),
        "captured": row.is_captured,
        "compiled": row.is_compiled,
        "notes": [note.replace(f"{FOLDER.parents[2]}/", "") for note in row.notes],
    }
    if row.compiled is not None:
        found["compile s"] = round(row.compiled["seconds"], 1)
        found["why not compiled"] = row.compiled["why"]
    if row.graphs is not None:
        found["why not captured"] = row.graphs["why"]
        found["replays"] = row.graphs["replays"]
    return found


def largest_difference(
    plain: Sequence[float | None], losses: Sequence[float | None]
) -> float | None:
    """The largest relative difference between two lists of losses."""
    if not plain or len(plain) != len(losses):
        return None
    pairs = [(a, b) for a, b in zip(plain, losses, strict=True) if a is not None and b is not None]
    return max((difference(a, b) for a, b in pairs), default=None)


def violations(name: str, found: dict[str, Any]) -> list[str]:
    """What should hold, and does not."""
    if "plans" not in found:
        return [f"{name}: {found['error']}"]
    plans, lines = found["plans"], []
    plain = plans[PLAIN]
    for plan, row in plans.items():
        if "error" in row:
            lines.append(f"{name}, {plan}: {row['error']}")
            continue
        if row["equal"] == "unequal":
            lines.append(f"{name}, {plan}: losses differ: {row['equal why']}")
        if plan in (PLAIN, "baseline") or "all" not in plain:
            continue
        if row["from plain"] and plan != "max":
            lines.append(f"{name}, {plan}: losses differ from plain by {row['from plain']:.2g}")
        ratio, low, high = row["speed-up"]
        disjoint = min(row["all"]) > max(plain["all"])
        if 1 / ratio > 1.03 and disjoint:
            lines.append(f"{name}, {plan}: slower than plain: {ratio} × ({low} to {high})")
        if found["own step"] and plan in ("graph", "max"):
            over = row.get("over busy")
            if ratio < 2 and (over is None or over > 0.1):
                much = "not measured" if over is None else f"{over:.0%} over the busy time"
                lines.append(f"{name}, {plan}: {ratio} × plain, and {much}")
        if row["captured"] is False:
            why = row.get("why not captured") or "; ".join(row["notes"])
            lines.append(f"{name}, {plan}: not captured: {why}")
    return lines


def short_row(found: dict[str, Any]) -> dict[str, Any]:
    """A work's line in the table."""
    if "plans" not in found:
        return {"plain ms": "failed"}
    plans = found["plans"]
    line: dict[str, Any] = {"plain ms": plans[PLAIN].get("ms", "failed")}
    for plan, row in plans.items():
        if plan == PLAIN:
            continue
        if "error" in row:
            line[plan] = "failed"
            continue
        ratio, low, high = row.get("speed-up", ("?", "?", "?"))
        mark = "" if row["captured"] is not False else " eager"
        mark += " uncompiled" if row["compiled"] is False else ""
        line[plan] = f"{ratio} ({low}–{high}){mark}"
    graph = plans.get("graph", {})
    line["busy ms"] = _short(graph.get("busy ms"))
    line["graph ms"] = graph.get("ms", "")
    line["graph MB"] = graph.get("peak MB")
    equal = [f"{plan}: {row['equal']}" for plan, row in plans.items() if row.get("equal")]
    same = all(word.endswith(("identical", "reference")) for word in equal)
    line["losses"] = (
        "same bits"
        if same
        else ", ".join(word for word in equal if not word.endswith(("identical", "reference")))
    )
    return line


def _short(value: float | None) -> object:
    return "" if value is None else round(value, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", default=",".join(ORDER), help="names, separated by commas")
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--steps", type=int, default=20, help="steps per round")
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--compare", type=int, default=8, help="steps whose losses are compared")
    parser.add_argument("--traced-steps", type=int, default=5, help="steps under the profiler")
    parser.add_argument("--budget-seconds", type=float, help="begin no work that may take longer")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, for a CPU")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.plans = options.plans.split(",")
    names = options.works.split(",")
    if unknown := [name for name in names if name not in ORDER]:
        parser.error(f"no work {unknown[0]!r}; known: {', '.join(ORDER)}")
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    device = open_device(options.device)
    began = time.monotonic()
    found: dict[str, Any] = {}
    result = header("eleven_works.py") | {"steps": options.steps, "works": found, "left out": []}
    longest = 0.0
    for name in names:
        start = time.monotonic()
        budget = options.budget_seconds
        if budget is not None and start - began + longest > budget:
            result["left out"].append(name)
            continue
        try:
            found[name] = measured(name, device, options)
        except Exception as problem:
            traceback.print_exc()
            found[name] = {"error": f"{type(problem).__name__}: {problem}"[:500]}
        gc.collect()
        torch.compiler.reset()
        device.release_unused()
        took = time.monotonic() - start
        longest = max(longest, took)
        found[name]["seconds"] = round(took, 1)
        print(f"{name}, {took:.0f} s: {short_row(found[name])}", file=sys.stderr, flush=True)
        save(options.out, result)
    result["violations"] = [line for name, row in found.items() for line in violations(name, row)]
    save(options.out, result)
    print("speed-ups over the plain script: the median over rounds, the lowest and the highest")
    print(table({name: short_row(row) for name, row in found.items()}))
    for line in result["violations"] or ["all that should hold does"]:
        print(line)
    if result["left out"]:
        print(f"left out, for want of time: {','.join(result['left out'])}")


if __name__ == "__main__":
    main()
