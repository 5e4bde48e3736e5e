"""Samples of what the device and the host are doing, ten times a second.

    with Monitor(device) as monitor:
        engine.epoch(loader)
    print(monitor.summary().mean.gpu_share)

A value that cannot be read is None: GPU values without NVML, for example. `gpu_share` is the
driver's figure, which says only that something ran. `BusyWindow` says for how much of the time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from headrace.device import Device, SensorReading, Sensors, open_device
from headrace.errors import DeviceError
from headrace.machine.host_counters import HostCounterReader, HostCounters
from headrace.machine.samples import UseSample, UseSummary, mean_of, merged_pair, peak_of, sample_of

_MAX_SAMPLES = 8192
_MAX_CORE_SHARE = 0.008  # that sampling may use


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
        return UseSummary(len(chosen), seconds, mean_of(chosen, end_s), peak_of(chosen, end_s))

    def sample(self) -> UseSample:
        """Take a sample now, in addition to those of the thread."""
        assert self._read_host is not None, "not started"
        with self._reading:
            reading = SensorReading() if self._sensors is None else self._sensors.read()
            counters, now_s = self._read_host(), self.now_s()
            sample = sample_of(now_s, reading, counters, self._before)
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
        paired = [
            merged_pair(one, other) for one, other in zip(older[::2], older[1::2], strict=True)
        ]
        self._samples = paired + newer
