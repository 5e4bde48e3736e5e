"""What `headrace.monitor_steps` costs a step of 1, 5 and 50 ms, in turns, and what memory it keeps.

    python benchmarks/measurements/step_monitor.py [--out results.json] [--turns 6] [--many 100000]

A step is an optimizer's step, a loader's batch, and as much Python as takes that long without the
monitor, so that all that the monitor does is added to it. `added_us` is the median of the turns'
differences, `added_cpu_us` that of the process's CPU time, which other processes change less.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, save
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr

STEPS_MS = (1.0, 5.0, 50.0)
#: More often than usual, so that each turn has reports.
_EVERY_S = 0.5


class Times(NamedTuple):
    """Milliseconds per step."""

    wall: float
    cpu: float


class Loop:
    """A training that runs for as long as it is asked to."""

    def __init__(self) -> None:
        weight = torch.nn.Parameter(torch.ones(8))
        weight.grad = torch.ones(8)
        self._optimizer = torch.optim.SGD([weight], lr=0.1)
        self._loader = DataLoader(TensorDataset(torch.ones(100_000, 2)), batch_size=2)
        self._batches = iter(self._loader)

    def run(self, steps: int, work_ms: float) -> Times:
        """Milliseconds per step. `work_ms` is work of the host, not a time by the clock: what the
        monitor does comes on top."""
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(steps):
            if next(self._batches, None) is None:
                self._batches = iter(self._loader)
            self._optimizer.step()
            _work(work_ms)
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        return Times(wall_s / steps * 1e3, cpu_s / steps * 1e3)


def _work(ms: float) -> None:
    """As many rounds as take so long without the monitor."""
    for _ in range(round(ms * _PER_MS)):
        pass


def _rounds_per_ms() -> float:
    count = 2_000_000
    start_s = time.perf_counter()
    for _ in range(count):
        pass
    return count / (time.perf_counter() - start_s) / 1e3


_PER_MS = _rounds_per_ms()


def cost(work_ms: float, turns: int, seconds: float) -> dict[str, Any]:
    """Milliseconds of a step with the monitor and without, in turns."""
    loop = Loop()
    steps = max(20, round(seconds / work_ms * 1e3))
    loop.run(20, work_ms)
    pairs = []
    for turn in range(turns):

        def plain() -> Times:
            return loop.run(steps, work_ms)

        def monitored() -> Times:
            with hr.monitor_steps(every_s=_EVERY_S):
                loop.run(15, 0.0)  # its warm-up
                return loop.run(steps, work_ms)

        ways: list[Callable[[], Times]] = [plain, monitored]
        found = {way.__name__: way() for way in (ways if turn % 2 else ways[::-1])}
        pairs.append((found["plain"], found["monitored"]))
    added = [after.wall - before.wall for before, after in pairs]
    added_cpu = [after.cpu - before.cpu for before, after in pairs]
    plain_ms = statistics.median(before.wall for before, _ in pairs)
    return {
        "plain_ms": plain_ms,
        "added_us": statistics.median(added) * 1e3,
        "all_added_us": [round(one * 1e3, 2) for one in added],
        "added_cpu_us": statistics.median(added_cpu) * 1e3,
        "all_added_cpu_us": [round(one * 1e3, 2) for one in added_cpu],
        "share": statistics.median(added) / plain_ms,
        "steps": steps * turns,
    }


def memory(steps: int) -> dict[str, Any]:
    """Resident memory after a tenth of the steps, and after all."""
    loop, process = Loop(), psutil.Process()
    with hr.monitor_steps(every_s=_EVERY_S):
        loop.run(steps // 10, 0.02)
        gc.collect()
        before = process.memory_info().rss
        loop.run(steps - steps // 10, 0.02)
        gc.collect()
        after = process.memory_info().rss
    return {"steps": steps, "grown_kb": (after - before) / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--many", type=int, default=100_000)
    options = parser.parse_args()
    result = header("step_monitor.py")
    for work_ms in STEPS_MS:
        result[f"{work_ms:g} ms"] = found = cost(work_ms, options.turns, options.seconds)
        print(
            f"{work_ms:4g} ms: {found['added_us']:+.1f} µs ({found['share']:+.2%}), "
            f"CPU time {found['added_cpu_us']:+.1f} µs",
            flush=True,
        )
        if options.out is not None:
            save(options.out, result)
    result["memory"] = memory(options.many)
    print(f"{options.many} steps: {result['memory']['grown_kb']:.0f} kB more")
    if options.out is not None:
        save(options.out, result)


if __name__ == "__main__":
    main()
