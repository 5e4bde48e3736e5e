"""What `auto` chooses on the works of inputs/works, beside what it chooses from, in turns.

    python benchmarks/measurements/auto.py --budget-seconds 260 --out auto.json
    python benchmarks/measurements/auto.py --works dcgan,lstm --device fake --tiny --turns 2

The ways are the loop by hand, that loop with `hr.speed_up`, which keeps its graphs or chooses by
itself ("sped up, auto"), and the engine's plans `pipeline`, `graph` and `auto`. All train from
their first batch on, in turns of a few steps, so that captures and what `auto` tries are in the
times: until both have chosen, and two turns more. "ms" are of those. "1,000 steps" is what `auto`
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
from typing import Any, Literal

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from eleven_works import FOLDER, ORDER, PlainScript
from measuring import header, save, table
from parts_works import sped_up

import headrace as hr
from headrace.bench import entries_of, find_work
from headrace.bench.trainable import EngineTrainable, Timing
from headrace.bench.works.work import Workload
from headrace.device import Device, open_device
from headrace.fake import fake_cuda

PLANS = ("pipeline", "graph", "auto")
PLAIN, KEPT, CHOSEN, RUN = "by hand", "sped up", "sped up, auto", 1000
#: Turns after the last choice.
_AFTER = 2


class SpedUpScript(PlainScript):
    """The loop of a work's plain script with `hr.speed_up` added."""

    def __init__(
        self, work: Workload, device: Device, precision: str | None, plan: Literal["auto", "graph"]
    ) -> None:
        super().__init__(work, device, precision, 0)
        self._plan: Literal["auto", "graph"] = plan
        self._handles: list[hr.SpeedUpHandle] = []

    def run(self, steps: int) -> Timing:
        if self._handles:
            return super().run(steps)
        with sped_up(self._work.build.__globals__, self._device, self._handles, self._plan):
            return super().run(steps)

    def report(self) -> hr.SpeedUpReport:
        return self._handles[0].report()

    def close(self) -> None:
        super().close()
        for handle in self._handles:
            handle.close()


class Auto:
    """What `auto` has chosen so far: the engine's plan, and `hr.speed_up`."""

    def __init__(self, engine: EngineTrainable, script: SpedUpScript) -> None:
        self._engine, self._script = engine, script

    def decisions(self) -> list[str | None]:
        return [(self._engine.graphs() or {}).get("decision"), self._script.report().decision]


def measured(name: str, device: Device, options: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, Any] = {"tiny": True, "workers": 0} if options.tiny else {}
    work = find_work(f"{FOLDER / name}.py:work", given)
    precision = work.build.__globals__["PRECISION"]
    kept = SpedUpScript(work, device, precision, "graph")
    chosen = SpedUpScript(work, device, precision, "auto")
    plans = {
        entry.name: EngineTrainable(work, device, entry, seed=0)
        for entry in entries_of(list(PLANS), precision)
    }
    plain = PlainScript(work, device, precision, 0)
    ways: dict[str, Any] = {PLAIN: plain, KEPT: kept, CHOSEN: chosen, **plans}
    auto = Auto(plans["auto"], chosen)
    times: dict[str, list[float]] = {way: [] for way in ways}
    chose_in: int | None = None
    try:
        for way in ways.values():  # the loaders' workers start
            way.run(1)
        for turn in range(options.turns):
            for way, trainable in ways.items():
                times[way].append(trainable.run(options.steps).ms_per_step)
            if chose_in is None and None not in auto.decisions():
                chose_in = turn
            if chose_in is not None and turn - chose_in == _AFTER:
                break
        graphs = plans["graph"].graphs()
        row = times_of(times, chose_in, options.steps)
        row |= choices_of(plans["auto"].graphs() or {}, auto.decisions())
        row["graph's way"] = None if graphs is None else graphs["way"]
        row["sped up"] = {"kept": str(kept.report()), "auto": str(chosen.report())}
    finally:
        for trainable in ways.values():
            trainable.close()
    return row


def times_of(times: dict[str, list[float]], chose_in: int | None, steps: int) -> dict[str, Any]:
    after = -_AFTER if chose_in is None else chose_in + 1
    ms = {way: statistics.median(found[after:] or found[-1:]) for way, found in times.items()}
    measured_steps = len(times[PLAIN]) * steps
    run_s = {
        way: (sum(found) * steps + (RUN - measured_steps) * ms[way]) / 1e3
        for way, found in times.items()
    }

    def more(way: str, than: float) -> float:
        return round(100 * (ms[way] / than - 1), 1)

    return {
        **{f"{way} ms": round(value, 3) for way, value in ms.items()},
        "beside the best, %": more("auto", min(ms["pipeline"], ms["graph"])),
        f"{RUN:,} steps, %": round(100 * (run_s["auto"] / run_s[PLAIN] - 1), 1),
        "sped up beside the best, %": more(CHOSEN, min(ms[PLAIN], ms[KEPT])),
        f"sped up, {RUN:,} steps, %": round(100 * (run_s[CHOSEN] / run_s[PLAIN] - 1), 1),
        "all": {way: [round(one, 4) for one in found] for way, found in times.items()},
        "steps a turn": steps,
    }


def choices_of(graphs: dict[str, Any], decisions: list[str | None]) -> dict[str, Any]:
    over = [None if text is None else re.search(r"over (\d+) steps", text) for text in decisions]
    after = [None if found is None else int(found[1]) for found in over]
    return {
        "chose": graphs.get("way"),
        "after steps": after[0],
        "sped up, after steps": after[1],
        "decision": decisions[0],
        "sped up, decision": decisions[1],
        "why not whole": graphs.get("why"),
        "rounding": graphs.get("rounding"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", default=",".join(ORDER), help="names, separated by commas")
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn")
    parser.add_argument("--turns", type=int, default=8, help="turns of each way, at most")
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
    hidden = ("all", "sped up", "why not whole", "rounding", "steps a turn", "graph's way")
    rows = {
        name: {
            key: value
            for key, value in row.items()
            if key not in hidden and not key.endswith("decision")
        }
        for name, row in result["works"].items()
    }
    print(table(rows))
    if result["left out"]:
        print(f"left out, for want of time: {','.join(result['left out'])}")


if __name__ == "__main__":
    main()
