"""What monitoring costs: the monitor's share of a core, and a step's time before and after a trace.

    python benchmarks/measurements/monitor.py [--out results.json]

After a profiler has run, a process launches kernels more slowly; the last figure says how much.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from engine_works import Work, transformer
from measuring import header, save

from engine import Planned
from headrace.device import Device, open_device
from headrace.machine import BusyWindow, Monitor
from headrace.plan import Plan


def sampling(device: Device, seconds: float = 10.0) -> dict[str, Any]:
    """The CPU time of an otherwise idle process that is monitored, as a share of a core."""
    with Monitor(device):
        time.sleep(1.0)  # loading modules is not part of the cost of sampling
    began_s = time.process_time()
    with Monitor(device) as monitor:
        time.sleep(seconds)
    used_s = time.process_time() - began_s
    last = monitor.latest()
    assert last is not None
    return {
        "core_share": round(used_s / seconds, 5),
        "samples_per_s": round(len(monitor.samples()) / seconds, 2),
        "last": last.to_dict(),
    }


def tracing(work: Work, device: Device, plan: str, precision: str) -> dict[str, Any]:
    """A step's time before a trace and after it, and what the trace saw."""
    way = Planned(work, device, Plan.preset(plan), precision)
    way(20)
    before = [_ms(way, device) for _ in range(5)]
    began_s = time.monotonic()
    with device.trace() as trace:
        way(10)
    traced_s = time.monotonic() - began_s
    after = [_ms(way, device) for _ in range(5)]
    window = BusyWindow.of(trace, steps=10)
    way.engine.close()
    return {
        "ms_before": round(statistics.median(before), 4),
        "ms_after": round(statistics.median(after), 4),
        "trace_took_s": round(traced_s, 3),
        "missing": trace.missing,
        "window": None if window is None else window.to_dict(),
    }


def _ms(way: Planned, device: Device, steps: int = 40) -> float:
    device.synchronize("bench")
    began_s = time.perf_counter()
    way(steps)
    device.synchronize("bench")
    return (time.perf_counter() - began_s) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = open_device("auto")
    result: dict[str, Any] = header("monitor.py") | {"sampling": sampling(device)}
    print(f"sampling: {result['sampling']}", flush=True)
    for plan in ("pipeline", "graph") if device.captures else ():
        result[plan] = tracing(transformer(), device, plan, "bf16")
        print(f"{plan}: {result[plan]}", flush=True)
    save(arguments.out, result)


if __name__ == "__main__":
    main()
