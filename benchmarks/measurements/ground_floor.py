"""What the lowest layer costs on this machine.

    python benchmarks/measurements/ground_floor.py [--out results.json]

Times a ledger entry, the import of Headrace, and stream switches and waits of a device. It also
runs the measurements of `headrace doctor`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import headrace
from headrace.device import Ledger, open_device
from headrace.machine import diagnose


def microseconds(work: Callable[[], object], number: int = 20_000, repeats: int = 7) -> float:
    """The median time of one call."""
    timer = timeit.Timer(work)
    timer.timeit(number // 10)
    return statistics.median(timer.repeat(repeats, number)) / number * 1e6


def ledger_costs() -> dict[str, float]:
    ledger = Ledger()

    def waiting() -> None:
        with ledger.waiting("bench"):
            pass

    return {
        "nothing to wait for": microseconds(lambda: ledger.passed("bench")),
        "a wait of no length": microseconds(waiting),
    }


def seam_costs() -> dict[str, float]:
    device = open_device("auto")
    side, event = device.stream("side"), device.event()
    event.record()
    device.synchronize("bench")

    def switch() -> None:
        with device.use(side):
            pass

    return {
        "switch streams and back": microseconds(switch, 5_000),
        "record an event": microseconds(event.record, 5_000),
        "query an event": microseconds(event.query, 5_000),
        "host wait that finds it done": microseconds(lambda: device.wait(event, "bench"), 5_000),
    }


def import_seconds() -> dict[str, float]:
    """Median seconds of a fresh interpreter, with torch alone and with all of Headrace's names."""
    everything = "; ".join(f"headrace.{name}" for name in headrace.__all__)
    programs = {
        "torch": "import torch",
        "torch and headrace": "import torch, headrace",
        "torch and every public name": f"import torch, headrace; {everything}",
    }
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(5):  # interleaved: the machine's speed drifts
        for name, program in programs.items():
            command = [sys.executable, "-c", program]
            times[name].append(timeit.timeit(lambda c=command: subprocess.run(c), number=1))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write all figures here, as JSON")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python benchmarks/measurements/ground_floor.py",
        "date": datetime.date.today().isoformat(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "ledger_us": ledger_costs(),
        "seam_us": seam_costs(),
        "import_s": import_seconds(),
        "doctor": diagnose().to_dict(),
    }
    print(json.dumps({key: result[key] for key in ("ledger_us", "seam_us", "import_s")}, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
