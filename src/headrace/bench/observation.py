"""Contestants observed at work: the driver's figures over a second, and a trace of some steps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.bench.contestants import Contestant
from headrace.bench.trainable import Timing, Trainable
from headrace.device import Device, Span, Timeline
from headrace.runs import BusyWindow, Monitor, UseSample
from headrace.runs.records import Sample, StoredTimeline

_MOST_WATCHED_STEPS = 5_000
_SETTLING_S = 0.3  # the driver's figure for use is a mean over some tenths of a second
_SHOWN_STEPS = 3
_MOST_SPANS = 6_000
_CLOCKS_NS = 100_000
_MOST_LETTERS = 64
_COMMON = re.compile(r"^void |at::native::|\(anonymous namespace\)::|c10::|cutlass::")
HOST = "host"


def watch(
    one: Contestant, device: Device, step_ms: float, seconds: float, trainable: Trainable
) -> None:
    """Run for about so long, with an eye on the driver's figures and the CPU's."""
    steps = math.ceil(seconds * 1e3 / max(step_ms, 1e-3))
    with Monitor(device) as monitor:
        begin_ns = device.ledger.now_ns()
        timing = trainable.run(max(2, min(steps, _MOST_WATCHED_STEPS)))
    samples = monitor.samples()
    one.samples = tuple(
        Sample(
            at_s=round(sample.at_s, 4),
            gpu_share=sample.gpu_share,
            gpu_memory_bytes=sample.gpu_memory_bytes,
            power_w=sample.power_w,
            cpu_share=_cores(sample),
        )
        for sample in samples
    )
    # What a library does before its first step is left out, and until the figures have settled.
    since_s = (timing.start_ns - begin_ns) / 1e9 + _SETTLING_S
    mean = monitor.summary(min(since_s, 0.7 * samples[-1].at_s)).mean
    one.nvml_share, one.power_w, one.cpu_share = mean.gpu_share, mean.power_w, _cores(mean)


def trace(
    one: Contestant, device: Device, step_ms: float, steps: int, trainable: Trainable
) -> str | None:
    """See each kernel and copy of some steps. Returns why not, where that cannot be."""
    trainable.run(2)  # the profiler's own beginnings
    with _host_waits(device) as waits, device.trace() as seen:
        begin_ns = device.ledger.now_ns()
        timing = trainable.run(steps)
    if seen.timeline is None:
        return seen.missing
    timeline = _while_timed(seen.timeline, waits, begin_ns, timing)
    # Shares of a step as it is without a profiler, which slows the host down.
    one.window = BusyWindow.from_timeline(
        timeline,
        wall_ms=step_ms * steps,
        steps=steps,
        # A peer's were counted with those of its lead-in.
        launches=seen.launches if one.kind == "plan" else None,
    )
    one.timeline = _first_steps(timeline, timing.ms_per_step, steps)
    return None


def _while_timed(
    timeline: Timeline, waits: list[tuple[str, int, int]], begin_ns: int, timing: Timing
) -> Timeline:
    """What ran in the steps that were timed, from 0 on, and the host's waits in them."""
    from_ns = timing.start_ns - begin_ns
    spans = [
        Span(s.lane, s.name, s.kind, max(0, s.start_ns - from_ns), s.end_ns - from_ns)
        for s in timeline.spans
        if s.kind in ("kernel", "copy")
        # The host's clock and the device's are not quite the same.
        and from_ns - _CLOCKS_NS <= s.start_ns <= from_ns + timing.elapsed_ns + _CLOCKS_NS
        and s.end_ns > from_ns
    ]
    spans += [
        Span(HOST, reason, "wait", start_ns - timing.start_ns, end_ns - timing.start_ns)
        for reason, start_ns, end_ns in waits
        if start_ns >= timing.start_ns and reason not in ("bench", "trace")
    ]
    return Timeline(spans)


@contextmanager
def _host_waits(device: Device) -> Iterator[list[tuple[str, int, int]]]:
    """The host's waits inside the block: reason, start and end."""
    found: list[tuple[str, int, int]] = []
    before = device.ledger.on_wait
    device.ledger.on_wait = lambda reason, start, end: found.append((reason, start, end))
    try:
        yield found
    finally:
        device.ledger.on_wait = before


def _first_steps(timeline: Timeline, step_ms: float, steps: int) -> StoredTimeline:
    """As many steps as can be looked at: three, or the part of them that is not too much. What
    goes on beyond them is cut off there: a host that waits to the end would look as if the device,
    whose later work is not shown, had nothing to do."""
    shown = min(_SHOWN_STEPS, steps)
    whole_ns = until_ns = max(1, round(step_ms * shown * 1e6))
    spans = [span for span in timeline.spans if span.start_ns < until_ns]
    if len(spans) > _MOST_SPANS:
        until_ns = spans[_MOST_SPANS].start_ns
        spans = spans[:_MOST_SPANS]
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
    """A kernel's name without what all of them have: thousands of them are stored."""
    short = _COMMON.sub("", name)
    return short if len(short) <= _MOST_LETTERS else f"{short[: _MOST_LETTERS - 1]}…"


def _cores(sample: UseSample) -> float | None:
    """What this process and its workers used, in cores."""
    if sample.cpu_share is None:
        return None
    return sample.cpu_share + (sample.workers_cpu_share or 0.0)
