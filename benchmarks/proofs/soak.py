"""A long run under `pipeline` and under `graph`: does anything grow, is anything lost?

    python benchmarks/proofs/soak.py --out soak.json # 20,000 steps each on a GPU, 2,000 on a CPU

The run has batches of two shapes, writes checkpoints, and skips updates whose loss is not finite.
PyTorch's reserved device memory must be the same at the mark and at the end, and every loss must be
reported once, in order.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from engine_works import Work, mlp
from measuring import header, save, table

from headrace.checkpoint import CheckpointWriter
from headrace.device import Device, open_device
from headrace.engine import Engine

PLANS = ("pipeline", "graph")
CHECKPOINTS = 10


def soak(
    work: Work, device: Device, plan: str, steps: int, mark: int, folder: Path
) -> dict[str, Any]:
    model, optimizer = work.fresh(device.torch_device)
    engine = Engine(model, optimizer, work.loss, plan=plan, device=device, on_nonfinite="skip")
    host = work.batches
    if device.asynchronous:
        host = [tuple(part.pin_memory() for part in batch) for batch in host]
    process = psutil.Process()
    marks: dict[str, Any] = {}
    reported: list[int] = []
    started = time.perf_counter()
    with CheckpointWriter(device, folder) as writer:
        for info in engine.steps(itertools.islice(itertools.cycle(host), steps)):
            reported += [entry.step for entry in info.arrived]
            # One checkpoint before the mark: it needs its own memory for the cloned state.
            if (info.batch + 1) % (steps // CHECKPOINTS) == 0 or info.batch + 1 == mark // 2:
                writer.save(engine.state_dict(), engine.updates)
            if info.batch + 1 in (mark, steps):
                reported += [entry.step for entry in engine.settle("soak")]
                marks[str(info.batch + 1)] = {
                    "reserved_bytes": device.memory().reserved,
                    "host_bytes": process.memory_info().rss,
                }
    elapsed_s = time.perf_counter() - started
    result = engine.last_result
    assert result is not None
    first, last = marks[str(mark)], marks[str(steps)]
    return {
        "steps": steps,
        "ms a step": round(elapsed_s / steps * 1e3, 3),
        "replays": result.statistics.replays,
        "reserved MB at the mark": round(first["reserved_bytes"] / 1e6, 3),
        "reserved MB at the end": round(last["reserved_bytes"] / 1e6, 3),
        "reserved is the same": first["reserved_bytes"] == last["reserved_bytes"],
        "host MB grown": round((last["host_bytes"] - first["host_bytes"]) / 1e6, 2),
        "losses in order, each once": reported == [*range(steps)] and len(result.losses) == steps,
        "all finite": all(map(math.isfinite, result.losses)),
        "pinned buffers lent": device.pinned.lent,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="steps of each plan")
    parser.add_argument("--mark", type=int, help="the step whose memory is compared with the end")
    parser.add_argument("--out", type=Path, help="write all figures here, as JSON")
    arguments = parser.parse_args()
    device = open_device("auto")
    steps = arguments.steps or (20_000 if device.asynchronous else 2_000)
    mark = arguments.mark or (1_000 if steps > 2_000 else max(1, steps // 2))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    layers = 8 if device.asynchronous else 2
    works = [
        mlp(rows=rows, width=256 if device.asynchronous else 32, layers=layers) for rows in (64, 48)
    ]
    both = [batch for pair in zip(*(work.batches for work in works), strict=True) for batch in pair]
    work = Work(works[0].name + " and 48", works[0].make_model, works[0].loss, both)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for plan in PLANS:
            where = Path(folder) / plan
            where.mkdir()
            rows[plan] = soak(work, device, plan, steps, mark, where)
    print(table({key: {p: row[key] for p, row in rows.items()} for key in rows["pipeline"]}))
    save(arguments.out, {**header("soak.py"), "work": work.name, "mark": mark, "rows": rows})
    wrong = [
        (plan, key)
        for plan, row in rows.items()
        for key in ("reserved is the same", "losses in order, each once", "all finite")
        if not row[key]
    ]
    if wrong:
        raise SystemExit(f"wrong: {wrong}")


if __name__ == "__main__":
    main()
