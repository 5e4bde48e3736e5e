"""How far ahead the host should be under `graph`: wall and CPU time of a step by run-ahead.

    python benchmarks/measurements/run_ahead.py [--out results.json]

The driver's queue holds a few thousand kernels. If the host launches more, the launch busy-waits
and occupies a core. A host that waits for an event of an earlier step sleeps. This needs a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from engine_works import Work, mlp, transformer
from measuring import header, interleaved_ms, save, table

from headrace.device import Device, open_device
from headrace.engine import Engine
from headrace.plan import Plan

AHEAD = (2, 3, 4, 6, 8)


def way(work: Work, device: Device, ahead: int, precision: str) -> Callable[[int], object]:
    model, optimizer = work.fresh(device.torch_device)
    plan = replace(Plan.preset("graph"), run_ahead_steps=ahead)
    engine = Engine(model, optimizer, work.loss, plan=plan, device=device, precision=precision)
    host = [tuple(part.pin_memory() for part in batch) for batch in work.batches]

    def run(steps: int) -> object:
        return engine.epoch(itertools.islice(itertools.cycle(host), steps))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write all figures here, as JSON")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    device = open_device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    rows: dict[str, dict[str, Any]] = {}
    for work, precision, steps in (
        (transformer(30, 60), "bf16", 60),
        (mlp(rows=64, width=256, layers=8), "tf32", 400),
    ):
        ways = {str(ahead): way(work, device, ahead, precision) for ahead in AHEAD}
        found = interleaved_ms(ways, device, steps=steps, repeats=arguments.repeats, warm_up=20)
        for ahead, figures in found.items():
            cpu = sorted(figures["cpu"])[len(figures["cpu"]) // 2]
            rows[f"{work.name}, {ahead} ahead"] = {"ms a step": figures["ms"], "CPU ms": cpu}
    print(table(rows), flush=True)
    save(arguments.out, {**header("run_ahead.py"), "rows": rows})


if __name__ == "__main__":
    main()
