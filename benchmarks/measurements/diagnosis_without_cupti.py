"""What `headrace diagnose` says with CUPTI and without it, on this machine's GPU.

    python benchmarks/measurements/diagnosis_without_cupti.py --out result.json
    python benchmarks/measurements/diagnosis_without_cupti.py --loops item,mask --works none
        --out part.json

The twelve loops of `slow_scripts.py` and the eleven of `works/` are diagnosed twice, each time in a
process of its own. Is the same part of a step the largest idle one, and how far are the figures
from each other? `step` and `parts` are milliseconds of a step.

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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

import slow_scripts
from measuring import header, save

from diagnosis import WINDOWS, WORKS, in_a_process, largest_idle, line_found, observe, steps_of_work
from headrace.device import Device
from headrace.records import DiagnosisResult, TimeParts
from headrace.text_table import text_table

#: Below this share of idle time, a step is busy: what it waits for does not matter.
BUSY = 0.05
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
        ways = {
            way: in_a_process(partial(_diagnosed, kind, name, way, options.tiny))
            for way in ("cupti", "events")
        }
        found = ways | _compared(ways, _cause(kind, name))
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


def _diagnosed(kind: str, name: str, way: str, tiny: bool, device: Device) -> dict[str, Any]:
    settings = replace(WINDOWS, cupti=way == "cupti")
    if kind == "loops":
        loop = slow_scripts.train(name, device.torch_device, tiny=tiny)
        return _figures(observe(name, loop, settings=settings))
    with steps_of_work(name, device, tiny) as steps:
        return _figures(observe(name, steps, settings=settings))


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
    """Whether the class is the same, and how much the large parts differ, as shares of a step: the
    step itself takes longer in one process than in another."""
    cupti, events = ways["cupti"], ways["events"]
    if not cupti.get("parts") or not events.get("parts"):
        return {"same": False, "cause": cause}
    shares = [
        {name: ms / one["step"] for name, ms in one["parts"].items()} for one in (cupti, events)
    ]
    large = [name for name in shares[0] if shares[0][name] >= LARGE]
    return {
        "cause": cause,
        "same": cupti["class"] == events["class"],
        "right": events["class"] == (cause or cupti["class"]),
        "errors": {name: round(shares[1][name] / shares[0][name] - 1, 4) for name in large},
        "points": {name: round(shares[1][name] - shares[0][name], 4) for name in shares[0]},
    }


def _totals(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(error) for one in found.values() for error in one.get("errors", {}).values()]
    return {
        "class_as_with_cupti": f"{sum(one['same'] for one in found.values())} of {len(found)}",
        "class_right": f"{sum(bool(one.get('right')) for one in found.values())} of {len(found)}",
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
        ways = one["cupti"], one["events"]
        rows.append(
            [
                name,
                one["cause"],
                *(way.get("class") or way.get("error", "–") for way in ways),
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
