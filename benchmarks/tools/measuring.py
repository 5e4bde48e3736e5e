"""How benchmarks measure: functions that take turns in one process, medians and spreads."""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.device import Device


def interleaved_ms(
    ways: Mapping[str, Callable[[int], object]],
    device: Device,
    *,
    steps: int,
    repeats: int,
    warm_up: int = 10,
) -> dict[str, dict[str, Any]]:
    """Milliseconds per step of each way to train: all run in turns, `repeats` times.

    A way is a function of the number of steps. The device is synchronized before each reading of
    the clock, so that the time includes all queued work. "cpu" is the CPU time of this process'
    threads per step, in milliseconds.
    """
    for way in ways.values():
        way(warm_up)
    times: dict[str, list[float]] = {name: [] for name in ways}
    used: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            device.synchronize("bench")
            start, start_cpu = time.perf_counter(), time.process_time()
            way(steps)
            device.synchronize("bench")
            times[name].append((time.perf_counter() - start) / steps * 1e3)
            used[name].append((time.process_time() - start_cpu) / steps * 1e3)
    return {
        name: {
            "ms": round(statistics.median(found), 4),
            "low": round(min(found), 4),
            "high": round(max(found), 4),
            "all": [round(ms, 4) for ms in found],
            "cpu": [round(ms, 4) for ms in used[name]],
        }
        for name, found in times.items()
    }


def _from_the_root(script: str) -> str:
    benchmarks = Path(__file__).resolve().parents[1]
    found = next(iter([*benchmarks.glob(script), *benchmarks.glob(f"*/{script}")]))
    return found.relative_to(benchmarks.parent).as_posix()


def header(script: str) -> dict[str, Any]:
    """The command, date and versions that every stored result has. The command is without the
    options that name files to write."""
    written, arguments = ("--out", "--html", "--traces"), []
    words = iter(sys.argv[1:])
    for word in words:
        if word in written:
            next(words, None)
        else:
            arguments.append(word)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "command": " ".join(["python", _from_the_root(script), *arguments]),
        "date": datetime.date.today().isoformat(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "gpu": gpu,
    }


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    from headrace.text_table import text_table

    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    return text_table(
        ("", *columns), [(name, *[row.get(c, "") for c in columns]) for name, row in rows.items()]
    )


def save(path: Path | None, result: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
