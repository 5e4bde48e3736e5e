"""What a checkpoint costs a running loop: the first one, and later ones.

    python benchmarks/measurements/checkpoints.py [--out results.json]

A Transformer base trains under `graph`, in turns that are as long as writing a checkpoint takes.
Every other turn saves a checkpoint. How much longer it takes than its neighbors is the whole cost:
the pause of the loop, memory traffic and the CPU time of writing.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from engine_works import Work, mlp, transformer
from measuring import header, save, table

from headrace.checkpoint import CheckpointWriter
from headrace.device import Device, open_device
from headrace.engine import Engine


class Turns:
    """An engine's endless loop, which runs some steps at a time."""

    def __init__(self, work: Work, device: Device, plan: str) -> None:
        model, optimizer = work.fresh(device.torch_device)
        self.device = device
        self.engine = Engine(
            model, optimizer, work.loss, plan=plan, device=device, precision="bf16"
        )
        host = work.batches
        if device.asynchronous:
            host = [tuple(part.pin_memory() for part in batch) for batch in host]
        self._steps: Iterator[object] = self.engine.steps(itertools.cycle(host))

    def walk(self, steps: int) -> None:
        for _ in itertools.islice(self._steps, steps):
            pass

    def turn_ms(self, steps: int, writer: CheckpointWriter | None) -> tuple[float, float]:
        """Milliseconds of a turn, and of the save at its beginning."""
        self.device.synchronize("bench")
        began = time.perf_counter()
        self.walk(10)  # the device has queued steps, as in a real run
        before = time.perf_counter()
        if writer is not None:
            writer.save(
                self.engine.state_dict(), self.engine.updates, unless_raised=self.engine.settle
            )
        saved_ms = (time.perf_counter() - before) * 1e3
        self.walk(steps - 10)
        self.device.synchronize("bench")
        return (time.perf_counter() - began) * 1e3, saved_ms


def measure(turns: Turns, folder: Path, steps: int, checkpoints: int) -> dict[str, Any]:
    plain: list[float] = []
    with_one: list[float] = []
    stops: list[float] = []
    turns.walk(50)
    with CheckpointWriter(turns.device, folder) as writer:
        plain.append(turns.turn_ms(steps, None)[0])
        for _ in range(checkpoints):
            ms, stop = turns.turn_ms(steps, writer)
            with_one.append(ms)
            stops.append(stop)
            plain.append(turns.turn_ms(steps, None)[0])
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    more = [ms - (plain[at] + plain[at + 1]) / 2 for at, ms in enumerate(with_one)]
    noise = [abs(a - b) for a, b in itertools.pairwise(plain)]
    return {
        "MB": round(size / len(list(folder.glob("step-*"))) / 1e6, 1),
        "steps a turn": steps,
        "ms a step": round(statistics.median(plain) / steps, 3),
        "the first took longer by ms": round(more[0], 2),
        "others, median ms": round(statistics.median(more[1:]), 2),
        "plain turns differ by ms": round(statistics.median(noise), 2),
        "save() ms, the first": round(stops[0], 2),
        "save() ms, others": round(statistics.median(stops[1:]), 2),
        "pinned MB": round(turns.device.pinned.held_bytes / 1e6, 1),
        "all": {"plain": plain, "with a checkpoint": with_one, "save": stops},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write all figures here, as JSON")
    parser.add_argument("--steps", type=int, help="steps per turn")
    parser.add_argument("--checkpoints", type=int, default=6)
    arguments = parser.parse_args()
    device = open_device("auto")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    work = transformer(30, 60) if device.asynchronous else mlp(rows=64, width=256)
    steps = arguments.steps or (300 if device.asynchronous else 100)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        turns = Turns(work, device, "graph")
        rows[work.name] = measure(turns, Path(folder), steps, arguments.checkpoints)
    shown = {name: {k: v for k, v in row.items() if k != "all"} for name, row in rows.items()}
    print(table(shown), flush=True)
    save(arguments.out, {**header("checkpoints.py"), "rows": rows})


if __name__ == "__main__":
    main()
