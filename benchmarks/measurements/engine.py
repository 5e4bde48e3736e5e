"""The eager plans on this machine's GPU: speed, compared with resident data, waits and memory.

    python benchmarks/measurements/engine.py [--out results.json] [--soak-steps 20000]

"resident" is the limit: the same model on batches that are already on the GPU, and no loss is read.
Each plan gets batches in pinned host memory; baseline and interval, which do not pin, get pageable
ones.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from engine_works import Work, mlp, resnet50, transformer
from measuring import header, interleaved_ms, save, table

from headrace.device import Device, open_device
from headrace.engine import Engine, Progress
from headrace.plan import Plan

PLANS = ("baseline", "interval", "event", "streams4", "pipeline")


def resident(work: Work, device: Device, precision: str) -> Callable[[int], object]:
    model, optimizer = work.fresh(device.torch_device)
    there = [tuple(part.to(device.torch_device) for part in batch) for batch in work.batches[:4]]

    def run(steps: int) -> None:
        with device.numerics(precision):
            for step in range(steps):
                with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                    loss = work.loss(model, there[step % len(there)])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    return run


class Planned:
    """A workload under a plan, as a function to be timed; `result` is the last epoch's."""

    def __init__(self, work: Work, device: Device, plan: Plan, precision: str) -> None:
        model, optimizer = work.fresh(device.torch_device)
        self.engine = Engine(
            model, optimizer, work.loss, plan=plan, device=device, precision=precision
        )
        self._host = work.batches
        if plan.pin:
            self._host = [tuple(p.pin_memory() for p in batch) for batch in work.batches]
        self.result: Any = None

    def __call__(self, steps: int) -> None:
        source = itertools.islice(itertools.cycle(self._host), steps)
        self.result = self.engine.epoch(source)


def compare(work: Work, device: Device, precision: str, steps: int, repeats: int) -> dict[str, Any]:
    """Milliseconds per step, device waits per step and peak memory of every plan."""
    planned = {name: Planned(work, device, Plan.preset(name), precision) for name in PLANS}
    ways = {"resident": resident(work, device, precision), **planned}
    rows = interleaved_ms(ways, device, steps=steps, repeats=repeats)
    limits = rows["resident"]["all"]
    for name, way in planned.items():
        waits, row = way.result.waits, rows[name]
        # Each repeat is compared with its resident neighbor: the CPU's speed drifts.
        over = [ms / limit - 1 for ms, limit in zip(row["all"], limits, strict=True)]
        row["over resident %"] = round(statistics.median(over) * 100, 2)
        row["waits a step"] = round(waits.device_waits() / steps, 3)
        row["blocked ms a step"] = round(waits.wall_ms / steps, 3)
        row["peak MB"] = way.result.statistics.peak_memory_bytes >> 20
        row["waits by reason"] = {w.reason: w.count for w in waits.reasons}
    return {"precision": precision, "steps": steps, "repeats": repeats, "rows": rows}


def close_to_resident(work: Work, device: Device, precision: str) -> dict[str, Any]:
    """`pipeline` compared with resident data, in many turns: where launching is nearly the limit,
    the CPU's speed drifts by more than the difference to be measured."""
    ways = {
        "resident": resident(work, device, precision),
        "pipeline": Planned(work, device, Plan.preset("pipeline"), precision),
    }
    rows = interleaved_ms(ways, device, steps=24, repeats=11)
    pairs = zip(rows["pipeline"]["all"], rows["resident"]["all"], strict=True)
    over = sorted(mine / limit - 1 for mine, limit in pairs)
    return {
        "pipeline over resident %, median": round(statistics.median(over) * 100, 2),
        "quartiles": [round(over[at * len(over) // 4] * 100, 2) for at in (1, 3)],
        "rows": rows,
    }


def same_losses(work: Work, device: Device, precision: str, steps: int = 8) -> dict[str, Any]:
    """Every plan from the same seed with deterministic kernels: are the losses bit-identical?"""
    found: dict[str, tuple[float, ...]] = {}
    for name in PLANS:
        model, optimizer = work.fresh(device.torch_device)
        engine = Engine(
            model,
            optimizer,
            work.loss,
            plan=name,
            device=device,
            precision=precision,
            deterministic=True,
        )
        source = itertools.islice(itertools.cycle(work.batches), steps)
        found[name] = engine.epoch(source).losses
    same = {name: losses == found["baseline"] for name, losses in found.items()}
    return {"steps": steps, "as baseline's": same, "baseline's": found["baseline"]}


def memory_over_plain(work: Work, device: Device, precision: str) -> dict[str, float]:
    """How many batches more the pipeline's peak memory is than a plain loop's on one stream."""
    batch_bytes = sum(part.numel() * part.element_size() for part in work.batches[0])
    model, optimizer = work.fresh(device.torch_device)
    engine = Engine(
        model, optimizer, work.loss, plan="pipeline", device=device, precision=precision
    )
    pinned = [tuple(part.pin_memory() for part in batch) for batch in work.batches]

    def plain(steps: int) -> None:
        for batch in itertools.islice(itertools.cycle(pinned), steps):
            there = tuple(part.to(device.torch_device, non_blocking=True) for part in batch)
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                loss = work.loss(model, there)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    plain(3)  # the optimizer's state, and workspaces
    device.reset_peak_memory()
    plain(8)
    device.synchronize("bench")
    plain_peak = device.peak_memory()
    engine.epoch(itertools.islice(itertools.cycle(pinned), 8))
    over = (device.peak_memory() - plain_peak) / batch_bytes
    return {"batch MB": round(batch_bytes / 1e6, 2), "batches over a plain loop": round(over, 2)}


def soak(device: Device, steps: int) -> dict[str, Any]:
    """One long epoch: device memory reserved and host memory, early and late."""
    work = mlp(rows=256, width=256, layers=4)
    figures: dict[int, dict[str, int]] = {}
    process = psutil.Process()

    def look(info: Progress) -> None:
        if info.batch + 1 in (1_000, steps):
            figures[info.batch + 1] = {
                "reserved": device.memory().reserved,
                "allocated": device.memory().allocated,
                "host": process.memory_info().rss,
            }

    model, optimizer = work.fresh(device.torch_device)
    engine = Engine(model, optimizer, work.loss, plan="pipeline", device=device, on_step=look)

    def fresh_batches() -> Iterator[Any]:
        for batch in itertools.islice(itertools.cycle(work.batches), steps):
            yield tuple(part.clone() for part in batch)

    result = engine.epoch(fresh_batches())
    early, late = figures[1_000], figures[steps]
    return {
        "steps": steps,
        "ms a step": round(result.statistics.elapsed_s / steps * 1e3, 3),
        "losses": len(result.losses),
        "reserved at 1,000": early["reserved"],
        "reserved at the end": late["reserved"],
        "host growth MB": round((late["host"] - early["host"]) / 1e6, 2),
        "waits": {w.reason: w.count for w in result.waits.reasons},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write all figures here, as JSON")
    parser.add_argument("--soak-steps", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=("soak", "transformer", "resnet50"))
    arguments = parser.parse_args()
    device = open_device("cuda")
    result: dict[str, Any] = header("engine.py")
    if arguments.only in (None, "soak"):  # first, while nothing else is in memory
        result["soak"] = soak(device, arguments.soak_steps)
        print(result["soak"], flush=True)
        save(arguments.out, result)
    works = {"transformer": partial(transformer, 256, 64), "resnet50": partial(resnet50, 128)}
    for name, make in works.items():
        if arguments.only not in (None, name):
            continue
        work, precision = make(), "bf16"
        found = compare(work, device, precision, steps=arguments.steps, repeats=arguments.repeats)
        found["losses"] = same_losses(work, device, precision)
        shown = {
            name: {
                key: value
                for key, value in row.items()
                if key not in ("all", "cpu", "waits by reason")
            }
            for name, row in found["rows"].items()
        }
        print(f"{work.name}, {precision}\n{table(shown)}", flush=True)
        print("same losses:", found["losses"]["as baseline's"], flush=True)
        found["close"] = close_to_resident(work, device, precision)
        print({key: value for key, value in found["close"].items() if key != "rows"}, flush=True)
        found["memory"] = memory_over_plain(work, device, precision)
        print(found["memory"], flush=True)
        result[work.name] = found
        save(arguments.out, result)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
