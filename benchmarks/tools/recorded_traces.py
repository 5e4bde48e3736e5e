"""Does `headrace diagnose trace.json.gz` find what is known about a trace?

    python benchmarks/tools/recorded_traces.py --keep traces --out recorded.json

The twelve loops of `slow_scripts.py`, and one that replays a CUDA graph, run under torch.profiler
as its documentation says, with and without Python stacks. Each trace is diagnosed. The largest idle
part must be the loop's known cause, and the GPU must compute for as long as the kernels of its
steps take together. Needs a GPU; about four minutes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

import slow_scripts
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from headrace.diagnosis import diagnose_traces

ACTIVE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join([*slow_scripts.CASES, "graph"]))
    parser.add_argument("--keep", type=Path, help="a folder for the traces")
    parser.add_argument("--out", type=Path, help="a file for the figures")
    parser.add_argument("--record", nargs=2, help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args()
    if options.record is not None:
        record(options.cases, Path(options.record[0]), with_stack=options.record[1] == "stacks")
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        found = [
            checked(name, folder, stacks)
            for name in options.cases.split(",")
            for stacks in ("none", "stacks")
        ]
    right = sum(one.get("cause") == one["expected"] for one in found)
    print(f"the cause is right in {right} of {len(found)}")
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2))


def checked(name: str, folder: Path, stacks: str) -> dict[str, Any]:
    """What is said of a trace of one loop, and what is true."""
    path = folder / f"{name}-{stacks}.json.gz"
    command = [sys.executable, __file__, "--cases", name, "--record", str(path), stacks]
    subprocess.run(command, check=True)
    result = diagnose_traces([str(path)])
    parts = result.parts
    assert parts is not None
    idle = {part: getattr(parts, part) for part in parts.__slots__ if part != "computing"}
    found = {
        "case": name,
        "stacks": stacks,
        "expected": "launch" if name == "graph" else slow_scripts.CASES[name].cause,
        "cause": max(idle, key=lambda part: idle[part]),
        "step_ms": result.step_ms,
        "computing_ms": parts.computing,
        "kernels_ms": kernels_ms(path),
        "unattributed": parts.unattributed / parts.total,
        "replay_error": result.replay_error,
        "lines": [[one.title, one.line.function if one.line else None] for one in result.lines],
        "python": [one.line.function for one in result.python_lines],
        "mb": path.stat().st_size / 1e6,
    }
    shown = {key: round(one, 3) if isinstance(one, float) else one for key, one in found.items()}
    print(json.dumps(shown), flush=True)
    return found


def kernels_ms(path: Path) -> float:
    """How long at least one kernel ran per step, counted over the whole trace without Headrace."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    end = total = 0.0
    for start, dur in sorted(
        (float(one["ts"]), float(one["dur"]))
        for one in events
        if one.get("cat") in ("kernel", "gpu_memset")
    ):
        total += max(0.0, start + dur - max(start, end))
        end = max(end, start + dur)
    return total / ACTIVE / 1e3


def record(name: str, path: Path, *, with_stack: bool) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "graph":
        steps = graph_steps(device)
    else:
        steps = slow_scripts.train(name, device, tiny=device.type == "cpu")
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(skip_first=20, wait=1, warmup=2, active=ACTIVE, repeat=1),
        with_stack=with_stack,
    ) as profiler:
        for _ in islice(steps, 20 + 1 + 2 + ACTIVE):
            profiler.step()
    profiler.export_chrome_trace(str(path))


def graph_steps(device: torch.device) -> Iterator[None]:
    """A captured step of many small kernels, with as many launches outside of the graph."""
    weight = torch.randn(512, 512, device=device)

    def work() -> torch.Tensor:
        value = weight
        for _ in range(100):
            value = torch.tanh(value @ weight)
        return value

    for _ in range(3):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    while True:
        graph.replay()
        for _ in range(100):
            weight.mul_(1.0)
        torch.cuda.current_stream().synchronize()
        yield


if __name__ == "__main__":
    main()
