"""Two versions of Headrace on the same workload, in turns: is the newer one slower?

    python benchmarks/tools/two_versions.py OLD/src [--out results.json] [--plans graph,max]
        [--rounds 3]

For each plan, each version trains the built-in workload `translation` (30 × 60, Transformer base,
bf16) in its own process, one after the other, `--rounds` times. Each process compiles, captures and
warms up first, then times epochs of `--steps` steps; the medians of each round are compared. The
losses of the first epoch must be equal bit for bit where the plan promises it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, save, table

OWN = Path(__file__).resolve().parents[2] / "src"
# Runs with either version: through names that both of them have.
CHILD = """
import json, statistics, sys, time
import torch
import headrace as hr
try:
    from headrace.bench import find_work
except ImportError:
    from headrace.bench.finding import find_work
plan, steps, repeats, device = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
options = {} if device == "cuda" else {"preset": "tiny", "vocabulary": 500, "batch": 4, "length": 8}
device = hr.open_device(device)
made = find_work("translation", options).make(device, seed=0)
loader = list(made.loader)
if device.asynchronous:
    loader = [tuple(part.pin_memory() for part in batch) for batch in loader]
epoch = (loader * (steps // len(loader) + 1))[:steps]
options = {"plan": plan, "device": device, "precision": "bf16"}
engine = hr.Engine(made.model, made.optimizer, made.loss, **options)
losses = engine.epoch(epoch).losses
engine.epoch(epoch)
times = []
for _ in range(repeats):
    device.synchronize("bench")
    start = time.perf_counter()
    engine.epoch(epoch)
    device.synchronize("bench")
    times.append((time.perf_counter() - start) / steps * 1e3)
graphs = engine.graphs
print(json.dumps({"ms": statistics.median(times), "all": times, "losses": losses,
                  "replays": None if graphs is None else graphs.replays,
                  "why": None if graphs is None else graphs.why}))
"""


def measure(src: Path, plan: str, steps: int, repeats: int, device: str) -> dict[str, Any]:
    command = [sys.executable, "-c", CHILD, plan, str(steps), str(repeats), device]
    environment = {**os.environ, "PYTHONPATH": str(src)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{src} under {plan} failed:\n{ran.stderr}")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="the older version's src folder")
    parser.add_argument("--out", type=Path, help="write all figures here, as JSON")
    parser.add_argument("--plans", default="graph,max")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for plan in arguments.plans.split(","):
        found: dict[str, list[dict[str, Any]]] = {"old": [], "new": []}
        for _ in range(arguments.rounds):
            for version, src in (("old", arguments.old.resolve()), ("new", OWN)):
                one = measure(src, plan, arguments.steps, arguments.repeats, arguments.device)
                print(plan, version, f"{one['ms']:.3f} ms", one["replays"], one["why"], flush=True)
                found[version].append(one)
        ratios = [
            new["ms"] / old["ms"] for old, new in zip(found["old"], found["new"], strict=True)
        ]
        rows[plan] = {
            "old ms": round(statistics.median(one["ms"] for one in found["old"]), 4),
            "new ms": round(statistics.median(one["ms"] for one in found["new"]), 4),
            "new × old": round(statistics.median(ratios), 4),
            "ratios": [round(ratio, 4) for ratio in ratios],
            "same losses": found["old"][0]["losses"] == found["new"][0]["losses"],
            "replays": {version: ones[0]["replays"] for version, ones in found.items()},
            "why": {version: ones[0]["why"] for version, ones in found.items()},
        }
    shown = ("old ms", "new ms", "new × old", "same losses")
    print(table({plan: {key: row[key] for key in shown} for plan, row in rows.items()}))
    save(arguments.out, {**header("two_versions.py"), "rows": rows})


if __name__ == "__main__":
    main()
