"""Samples of what is in use, and their means and peaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.device import SensorReading
from headrace.machine.host_counters import HostCounters


@dataclass(frozen=True, slots=True)
class UseSample:
    """What was in use at one moment, or on average over some time.

    `gpu_share` and `machine_cpu_share` are 0 to 1. `cpu_share` and `workers_cpu_share` count
    cores: 1.5 is one and a half cores. CPU shares are means since the previous sample. `at_s` is
    the time since the monitor started.
    """

    at_s: float
    gpu_share: float | None = None
    gpu_memory_bytes: int | None = None
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    temperature_c: float | None = None
    cpu_share: float | None = None
    workers_cpu_share: float | None = None
    machine_cpu_share: float | None = None
    host_memory_bytes: int | None = None
    process_memory_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


_FIELDS = tuple(known.name for known in dataclasses.fields(UseSample) if known.name != "at_s")


@dataclass(frozen=True, slots=True)
class UseSummary:
    """The samples of some time: the mean weighted by time, and the peak, of each value.

    A value that no sample has is None.
    """

    count: int
    seconds: float
    mean: UseSample
    peak: UseSample

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def sample_of(
    now_s: float,
    reading: SensorReading,
    counters: HostCounters,
    before: tuple[float, HostCounters] | None,
) -> UseSample:
    shares: dict[str, float | None] = {}
    if before is not None and now_s > before[0]:
        elapsed_s, then = now_s - before[0], before[1]
        machine_s = counters.machine_s - then.machine_s
        busy_s = counters.machine_busy_s - then.machine_busy_s
        shares = {
            "cpu_share": (counters.process_s - then.process_s) / elapsed_s,
            "workers_cpu_share": (counters.workers_s - then.workers_s) / elapsed_s,
            # The kernel counts in hundredths of a second: within one, both differences are 0.
            "machine_cpu_share": min(1.0, max(0.0, busy_s / machine_s)) if machine_s > 0 else None,
        }
    return UseSample(
        at_s=now_s,
        gpu_share=reading.use_share,
        gpu_memory_bytes=reading.memory_bytes,
        power_w=reading.power_w,
        sm_clock_mhz=reading.sm_clock_mhz,
        temperature_c=reading.temperature_c,
        host_memory_bytes=counters.memory_bytes,
        process_memory_bytes=counters.process_memory_bytes,
        **shares,
    )


def mean_of(weighted: Sequence[tuple[UseSample, float]], at_s: float) -> UseSample:
    """The mean of each known value, weighted by time. Bytes stay whole numbers."""
    found: dict[str, Any] = {}
    for name in _FIELDS:
        known = [(v, w) for s, w in weighted if (v := getattr(s, name)) is not None]
        if not known:
            continue
        total = sum(weight for _, weight in known)
        # If no time has passed, all samples count the same.
        mean = (
            sum(value * weight for value, weight in known) / total
            if total > 0
            else sum(value for value, _ in known) / len(known)
        )
        found[name] = round(mean) if name.endswith("_bytes") else mean
    return UseSample(at_s, **found)


def peak_of(weighted: Sequence[tuple[UseSample, float]], at_s: float) -> UseSample:
    found: dict[str, Any] = {}
    for name in _FIELDS:
        known = [v for s, _ in weighted if (v := getattr(s, name)) is not None]
        if known:
            found[name] = max(known)
    return UseSample(at_s, **found)


def merged_pair(one: UseSample, other: UseSample) -> UseSample:
    pair = [(one, 1.0), (other, 1.0)]
    peak = peak_of(pair, other.at_s)
    memory = {name: getattr(peak, name) for name in _FIELDS if name.endswith("_bytes")}
    return dataclasses.replace(mean_of(pair, other.at_s), **memory)
