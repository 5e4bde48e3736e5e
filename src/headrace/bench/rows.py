"""What was measured of a contestant, as a row of the result."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace

from headrace.bench.contestants import Contestant
from headrace.bench.trainable import Timing
from headrace.runs.records import (
    GpuUse,
    HostWaits,
    Noise,
    PlanResult,
    StepTimes,
    WaitFigures,
)


def row_of(one: Contestant, units: float | None) -> PlanResult:
    """The row, still without its speed-up, which needs another's."""
    spread = spread_of(one.timings)
    waits, blocked_ms, data_ms = _waits(one.timings)
    notes = tuple(one.notes)
    why_not = None if one.graphs is None else one.graphs["why"]
    asked = one.entry is not None and one.entry.plan.graphs != "off" and one.error is None
    if asked and one.graphs is None and not one.notes:
        why_not = "this device captures none"  # the engine says it once a device, for all plans
    if why_not is not None and not any(why_not in note for note in notes):
        notes += (f"launched one by one, not as a graph: {why_not}",)
    uncompiled = None if one.compiled is None else one.compiled["why"]
    if uncompiled is not None and not any(uncompiled in note for note in notes):
        notes += (f"the step is not compiled: {uncompiled}",)
    window, median = one.window, spread.median if spread else None
    return PlanResult(
        plan=one.name,
        kind=one.kind,
        fields=None if one.entry is None else one.entry.plan.to_dict(),
        loader=None if one.entry is None else asdict(one.entry.loader),
        error=one.error,
        ms_per_step=spread,
        per_s=units / median * 1e3 if units and median else None,
        waits=waits,
        host_blocked_ms=blocked_ms,
        data_wait_ms=data_ms,
        gpu=None if window is None or median is None else _gpu(one, median),
        nvml_share=one.nvml_share,
        power_w=one.power_w,
        cpu_share=one.cpu_share,
        peak_memory_bytes=one.peak_bytes,
        reserved_memory_bytes=one.reserved_bytes,
        streams=() if window is None else window.streams,
        overlap_share=None if window is None else window.overlap_share,
        losses=_finite(one.losses),
        reference_losses=_finite(one.reference_losses),
        equal=one.equal,
        graphs=one.graphs,
        compiled=one.compiled,
        timeline=one.timeline,
        samples=one.samples,
        notes=notes,
    )


def with_speedups(rows: Sequence[PlanResult], reference: str) -> list[PlanResult]:
    """Each row against the reference's median, or, if it has none, the first row's that has."""
    medians = {row.plan: row.ms_per_step.median for row in rows if row.ms_per_step is not None}
    base = medians.get(reference, next(iter(medians.values()), None))
    return [
        replace(row, speedup=base / medians[row.plan])
        if base is not None and medians.get(row.plan)
        else row
        for row in rows
    ]


def noise_of(rows: Sequence[PlanResult], pair: tuple[str, str] | None) -> Noise | None:
    """By how much the second entry's median differs from the first's."""
    found = [row.ms_per_step for name in pair or () for row in rows if row.plan == name]
    if pair is None or len(found) != 2 or found[0] is None or found[1] is None:
        return None
    return Noise(pair[0], abs(found[1].median / found[0].median - 1))


def spread_of(timings: Sequence[Timing]) -> StepTimes | None:
    times = [timing.ms_per_step for timing in timings]
    if not times:
        return None
    return StepTimes(statistics.median(times), min(times), max(times), tuple(times))


def _gpu(one: Contestant, median: float) -> GpuUse:
    window = one.window
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
    """A step's waits for the device, the time the host stood still for it, and for the loader."""
    timed = [timing for timing in timings if timing.result is not None]
    steps = sum(timing.steps for timing in timed)
    if not steps:
        return None, None, None
    counts: dict[str, int] = {}
    times: dict[str, float] = {}
    wall_ms = data_ms = 0.0
    for timing in timed:
        assert timing.result is not None
        ledger = timing.result.waits
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
