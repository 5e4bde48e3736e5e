"""The result of a benchmark, from what is known of its contestants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.bench.contestants import Contestant
from headrace.bench.plan_list import noise_pair, reference_of
from headrace.bench.plan_results import noise_of, plan_result, with_speedups
from headrace.bench.verdict import scored, verdict_of
from headrace.records import BenchResult, BenchSettings, BenchWork, Environment, PlanResult

if TYPE_CHECKING:
    from headrace.bench.runner import Bench


def result_of(
    bench: Bench,
    contestants: Sequence[Contestant],
    missing: list[str],
    environment: Environment,
    unmeasured: str | None,
) -> BenchResult:
    """What is known now. `unmeasured` is the error of those that were not measured yet."""
    reference = reference_of(bench.entries)
    units = {
        contestant.name: contestant.units_per_step(bench.work.unit) for contestant in contestants
    }
    # Peers do not count their samples.
    known = units[reference.name] or next((n for n in units.values() if n), None)
    rows: list[PlanResult] = []
    for contestant in contestants:
        row = contestant
        if unmeasured is not None and row.error is None and not row.timings:
            row = replace(row, error=unmeasured)
        rows.append(plan_result(row, units[row.name] or known))
    rows = with_speedups(rows, reference.name)
    pair = noise_pair(bench.entries)
    noise = noise_of(rows, None if pair is None else (pair[0].name, pair[1].name))
    rows = scored(rows, reference.name, noise)
    return BenchResult(
        work=BenchWork(
            bench.work.name,
            bench.work.description,
            dict(bench.work.options),
            bench.work.unit,
            known or 0.0,
        ),
        settings=BenchSettings(
            plans=tuple(entry.name for entry in bench.entries),
            peers=tuple(peer.name for peer in bench.peers),
            steps=bench.steps,
            warmup=bench.warmup,
            repeats=bench.repeats,
            seed=bench.seed,
            precision=bench.precision,
            tolerance=bench.tolerance,
            compared_steps=bench.compared_steps,
        ),
        environment=environment,
        rows=tuple(rows),
        noise=noise,
        verdict=verdict_of(rows, reference.name, noise),
        missing=tuple(missing),
    )
