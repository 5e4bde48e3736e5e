"""A training run's monitor: what device and host did, in its metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from headrace.device import Device
from headrace.runs.busy_window import BusyProbe, BusyWindow
from headrace.runs.metrics import MetricsLog, NoMetrics, read_metrics
from headrace.runs.use_monitor import Monitor

log = logging.getLogger("headrace")


_LOOK_STEPS = 10


class RunMonitor:
    """Writes lines of kind `use` (means since the last one) whenever it is asked to `note`, and
    one of kind `busy`, from a trace of some steps, once in a run. Without `wanted` it does nothing.

    That look comes when `look_after` steps have gone by, if steps are `replayed` as graphs. Else
    it is of the run's last steps, as far as they are in its last epoch: after a trace PyTorch
    launches kernels more slowly, for as long as the process lives, and a graph has few to launch.

    `stored` is the run's metrics file: a run that goes on counts its seconds on from there.
    """

    def __init__(
        self,
        device: Device,
        metrics: MetricsLog | NoMetrics,
        stored: Path,
        *,
        wanted: bool = True,
        look_after: int = 20,
        replayed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._device, self._metrics, self._replayed = device, metrics, replayed
        self._monitor: Monitor | None = None
        self._probe: BusyProbe | None = None
        self._noted_s = self._before_s = 0.0
        if not wanted:
            return
        self._monitor = Monitor(device)
        looked = False
        for line in read_metrics(stored):
            if line.get("kind") == "use":
                self._before_s = max(self._before_s, line.get("at_s") or 0.0)
            looked = looked or line.get("kind") == "busy"
        if device.asynchronous and not looked:
            self._probe = BusyProbe(device, after=look_after, steps=_LOOK_STEPS)

    def __enter__(self) -> RunMonitor:
        if self._monitor is not None:
            self._monitor.start()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if self._probe is not None:
                self._probe.end()
        finally:  # neither the profiler nor the thread outlives the run
            if self._monitor is not None:
                self._monitor.stop()

    def on_step(self, step: int, left: int, in_epoch: int) -> None:
        """After each batch, when `left` more are to come in the whole run, and `in_epoch` in this
        epoch if it goes to its end."""
        if self._probe is not None:
            ends = left <= min(_LOOK_STEPS, in_epoch)
            may_begin = min(left, in_epoch) > 0 and (ends or self._replayed())
            self._write_busy(step, self._probe.on_step(may_begin=may_begin))

    def note(self, step: int) -> None:
        """Write a line about the time since the last one."""
        if self._monitor is None:
            return
        self._monitor.sample()
        mean = self._monitor.summary(self._noted_s).mean
        self._noted_s = mean.at_s
        values = mean.to_dict() | {"at_s": self._before_s + mean.at_s}
        self._metrics.write("use", step, **values)

    def end_epoch(self, step: int) -> None:
        """The last step of an epoch is over; a look at the device is not to go on beyond it."""
        if self._probe is not None:
            self._write_busy(step, self._probe.end())
        self.note(step)

    def gpu_share(self) -> float | None:
        """For a progress line."""
        latest = None if self._monitor is None else self._monitor.latest()
        return self._device.use_share() if latest is None else latest.gpu_share

    def _write_busy(self, step: int, window: BusyWindow | None) -> None:
        if self._probe is not None and self._probe.is_over:
            missing, self._probe = self._probe.missing, None
            if missing is not None:
                log.info("cannot measure how busy the device is: %s", missing)
        if window is not None:
            self._metrics.write("busy", step, **window.to_dict())
