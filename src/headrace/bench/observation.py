"""Observes a contestant: a second under the monitor, then a few steps under the profiler."""

from __future__ import annotations

import math
import re

from headrace.bench.contestants import Contestant, Use
from headrace.bench.trainable import Timing, Trainable
from headrace.device import Device, Span, Timeline
from headrace.machine import BusyWindow, Monitor, UseSample
from headrace.records import StoredSample, StoredTimeline

_MAX_WATCHED_STEPS = 5_000
_SETTLING_S = 0.3  # the driver averages GPU use over some tenths of a second
_SHOWN_STEPS = 3
_MAX_SPANS = 6_000
_CLOCK_SKEW_NS = 100_000  # between the host's clock and the device's
_MAX_NAME = 64
_NAME_NOISE = re.compile(r"^void |at::native::|\(anonymous namespace\)::|c10::|cutlass::")
HOST = "host"


def watch(
    contestant: Contestant, device: Device, step_ms: float, seconds: float, trainable: Trainable
) -> None:
    """Run for about `seconds` while the monitor samples the GPU and the CPU."""
    steps = math.ceil(seconds * 1e3 / max(step_ms, 1e-3))
    with Monitor(device) as monitor:
        begin_ns = device.ledger.now_ns()
        timing = trainable.run(max(2, min(steps, _MAX_WATCHED_STEPS)))
    samples = monitor.samples()
    stored = tuple(
        StoredSample(
            at_s=round(sample.at_s, 4),
            gpu_share=sample.gpu_share,
            gpu_memory_bytes=sample.gpu_memory_bytes,
            power_w=sample.power_w,
            cpu_share=_cores(sample),
        )
        for sample in samples
    )
    # Leave out what comes before the first step, and the time until the figures have settled.
    since_s = (timing.start_ns - begin_ns) / 1e9 + _SETTLING_S
    mean = monitor.summary(min(since_s, 0.7 * samples[-1].at_s)).mean
    contestant.watched(Use(stored, mean.gpu_share, mean.power_w, _cores(mean)))


def trace(
    contestant: Contestant, device: Device, step_ms: float, steps: int, trainable: Trainable
) -> str | None:
    """Record each kernel and copy of some steps. Returns the reason if that is not possible."""
    trainable.run(2)  # the first steps under a profiler are slow
    waits: list[tuple[str, int, int]] = []
    with device.ledger.telling(lambda *wait: waits.append(wait)), device.trace() as seen:
        begin_ns = device.ledger.now_ns()
        timing = trainable.run(steps)
    if seen.timeline is None:
        return seen.missing
    timeline = _while_timed(seen.timeline, waits, begin_ns, timing)
    # Shares of the step's time without the profiler, which slows the host down.
    window = BusyWindow.from_timeline(
        timeline,
        wall_ms=step_ms * steps,
        steps=steps,
        # A peer's count includes its lead-in steps.
        launches=seen.launches if contestant.kind == "plan" else None,
    )
    contestant.traced(window, _first_steps(timeline, timing.ms_per_step, steps))
    return None


def _while_timed(
    timeline: Timeline, waits: list[tuple[str, int, int]], begin_ns: int, timing: Timing
) -> Timeline:
    """What ran in the timed steps, and the host's waits in them. The first step begins at 0."""
    from_ns = timing.start_ns - begin_ns
    spans = [
        Span(s.lane, s.name, s.kind, max(0, s.start_ns - from_ns), s.end_ns - from_ns)
        for s in timeline.spans
        if s.kind in ("kernel", "copy")
        and from_ns - _CLOCK_SKEW_NS <= s.start_ns <= from_ns + timing.elapsed_ns + _CLOCK_SKEW_NS
        and s.end_ns > from_ns
    ]
    spans += [
        Span(HOST, reason, "wait", start_ns - timing.start_ns, end_ns - timing.start_ns)
        for reason, start_ns, end_ns in waits
        if start_ns >= timing.start_ns and reason not in ("bench", "trace")
    ]
    return Timeline(spans)


def _first_steps(timeline: Timeline, step_ms: float, steps: int) -> StoredTimeline:
    """The first three steps, or as many as have `_MAX_SPANS` spans.

    Spans that go on beyond them are cut off there: otherwise the device would look idle while the
    host waits for work that is not shown.
    """
    shown = min(_SHOWN_STEPS, steps)
    whole_ns = until_ns = max(1, round(step_ms * shown * 1e6))
    spans = [span for span in timeline.spans if span.start_ns < until_ns]
    if len(spans) > _MAX_SPANS:
        until_ns = spans[_MAX_SPANS].start_ns
        spans = spans[:_MAX_SPANS]
    return StoredTimeline(
        round(shown * until_ns / whole_ns, 3),
        tuple(
            Span(
                span.lane,
                short_name(span.name),
                span.kind,
                span.start_ns,
                min(span.end_ns, until_ns),
            )
            for span in spans
        ),
    )


def short_name(name: str) -> str:
    """A kernel's name without the parts that most names share: results store thousands of them."""
    short = _NAME_NOISE.sub("", name)
    return short if len(short) <= _MAX_NAME else f"{short[: _MAX_NAME - 1]}…"


def _cores(sample: UseSample) -> float | None:
    """CPU cores that this process and its workers used."""
    if sample.cpu_share is None:
        return None
    return sample.cpu_share + (sample.workers_cpu_share or 0.0)
