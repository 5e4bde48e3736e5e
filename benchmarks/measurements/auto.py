"""The plan `auto` on the works of inputs/works: by hand, `pipeline`, `graph`, `auto`, in turns.

    python benchmarks/measurements/auto.py --budget-seconds 190 --out auto.json
    python benchmarks/measurements/auto.py --works dcgan,lstm --device fake --tiny

All four train from their first batch on, in turns of a few steps, so that captures and what `auto`
tries are in the times. "ms" are of the turns after `auto` has decided. "1,000 steps" is what `auto`
takes for them compared with the loop by hand: the turns that were measured, and the rest at the
speed of the last ones.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is loaded

import argparse
import contextlib
import gc
import logging
import re
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from eleven_works import FOLDER, ORDER, PlainScript
from measuring import header, save, table

from headrace.bench import entries_of, find_work
from headrace.bench.trainable import EngineTrainable
from headrace.device import Device, open_device
from headrace.fake import fake_cuda

PLANS = ("pipeline", "graph", "auto")
PLAIN, RUN = "by hand", 1000


def measured(name: str, device: Device, options: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, Any] = {"tiny": True, "workers": 0} if options.tiny else {}
    work = find_work(f"{FOLDER / name}.py:work", given)
    precision = work.build.__globals__["PRECISION"]
    ways: dict[str, Any] = {PLAIN: PlainScript(work, device, precision, 0)}
    for entry in entries_of(list(PLANS), precision):
        ways[entry.name] = EngineTrainable(work, device, entry, seed=0)
    times: dict[str, list[float]] = {way: [] for way in ways}
    decided_in: int | None = None
    try:
        for way in ways.values():  # the loaders' workers start
            way.run(1)
        for turn in range(options.turns):
            for way, trainable in ways.items():
                times[way].append(trainable.run(options.steps).ms_per_step)
            graphs = ways["auto"].graphs()
            if decided_in is None and graphs is not None and graphs["decision"] is not None:
                decided_in = turn
        report = {way: ways[way].graphs() for way in ("graph", "auto")}
    finally:
        for trainable in ways.values():
            trainable.close()
    return row_of(times, report, decided_in, options.steps)


def row_of(
    times: dict[str, list[float]], report: dict[str, Any], decided_in: int | None, steps: int
) -> dict[str, Any]:
    after = -1 if decided_in is None or decided_in + 1 == len(times[PLAIN]) else decided_in + 1
    ms = {way: statistics.median(found[after:]) for way, found in times.items()}
    measured_steps = len(times[PLAIN]) * steps
    run_s = {
        way: (sum(found) * steps + (RUN - measured_steps) * ms[way]) / 1e3
        for way, found in times.items()
    }
    auto = report["auto"] or {}
    decision = auto.get("decision")
    over = None if decision is None else re.search(r"(\d+) steps", decision)
    return {
        **{f"{way} ms": round(value, 3) for way, value in ms.items()},
        "beside the best, %": round(100 * (ms["auto"] / min(ms["pipeline"], ms["graph"]) - 1), 1),
        f"{RUN:,} steps, %": round(100 * (run_s["auto"] / run_s[PLAIN] - 1), 1),
        "chose": auto.get("way"),
        "after steps": None if over is None else int(over[1]),
        "decision": decision,
        "why not whole": auto.get("why"),
        "rounding": auto.get("rounding"),
        "graph's way": None if report["graph"] is None else report["graph"]["way"],
        "all": {way: [round(one, 4) for one in found] for way, found in times.items()},
        "steps a turn": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", default=",".join(ORDER), help="names, separated by commas")
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn")
    parser.add_argument("--turns", type=int, default=5, help="turns of each way")
    parser.add_argument("--budget-seconds", type=float, help="begin no work that may take longer")
    parser.add_argument("--device", default="cuda", help="cuda, fake, …")
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    result = header("auto.py") | {"works": {}, "left out": []}
    began, longest = time.monotonic(), 0.0
    opened: Any = contextlib.nullcontext()
    if options.device == "fake":
        opened = fake_cuda(keep_timeline=False)
    with opened as fake:
        device = fake or open_device(options.device)
        for name in options.works.split(","):
            start = time.monotonic()
            if options.budget_seconds and start - began + longest > options.budget_seconds:
                result["left out"].append(name)
                continue
            try:
                row = measured(name, device, options)
            except Exception as problem:
                traceback.print_exc()
                row = {"error": f"{type(problem).__name__}: {problem}"[:300]}
            gc.collect()
            device.release_unused()
            row["seconds"] = round(time.monotonic() - start, 1)
            longest = max(longest, row["seconds"])
            result["works"][name] = row
            save(options.out, result)
            print(name, {key: row[key] for key in row if key != "all"}, flush=True)
    save(options.out, result)  # with what was left out
    hidden = ("all", "decision", "why not whole", "rounding", "steps a turn", "graph's way")
    rows = {
        name: {key: value for key, value in row.items() if key not in hidden}
        for name, row in result["works"].items()
    }
    print(table(rows))
    if result["left out"]:
        print(f"left out, for want of time: {','.join(result['left out'])}")


if __name__ == "__main__":
    main()
