"""Samples of what the device and the host are doing, ten times a second.

    with Monitor(device) as monitor:
        engine.epoch(loader)
    print(monitor.summary().mean.gpu_share)

A value that cannot be read is None: GPU values without NVML, for example. `gpu_share` is the
driver's figure, which says only that something ran. `BusyWindow` says for how much of the time.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.device import Device, SensorReading, Sensors, open_device
from headrace.errors import DeviceError
from headrace.machine.host_counters import HostCounterReader, HostCounters

_MAX_SAMPLES = 8192
_MAX_CORE_SHARE = 0.008  # that sampling may use


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


class Monitor:
    """Samples a device and the host every `every_s` seconds, on a thread of its own.

    It runs inside its `with` block, or from `start` to `stop`. It also takes a sample at each end,
    so that even the shortest block has two.

    Sampling uses less than one per cent of a core: if reading takes long, it samples less often.
    It keeps at most `most_samples` samples. Beyond that it merges pairs of older ones into their
    mean (for memory, the larger value). `host` and `sensors` replace what is read; `clock`
    returns seconds that never go back.
    """

    def __init__(
        self,
        device: Device | str | torch.device,
        every_s: float = 0.1,
        *,
        host: Callable[[], HostCounters] | None = None,
        sensors: Sensors | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
        most_samples: int = _MAX_SAMPLES,
    ) -> None:
        if not every_s > 0:
            raise DeviceError(f"every_s = {every_s}: expected seconds, more than 0")
        if most_samples < 4:
            raise DeviceError(f"most_samples = {most_samples}: expected 4 or more")
        self._device, self._every_s, self._max_samples = open_device(device), every_s, most_samples
        self._read_host, self._sensors = host, sensors
        self._clock, self._cpu_clock = clock, cpu_clock
        self._own_sensors = False
        self._start_s: float | None = None
        self._before: tuple[float, HostCounters] | None = None
        self._samples: list[UseSample] = []
        self._lock = threading.Lock()  # for the list; not held during a reading
        self._reading = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Monitor:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start sampling. A monitor that was stopped continues."""
        if self._thread is not None:
            raise DeviceError("this monitor is running already")
        if self._read_host is None:
            self._read_host = HostCounterReader().read
        if self._sensors is None:
            self._sensors, self._own_sensors = self._device.sensors(), True
        if self._start_s is None:
            self._start_s = self._clock()
        self.sample()
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, name="headrace monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and stop. Stopping twice does nothing."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        self.sample()
        if self._own_sensors and self._sensors is not None:
            self._sensors.close()
            self._sensors = None

    def now_s(self) -> float:
        """Seconds since the start; the `at_s` of a sample taken now."""
        return 0.0 if self._start_s is None else self._clock() - self._start_s

    def samples(self) -> tuple[UseSample, ...]:
        """All samples so far, oldest first."""
        with self._lock:
            return tuple(self._samples)

    def latest(self) -> UseSample | None:
        with self._lock:
            return self._samples[-1] if self._samples else None

    def summary(self, since_s: float | None = None, until_s: float | None = None) -> UseSummary:
        """Summarize the samples after `since_s` and up to `until_s`, by default all.

        Both are seconds since the start, as `now_s` returns them.
        """
        samples = self.samples()
        begin_s = 0.0 if since_s is None else since_s
        # A sample covers the time since the previous one.
        times = [begin_s, *(sample.at_s for sample in samples)]
        chosen = [
            (sample, sample.at_s - max(begin_s, before_s))
            for before_s, sample in zip(times, samples, strict=False)
            if (since_s is None or sample.at_s > since_s)
            and (until_s is None or sample.at_s <= until_s)
        ]
        seconds = sum(weight for _, weight in chosen)
        end_s = chosen[-1][0].at_s if chosen else begin_s
        return UseSummary(len(chosen), seconds, _mean(chosen, end_s), _peak(chosen, end_s))

    def sample(self) -> UseSample:
        """Take a sample now, in addition to those of the thread."""
        assert self._read_host is not None, "not started"
        with self._reading:
            reading = SensorReading() if self._sensors is None else self._sensors.read()
            counters, now_s = self._read_host(), self.now_s()
            sample = _sample(now_s, reading, counters, self._before)
            self._before = (now_s, counters)
            with self._lock:
                self._samples.append(sample)
                if len(self._samples) > self._max_samples:
                    self._thin_out()
        return sample

    def _run(self) -> None:
        pause_s = self._every_s
        while not self._ended.wait(pause_s):
            began_s = self._cpu_clock()
            self.sample()
            cost_s = self._cpu_clock() - began_s
            pause_s = max(self._every_s, cost_s / _MAX_CORE_SHARE)

    def _thin_out(self) -> None:
        """Merge the older half of the samples in pairs."""
        half = self._max_samples // 4 * 2
        older, newer = self._samples[:half], self._samples[half:]
        paired = [_merged(one, other) for one, other in zip(older[::2], older[1::2], strict=True)]
        self._samples = paired + newer


def _sample(
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


def _mean(weighted: Sequence[tuple[UseSample, float]], at_s: float) -> UseSample:
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


def _peak(weighted: Sequence[tuple[UseSample, float]], at_s: float) -> UseSample:
    found: dict[str, Any] = {}
    for name in _FIELDS:
        known = [v for s, _ in weighted if (v := getattr(s, name)) is not None]
        if known:
            found[name] = max(known)
    return UseSample(at_s, **found)


def _merged(one: UseSample, other: UseSample) -> UseSample:
    pair = [(one, 1.0), (other, 1.0)]
    peak = _peak(pair, other.at_s)
    memory = {name: getattr(peak, name) for name in _FIELDS if name.endswith("_bytes")}
    return dataclasses.replace(_mean(pair, other.at_s), **memory)
