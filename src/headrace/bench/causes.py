"""Why the GPU computes nothing for a part of a step: four causes, each measured."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.records import PlanResult, WaitsFor

# Reasons in the ledger that mean a copy.
_COPY_WAITS = ("copy", "pageable_copy")


@dataclass(frozen=True, slots=True)
class Causes:
    """Milliseconds per step in which the GPU computes nothing, by what it waits for."""

    data: float
    copies: float
    syncs: float
    launches: float

    def largest(self) -> tuple[WaitsFor, float]:
        named: list[tuple[WaitsFor, float]] = [
            ("data", self.data),
            ("copies", self.copies),
            ("syncs", self.syncs),
            ("launches", self.launches),
        ]
        return max(named, key=lambda cause: cause[1])


def causes_of(base: PlanResult, without_syncs: PlanResult | None) -> Causes:
    """Why the GPU is idle under `base`. `without_syncs` is a plan whose host never waits for the
    device; without it, syncs and launches cannot be told apart exactly."""
    idle = idle_ms(base)
    data = min(base.data_wait_ms or 0.0, idle)
    exposed = _exposed_copy_ms(base)
    copies = max(exposed, _blocking_copy_ms(base))
    # During part of a pageable copy the host works and the GPU is idle.
    rest = max(0.0, idle - data - (copies - exposed))
    if without_syncs is None or without_syncs.gpu is None or without_syncs.ms_per_step is None:
        # A host that hardly ever waits is busy launching; otherwise its waits are the cause.
        waited = (base.host_blocked_ms or 0.0) >= 0.2 * median_ms(base)
        return Causes(data, copies, rest if waited else 0.0, 0.0 if waited else rest)
    idle_still = idle_ms(without_syncs)
    data = min(without_syncs.data_wait_ms or 0.0, idle_still)
    launches = idle_still - data
    return Causes(data, copies, max(0.0, rest - launches), launches)


def median_ms(row: PlanResult) -> float:
    assert row.ms_per_step is not None
    return row.ms_per_step.median


def idle_ms(row: PlanResult) -> float:
    assert row.gpu is not None
    return max(0.0, median_ms(row) - row.gpu.busy_ms_per_step)


def _exposed_copy_ms(row: PlanResult) -> float:
    """The time in which the GPU copies and runs no kernel."""
    assert row.gpu is not None
    return max(0.0, row.gpu.busy_share - row.gpu.compute_share) * median_ms(row)


def _blocking_copy_ms(row: PlanResult) -> float:
    """The time in which the host waits for copies: between its steps, or from pageable memory."""
    reasons = {} if row.waits is None else row.waits.by_reason
    return sum(reasons[reason].ms_per_step for reason in _COPY_WAITS if reason in reasons)
