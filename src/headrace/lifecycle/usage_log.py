"""Writes what the device and the host did during a run into its metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from headrace.device import Device
from headrace.lifecycle.metrics import MetricsLog, NoMetrics, read_metrics
from headrace.machine import BusyTracer, BusyWindow, Monitor

log = logging.getLogger("headrace")
_TRACED_STEPS = 10


class UsageLog:
    """Writes usage into the metrics of a run. If not `enabled`, it writes nothing.

    Each call of `write` adds a line of kind `use`: means since the last one. Once in a run, it
    traces some steps and writes a line of kind `busy`.

    After a trace PyTorch launches kernels more slowly until the process ends. So the trace is of
    the run's last steps, within its last epoch. If `uses_graphs()`, there are few launches: then
    the trace begins after `trace_after` steps.

    `stored` is the run's metrics file. A resumed run continues the seconds found there.
    """

    def __init__(
        self,
        device: Device,
        metrics: MetricsLog | NoMetrics,
        stored: Path,
        *,
        enabled: bool = True,
        trace_after: int = 20,
        uses_graphs: Callable[[], bool] = lambda: False,
    ) -> None:
        self._device, self._metrics, self._uses_graphs = device, metrics, uses_graphs
        self._monitor: Monitor | None = None
        self._tracer: BusyTracer | None = None
        self._written_s = self._earlier_s = 0.0
        if not enabled:
            return
        self._monitor = Monitor(device)
        has_trace = False
        for line in read_metrics(stored):
            if line.get("kind") == "use":
                self._earlier_s = max(self._earlier_s, line.get("at_s") or 0.0)
            has_trace = has_trace or line.get("kind") == "busy"
        if device.asynchronous and not has_trace:
            self._tracer = BusyTracer(device, after=trace_after, steps=_TRACED_STEPS)

    def __enter__(self) -> UsageLog:
        if self._monitor is not None:
            self._monitor.start()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if self._tracer is not None:
                self._tracer.end()
        finally:  # the thread must end even if the profiler fails
            if self._monitor is not None:
                self._monitor.stop()

    def on_step(self, step: int, left_in_run: int, left_in_epoch: int) -> None:
        """Call this after each batch, with the numbers of batches that are left."""
        if self._tracer is not None:
            is_end_of_run = left_in_run <= min(_TRACED_STEPS, left_in_epoch)
            may_begin = min(left_in_run, left_in_epoch) > 0 and (
                is_end_of_run or self._uses_graphs()
            )
            self._write_busy(step, self._tracer.on_step(may_begin=may_begin))

    def write(self, step: int) -> None:
        """Write a line with the means since the last one."""
        if self._monitor is None:
            return
        self._monitor.sample()
        mean = self._monitor.summary(self._written_s).mean
        self._written_s = mean.at_s
        values = mean.to_dict() | {"at_s": self._earlier_s + mean.at_s}
        self._metrics.write("use", step, **values)

    def end_epoch(self, step: int) -> None:
        """End an open trace with the epoch, and write a line."""
        if self._tracer is not None:
            self._write_busy(step, self._tracer.end())
        self.write(step)

    def gpu_share(self) -> float | None:
        """The latest GPU use, for a progress line; None if it is not known."""
        latest = None if self._monitor is None else self._monitor.latest()
        return self._device.use_share() if latest is None else latest.gpu_share

    def _write_busy(self, step: int, window: BusyWindow | None) -> None:
        if self._tracer is not None and self._tracer.is_over:
            missing, self._tracer = self._tracer.missing, None
            if missing is not None:
                log.info("cannot measure how busy the device is: %s", missing)
        if window is not None:
            self._metrics.write("busy", step, **window.to_dict())
