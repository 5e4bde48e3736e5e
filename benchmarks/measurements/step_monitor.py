"""What `headrace.monitor_steps` costs a step of 1, 5 and 50 ms, in turns, and what memory it keeps.

    python benchmarks/measurements/step_monitor.py [--out results.json] [--seconds 25]

A step is an optimizer's step, a loader's batch, and as much Python as takes that long without the
monitor, so that all that the monitor does is added to it. A host's speed drifts by more than the
monitor costs: so blocks of a tenth of a second are run in pairs, one of which has the monitor, the
first in every second pair. `added_us` is the median of the pairs' differences per step, with the
range that holds the true median in 95 % of cases.

`bare` are steps without other work: what the monitor itself takes is a good part of them. There it
reports every 20 ms, so that a report is about as many steps as those of 5 ms in its usual ten
seconds.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, save
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr

STEPS_MS = (1.0, 5.0, 50.0)
_BLOCK_MS = 100.0
_BARE_STEPS, _BARE_EVERY_S = 4000, 0.02
_WARMUP_STEPS = 15


class Loop:
    """A training that runs for as long as it is asked to."""

    def __init__(self) -> None:
        weight = torch.nn.Parameter(torch.ones(8))
        weight.grad = torch.ones(8)
        self._optimizer = torch.optim.SGD([weight], lr=0.1)
        self._loader = DataLoader(TensorDataset(torch.ones(100_000, 2)), batch_size=2)
        self._batches = iter(self._loader)

    def run(self, steps: int, work_ms: float) -> float:
        """Microseconds per step. `work_ms` is work of the host, not a time by the clock: what the
        monitor does comes on top."""
        start_s = time.perf_counter()
        for _ in range(steps):
            if next(self._batches, None) is None:
                self._batches = iter(self._loader)
            self._optimizer.step()
            _work(work_ms)
        return (time.perf_counter() - start_s) / steps * 1e6


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


def cost(work_ms: float, steps: int, seconds: float, every_s: float = 10.0) -> dict[str, Any]:
    """What the monitor adds to a step, from pairs of blocks of so many steps."""
    loop = Loop()
    loop.run(20, work_ms)

    def plain() -> float:
        loop.run(_WARMUP_STEPS, 0.0)
        return loop.run(steps, work_ms)

    def monitored() -> float:
        with hr.monitor_steps(every_s=every_s):
            loop.run(_WARMUP_STEPS, 0.0)
            return loop.run(steps, work_ms)

    ways: list[Callable[[], float]] = [plain, monitored]
    found: dict[str, list[float]] = {"plain": [], "monitored": []}
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s or len(found["plain"]) < 2:
        for way in ways:
            found[way.__name__].append(way())
        ways.reverse()
    added = sorted(b - a for a, b in zip(found["plain"], found["monitored"], strict=True))
    plain_us = statistics.median(found["plain"])
    reach = 0.98 * len(added) ** 0.5  # of the median's rank: normal approximation, 95 %
    low, high = (round(len(added) / 2 + sign * reach) for sign in (-1, 1))
    added_us = statistics.median(added)
    return {
        "plain_us": plain_us,
        "added_us": added_us,
        "range_us": [added[max(0, low)], added[min(len(added) - 1, high)]],
        "share": added_us / plain_us,
        "pairs": len(added),
        "steps": steps,
    }


def memory(steps: int) -> dict[str, Any]:
    """Resident memory after a tenth of the steps, and after all."""
    loop, process = Loop(), psutil.Process()
    with hr.monitor_steps(every_s=1.0):
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
    parser.add_argument("--seconds", type=float, default=25.0, help="of each length of a step")
    parser.add_argument("--many", type=int, default=100_000)
    options = parser.parse_args()
    result = header("step_monitor.py")
    logging.getLogger("headrace").setLevel(logging.ERROR)  # bare steps are slow at loading

    def keep(name: str, found: dict[str, Any]) -> None:
        result[name] = found
        if options.out is not None:
            save(options.out, result)

    keep("bare", cost(0.0, _BARE_STEPS, options.seconds / 2, _BARE_EVERY_S))
    for work_ms in STEPS_MS:
        steps = max(2, round(_BLOCK_MS / work_ms))
        keep(f"{work_ms:g} ms", cost(work_ms, steps, options.seconds))
    keep("memory", memory(options.many))
    for name in ("bare", *(f"{ms:g} ms" for ms in STEPS_MS)):
        found = result[name]
        low, high = found["range_us"]
        print(
            f"{name:>5}: {found['added_us']:+.1f} µs ({low:+.1f} to {high:+.1f}) of "
            f"{found['plain_us']:.0f}, {found['share']:+.2%}, {found['pairs']} pairs"
        )
    print(f"{options.many} steps: {result['memory']['grown_kb']:.0f} kB more")


if __name__ == "__main__":
    main()
