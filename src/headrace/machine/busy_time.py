"""How busy a device is: the share of time in which it ran kernels or copies, from a trace.

with device.trace() as trace:
    engine.epoch(loader, max_steps=10)
print(BusyWindow.of(trace, steps=10))
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from headrace.device import Device, Timeline, Trace


@dataclass(frozen=True, slots=True)
class StreamBusy:
    """How busy one stream was. `busy_share` is a share of wall time, 0 to 1."""

    name: str
    busy_share: float
    kernels_per_step: float
    copies_per_step: float


@dataclass(frozen=True, slots=True)
class BusyWindow:
    """How busy a device was during some steps. Shares are of wall time, 0 to 1.

    `busy_share` is the time in which a kernel or a copy ran, `idle_share` the rest.
    `compute_share` is the time in which a kernel ran and `copy_share` that in which a copy ran;
    time in which both ran counts in both. `overlap_share` is the time in which at least two
    streams ran. `launches_per_step` counts the host's launches; None if they were not counted.
    """

    steps: int
    wall_ms_per_step: float
    busy_ms_per_step: float
    busy_share: float
    compute_share: float
    copy_share: float
    idle_share: float
    overlap_share: float
    launches_per_step: float | None
    streams: tuple[StreamBusy, ...]

    @classmethod
    def of(cls, trace: Trace, steps: int) -> BusyWindow | None:
        """From a trace of `steps` steps. None if the trace does not show what the device did."""
        if trace.timeline is None:
            return None
        return cls.from_timeline(trace.timeline, trace.wall_ms, steps, trace.launches)

    @classmethod
    def from_timeline(
        cls, timeline: Timeline, wall_ms: float, steps: int, launches: int | None = None
    ) -> BusyWindow:
        """From the device lanes of a timeline of `steps` steps, which took `wall_ms`.

        A profiler slows the host down: if you can, pass the time of as many steps without one.
        """
        if steps < 1:
            raise ValueError(f"steps = {steps}: expected 1 or more")
        busy_ms = timeline.device_busy_ms()
        # The host's clock and the device's differ a little: no share may be more than 1.
        wall_ms = max(wall_ms, busy_ms)

        def share(ms: float) -> float:
            return ms / wall_ms if wall_ms > 0 else 0.0

        return cls(
            steps=steps,
            wall_ms_per_step=wall_ms / steps,
            busy_ms_per_step=busy_ms / steps,
            busy_share=share(busy_ms),
            compute_share=share(timeline.device_busy_ms("kernel")),
            copy_share=share(timeline.device_busy_ms("copy")),
            idle_share=1.0 - share(busy_ms),
            overlap_share=share(timeline.overlap_ms()),
            launches_per_step=None if launches is None else launches / steps,
            streams=tuple(
                _stream(timeline, lane, wall_ms, steps)
                for lane in timeline.lanes()
                if any(span.kind in ("kernel", "copy") for span in timeline.on(lane))
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `streams` is a list of dicts."""
        return asdict(self) | {"streams": [asdict(stream) for stream in self.streams]}

    def __str__(self) -> str:
        return (
            f"busy {self.busy_share:.1%} of the time: computing {self.compute_share:.1%}, copying "
            f"{self.copy_share:.1%}; idle {self.idle_share:.1%}"
        )


def _stream(timeline: Timeline, lane: str, wall_ms: float, steps: int) -> StreamBusy:
    spans = timeline.on(lane)
    return StreamBusy(
        name=lane,
        busy_share=timeline.busy_ms(lane) / wall_ms if wall_ms > 0 else 0.0,
        kernels_per_step=sum(span.kind == "kernel" for span in spans) / steps,
        copies_per_step=sum(span.kind == "copy" for span in spans) / steps,
    )


class BusyTracer:
    """Traces `steps` steps of a loop, once.

        for info in engine.steps(loader):
            window = tracer.on_step()          # a BusyWindow when the trace is complete, else None
        window = tracer.end()                  # one of fewer steps if the loop ended before

    The trace starts after `after` steps, at the first one with `may_begin`. `missing` says why
    the trace shows nothing, if so.
    """

    def __init__(self, device: Device, *, after: int = 20, steps: int = 10) -> None:
        self._device, self._after, self._steps = device, after, steps
        self._seen = self._begun = 0
        self._open: AbstractContextManager[Trace] | None = None
        self._trace: Trace | None = None
        self.is_over = False
        self.missing: str | None = None

    def on_step(self, *, may_begin: bool = True) -> BusyWindow | None:
        """Call this after each step."""
        if self.is_over:
            return None
        self._seen += 1
        if self._open is not None:
            return self.end() if self._seen == self._begun + self._steps else None
        if may_begin and self._seen >= self._after:
            tracing = self._device.trace()
            self._trace, self._begun = tracing.__enter__(), self._seen
            self._open = tracing  # only now: after a Ctrl-C in `__enter__` there is nothing to end
        return None

    def end(self) -> BusyWindow | None:
        """End the trace, if one is open. A trace of no steps does not count: another may follow."""
        if self._open is None:
            return None
        assert self._trace is not None
        self._open.__exit__(None, None, None)
        steps, trace = self._seen - self._begun, self._trace
        self._open = self._trace = None
        if steps == 0:
            return None
        self.is_over, self.missing = True, trace.missing
        return BusyWindow.of(trace, steps)
