"""Every form of host wait on this machine's GPU: found, with its line, and as often as CUDA waits?

    python benchmarks/proofs/wait_forms.py --out result.json

The table is the tests' own (`tests/support/diagnosis/wait_forms.py`): each form alone and nested,
in functions, decorators, threads, generators, hooks and so on. "in trace" counts the synchronizing
calls of the driver that PyTorch's profiler saw. A form that waits more often than was found would
show here, and one that was counted twice.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, save

from headrace.device import chrome_trace, open_device
from headrace.diagnosis.waits import Wait, watch_waits
from headrace.text_table import text_table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.diagnosis.wait_forms import Case, Inputs, write_module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device, cases = open_device("cuda"), {}
    with tempfile.TemporaryDirectory() as folder:
        module, table = write_module(Path(folder) / "forms.py")
        inputs = Inputs()
        for case in table:
            getattr(module, case.function)(inputs)  # libraries are loaded at the first call
            cases[str(case)] = run(case, module, inputs, device)
    result = header("wait_forms.py") | {"cases": cases, "totals": totals(cases)}
    save(options.out, result)
    shown = [
        [name, one["found"], one["lines"], one["form"], one["in trace"]]
        for name, one in cases.items()
        if one["problem"]
    ]
    if shown:
        print(text_table(("code", "found", "lines", "form", "in trace"), shown))
    print(result["totals"])


def run(case: Case, module: Any, inputs: Inputs, device: Any) -> dict[str, Any]:
    waits: list[Wait] = []
    device.synchronize("bench")
    with watch_waits(device, waits.append):
        getattr(module, case.function)(inputs)
    with chrome_trace() as content:
        getattr(module, case.function)(inputs)
    calls = Counter(
        event["name"]
        for event in content["traceEvents"]
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and "Synchronize" in event.get("name", "")
    )
    calls["cudaDeviceSynchronize"] -= 1  # the profiler's own, at its end
    synchronizing = sum(calls.values())
    lines = sorted({wait.line.line if wait.line else 0 for wait in waits})
    forms = sorted({wait.form.name for wait in waits})
    problem = []
    if not waits:
        problem.append("not found")
    if lines and lines != [case.line]:
        problem.append("another line" if 0 not in lines else "no line")
    if case.form not in forms:
        problem.append("another form")
    by_thrust = "dim=" in case.code or "coalesce" in case.code  # it waits several times
    if synchronizing > len(waits) and not by_thrust:
        problem.append("fewer waits than calls")
    # A copy that is not awaited has no synchronizing call; nor need freeing the cache have one.
    may_not_wait = "non_blocking=True" in case.code or case.form in ("empty_cache", "scatter")
    if len(waits) > synchronizing and not may_not_wait:
        problem.append("more waits than calls")
    return {
        "found": len(waits),
        "lines": lines,
        "expected line": case.line,
        "form": forms,
        "in trace": synchronizing,
        "problem": problem,
    }


def totals(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    count = len(cases)
    return {
        "cases": count,
        "found": sum(one["found"] > 0 for one in cases.values()),
        "line exact": sum(one["lines"] == [one["expected line"]] for one in cases.values()),
        "line wrong": sum("another line" in one["problem"] for one in cases.values()),
        "form right": sum("another form" not in one["problem"] for one in cases.values()),
        "as many as calls": sum(
            {"fewer waits than calls", "more waits than calls"}.isdisjoint(one["problem"])
            for one in cases.values()
        ),
        "gpu": torch.cuda.get_device_name(),
    }


if __name__ == "__main__":
    main()
