"""What `headrace diagnose` says with CUPTI and without it, on this machine's GPU.

    python benchmarks/measurements/diagnosis_without_cupti.py --out result.json
    python benchmarks/measurements/diagnosis_without_cupti.py --loops item,mask --works none
        --out part.json

The twelve loops of `slow_scripts.py` and the eleven of `works/` are diagnosed twice, each in a
process of its own: first with CUDA events, then with CUPTI, which makes later launches slower. Is
the same part of a step the largest idle one, and how far are the figures from each other? `step`
and `parts` are milliseconds of a step.

The last lines are a table and the totals.
"""

from __future__ import annotations

import os

# Before PyTorch is loaded: the profiler needs them for loops that replay graphs.
os.environ.setdefault("TEARDOWN_CUPTI", "0")
os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

import slow_scripts
from measuring import header, save

from diagnosis import WINDOWS, WORKS, in_a_process, largest_idle, line_found, steps_of_work
from headrace.device import Device
from headrace.diagnosis import Settings
from headrace.diagnosis.explanation import explain
from headrace.diagnosis.session import Session
from headrace.records import DiagnosisResult, Environment, TimeParts
from headrace.text_table import text_table

#: Below this share of idle time, a step is busy: what it waits for does not matter.
BUSY = 0.05
#: What the device does.
BUSY_PARTS = ("computing", "other_ranks")
#: A part that has this share of a step is compared.
LARGE = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loops", default=",".join(slow_scripts.CASES), help="or none")
    parser.add_argument("--works", default=",".join(WORKS), help="or none")
    parser.add_argument("--tiny", action="store_true", help="small models, for a trial on a CPU")
    parser.add_argument("--budget-seconds", type=float, default=140.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    end = time.monotonic() + options.budget_seconds
    result: dict[str, Any] = {"found": {}, "skipped": []}
    jobs = [(kind, name) for kind in ("loops", "works") for name in _names(options, kind)]
    for kind, name in jobs:
        if time.monotonic() > end:
            result["skipped"].append(name)
            continue
        start = time.monotonic()
        ways = in_a_process(partial(_diagnosed, kind, name, options.tiny))
        found = ways if "error" in ways else ways | _compared(ways, _cause(kind, name))
        found["seconds"] = round(time.monotonic() - start, 1)
        result["found"][name] = found
        print(name, json.dumps(found)[:600], flush=True)
        if options.out is not None:
            save(options.out, result)
    result["totals"] = _totals(result["found"])
    result = header("diagnosis_without_cupti.py") | result  # not before: it opens the GPU
    if options.out is not None:
        save(options.out, result)
    _report(result)


def _names(options: Any, kind: str) -> list[str]:
    given: str = getattr(options, kind)
    return [] if given == "none" else given.split(",")


def _cause(kind: str, name: str) -> str | None:
    return slow_scripts.CASES[name].cause if kind == "loops" else None


def _diagnosed(kind: str, name: str, tiny: bool, device: Device) -> dict[str, Any]:
    if kind == "loops":
        return _both_ways(name, slow_scripts.train(name, device.torch_device, tiny=tiny))
    with steps_of_work(name, device, tiny) as steps:
        return _both_ways(name, steps)


def _both_ways(name: str, steps: Iterator[Any]) -> dict[str, Any]:
    return {
        way: _figures(_observed(name, steps, replace(WINDOWS, cupti=way == "cupti")))
        for way in ("events", "cupti")
    }


def _observed(name: str, steps: Iterator[Any], settings: Settings) -> DiagnosisResult:
    """Diagnose some steps of a loop that goes on."""
    ended: list[bool] = []
    with Session(settings, on_complete=lambda: ended.append(True)) as session:
        for _ in islice(steps, 80):
            if ended:
                break
    return explain(session.seen, name, None, Environment())


def _figures(result: DiagnosisResult) -> dict[str, Any]:
    parts = result.parts
    return {
        "outcome": result.outcome,
        "has_cupti": result.has_cupti,
        "class": _class(result),
        "step": result.step_ms,
        "profiled": result.profiled_ms,
        "parts": parts and {name: getattr(parts, name) for name in TimeParts.__slots__},
        "launches": result.launches_per_step,
        "waits": [result.waits_per_step, result.waits_in_trace],
        "line": line_found(result),
        "lines": [
            [one.line.line if one.line else None, one.form, one.blocked_ms, one.idle_ms]
            for one in result.lines[:5]
        ],
        "python_lines": [[one.line.line, one.ms, one.idle_ms] for one in result.python_lines[:5]],
        "replay_error": result.replay_error,
        "predictions": {one.change: round(one.speedup, 4) for one in result.predictions},
        "missing": list(result.missing),
        "notes": list(result.notes),
    }


def _class(result: DiagnosisResult) -> str | None:
    if result.idle_share is None:
        return None
    return "busy" if result.idle_share < BUSY else largest_idle(result)


def _compared(ways: dict[str, dict[str, Any]], cause: str | None) -> dict[str, Any]:
    """Whether the class is the same, and how much the large parts differ. What the device does
    takes equally long, whatever the host does; idle time changes with the host's speed from one
    window to the next, so its parts are compared as shares of it."""
    cupti, events = ways["cupti"], ways["events"]
    if not cupti.get("parts") or not events.get("parts"):
        return {"same": False, "cause": cause}
    both = [_comparable(one) for one in (cupti, events)]
    large = [name for name, ms in cupti["parts"].items() if ms >= LARGE * cupti["step"]]
    return {
        "cause": cause,
        "same": cupti["class"] == events["class"],
        "right": events["class"] == (cause or cupti["class"]),
        "errors": {name: round(both[1][name] / both[0][name] - 1, 4) for name in large},
        "step_error": round(events["step"] / cupti["step"] - 1, 4),
    }


def _comparable(one: dict[str, Any]) -> dict[str, float]:
    parts = one["parts"]
    idle_ms = one["step"] - sum(parts[name] for name in BUSY_PARTS)
    return {name: ms if name in BUSY_PARTS else ms / idle_ms for name, ms in parts.items()}


def _totals(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(error) for one in found.values() for error in one.get("errors", {}).values()]
    same, right = (sum(bool(one.get(name)) for one in found.values()) for name in ("same", "right"))
    return {
        "class_as_with_cupti": f"{same} of {len(found)}",
        "class_right": f"{right} of {len(found)}",
        "median_error": round(statistics.median(errors), 4) if errors else None,
        "figures_within_10_percent": f"{sum(error <= 0.1 for error in errors)} of {len(errors)}",
        "computing_within_10_percent": sum(
            abs(one["errors"]["computing"]) <= 0.1
            for one in found.values()
            if "computing" in one.get("errors", {})
        ),
    }


def _report(result: dict[str, Any]) -> None:
    rows = []
    for name, one in result["found"].items():
        ways = one.get("cupti", {}), one.get("events", {})
        rows.append(
            [
                name,
                one.get("cause"),
                *(way.get("class") or one.get("error", "–") for way in ways),
                *(f"{way['step']:.2f}" if way.get("step") else "–" for way in ways),
                " ".join(
                    f"{part[:5]} {error:+.0%}" for part, error in one.get("errors", {}).items()
                ),
                " ".join(str(way.get("line", "")) for way in ways),
                one["seconds"],
            ]
        )
    columns = ("case", "cause", "CUPTI", "events", "ms", "ms ", "large parts", "line", "s")
    print(text_table(columns, rows))
    print(json.dumps(result["totals"]), "skipped:", result["skipped"])


if __name__ == "__main__":
    main()
