"""Turns a contestant's measurements into its record in the result."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace

from headrace.bench.contestants import Contestant
from headrace.bench.trainable import Timing
from headrace.records import GpuUse, HostWaits, Noise, PlanResult, StepTimes, WaitFigures


def plan_result(contestant: Contestant, units: float | None) -> PlanResult:
    """The contestant's record, without its speed-up, which needs the reference's time. `units` are
    the samples or tokens per step."""
    times = step_times(contestant.timings)
    waits, blocked_ms, data_ms = _waits(contestant.timings)
    notes = tuple(contestant.notes)
    why_not, way = None, "eager"
    if contestant.graphs is not None:
        why_not, way = contestant.graphs["why"], contestant.graphs["way"]
    asked = (
        contestant.entry is not None
        and contestant.entry.plan.graphs != "off"
        and contestant.error is None
    )
    if asked and contestant.graphs is None and not contestant.notes:
        why_not = "this device captures no graphs"  # the engine warns only once per device
    if why_not is not None and not any(why_not in note for note in notes):
        ran = "launched one by one" if way == "eager" else f"its {way} captured"
        notes += (f"{ran}, not as a graph: {why_not}",)
    uncompiled = None if contestant.compiled is None else contestant.compiled["why"]
    if uncompiled is not None and not any(uncompiled in note for note in notes):
        notes += (f"the step is not compiled: {uncompiled}",)
    window, median = contestant.window, times.median if times else None
    return PlanResult(
        plan=contestant.name,
        kind=contestant.kind,
        fields=None if contestant.entry is None else contestant.entry.plan.to_dict(),
        loader=None if contestant.entry is None else asdict(contestant.entry.loader),
        error=contestant.error,
        ms_per_step=times,
        pass_ms=_pass_ms(contestant.timings),
        per_s=units / median * 1e3 if units and median else None,
        waits=waits,
        host_blocked_ms=blocked_ms,
        data_wait_ms=data_ms,
        gpu=None if window is None or median is None else _gpu(contestant, median),
        nvml_share=contestant.use.nvml_share,
        power_w=contestant.use.power_w,
        cpu_share=contestant.use.cpu_share,
        peak_memory_bytes=contestant.peak_bytes,
        reserved_memory_bytes=contestant.reserved_bytes,
        streams=() if window is None else window.streams,
        overlap_share=None if window is None else window.overlap_share,
        losses=_finite(contestant.losses),
        reference_losses=_finite(contestant.reference_losses),
        equal=contestant.equal,
        graphs=contestant.graphs,
        compiled=contestant.compiled,
        timeline=contestant.timeline,
        samples=contestant.use.samples,
        notes=notes,
    )


def with_speedups(rows: Sequence[PlanResult], reference: str) -> list[PlanResult]:
    """The rows with their speed-ups over the reference or, if it failed, the first measured row."""
    medians = {row.plan: row.ms_per_step.median for row in rows if row.ms_per_step is not None}
    base = medians.get(reference, next(iter(medians.values()), None))
    return [
        replace(row, speedup=base / medians[row.plan])
        if base is not None and medians.get(row.plan)
        else row
        for row in rows
    ]


def noise_of(rows: Sequence[PlanResult], pair: tuple[str, str] | None) -> Noise | None:
    """By how much the medians of two entries of the same plan differ. `pair` are their names."""
    found = [row.ms_per_step for name in pair or () for row in rows if row.plan == name]
    if pair is None or len(found) != 2 or found[0] is None or found[1] is None:
        return None
    return Noise(pair[0], abs(found[1].median / found[0].median - 1))


def step_times(timings: Sequence[Timing]) -> StepTimes | None:
    times = [timing.ms_per_step for timing in timings]
    if not times:
        return None
    return StepTimes(statistics.median(times), min(times), max(times), tuple(times))


def _pass_ms(timings: Sequence[Timing]) -> float | None:
    """The median cost of a pass. Below 0 it is noise."""
    found = [timing.pass_ns / 1e6 for timing in timings if timing.pass_ns is not None]
    return max(0.0, statistics.median(found)) if found else None


def _gpu(contestant: Contestant, median: float) -> GpuUse:
    window = contestant.window
    assert window is not None
    busy_ms = window.busy_ms_per_step
    return GpuUse(
        busy_share=window.busy_share,
        compute_share=window.compute_share,
        copy_share=window.copy_share,
        idle_share=window.idle_share,
        busy_ms_per_step=busy_ms,
        over_busy_share=median / busy_ms - 1 if busy_ms else None,
        launches_per_step=window.launches_per_step,
    )


def _waits(timings: Sequence[Timing]) -> tuple[HostWaits | None, float | None, float | None]:
    """Per step: the waits for the device, the milliseconds the host was blocked by it, and the
    milliseconds it waited for the loader."""
    results = [timing.result for timing in timings if timing.result is not None]
    steps = sum(result.statistics.batches for result in results)
    if not steps:
        return None, None, None
    counts: dict[str, int] = {}
    times: dict[str, float] = {}
    wall_ms = data_ms = 0.0
    for result in results:
        ledger = result.waits
        wall_ms += ledger.wall_ms
        data_ms += ledger["data"].total_ms
        for wait in ledger.reasons:
            if wait.reason != "data":
                counts[wait.reason] = counts.get(wait.reason, 0) + wait.count
                times[wait.reason] = times.get(wait.reason, 0.0) + wait.total_ms
    by_reason = {
        reason: WaitFigures(counts[reason] / steps, times[reason] / steps)
        for reason in sorted(counts, key=lambda reason: -times[reason])
    }
    waits = HostWaits(sum(counts.values()) / steps, sum(times.values()) / steps, by_reason)
    return waits, max(0.0, wall_ms - data_ms) / steps, data_ms / steps


def _finite(losses: Sequence[float]) -> tuple[float | None, ...]:
    return tuple(loss if math.isfinite(loss) else None for loss in losses)
