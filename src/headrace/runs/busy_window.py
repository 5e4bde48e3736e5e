"""How much of the time a device really had something to do: from a trace of a few steps.

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
    """One stream's part. `busy_share` is of wall time, 0 to 1."""

    name: str
    busy_share: float
    kernels_per_step: float
    copies_per_step: float


@dataclass(frozen=True, slots=True)
class BusyWindow:
    """Where the time of some steps went, as shares of wall time, 0 to 1.

    `busy_share` is the time in which a kernel or a copy ran, `idle_share` the rest.
    `compute_share` is the time in which a kernel ran, `copy_share` that in which a copy did: what
    ran at once is in both. `overlap_share` is the time in which two streams or more ran.
    `launches_per_step` is how often the host put something on the device; None: not counted.
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
        """Of a trace of `steps` steps; None if the device's work was not seen."""
        if trace.timeline is None:
            return None
        return cls.from_timeline(trace.timeline, trace.wall_ms, steps, trace.launches)

    @classmethod
    def from_timeline(
        cls, timeline: Timeline, wall_ms: float, steps: int, launches: int | None = None
    ) -> BusyWindow:
        """Of the device lanes of a timeline, `wall_ms` long. Give the time of as many steps
        without a profiler where there is one: a profiler slows the host down."""
        if steps < 1:
            raise ValueError(f"steps = {steps}: expected 1 or more")
        busy_ms = timeline.device_busy_ms()
        # Two clocks, the host's and the device's: a full device must not come out fuller.
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


class BusyProbe:
    """Looks at `steps` steps of a loop, once, after the first `after` of them, as soon as it
    `may_begin`.

        for info in engine.steps(loader):
            window = probe.on_step()           # a BusyWindow at the end of the look, else None
        window = probe.end()                   # where the loop ended in the midst of it

    `missing` says why nothing was seen, where that is so.
    """

    def __init__(self, device: Device, *, after: int = 20, steps: int = 10) -> None:
        self._device, self._after, self._steps = device, after, steps
        self._seen = self._begun = 0
        self._open: AbstractContextManager[Trace] | None = None
        self._trace: Trace | None = None
        self.is_over = False
        self.missing: str | None = None

    def on_step(self, *, may_begin: bool = True) -> BusyWindow | None:
        """After each step."""
        if self.is_over:
            return None
        self._seen += 1
        if self._open is not None:
            return self.end() if self._seen == self._begun + self._steps else None
        if may_begin and self._seen >= self._after:
            look = self._device.trace()
            self._trace, self._begun = look.__enter__(), self._seen
            self._open = look  # not before: Ctrl-C while a profiler starts leaves nothing to end
        return None

    def end(self) -> BusyWindow | None:
        """End the look, if it is under way. One of no step at all does not count."""
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
