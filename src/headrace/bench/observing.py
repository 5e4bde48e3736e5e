"""Observes all contestants of a benchmark, after their steps were timed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from headrace.bench import observation
from headrace.bench.contestants import Contestant, Pool
from headrace.bench.turns import ContestantTurns

if TYPE_CHECKING:
    from headrace.bench.runner import Bench


def observe(
    bench: Bench, contestants: Sequence[Contestant], turns: ContestantTurns, pool: Pool
) -> list[str]:
    """Monitor all, then profile all: a profiler slows down what runs after it. Returns what could
    not be measured here."""
    timed = [one for one in contestants if one.error is None and one.timings]
    if bench.watched_s:
        _monitor(bench, timed, turns, pool)
    missing = [] if turns.unprofiled is None else [f"GPU busy time: {turns.unprofiled}"]
    if bench.traced_steps and turns.unprofiled is None:
        why_not = _profile(bench, timed, turns, pool)
        missing += [] if why_not is None else [f"GPU busy time: {why_not}"]
    if timed and bench.watched_s and all(one.use.nvml_share is None for one in timed):
        missing.append("GPU use and power: no driver here reports them")
    if timed and all(one.peak_bytes is None for one in timed):
        missing.append(f"memory: {bench.device} does not count allocations")
    return missing


def _monitor(bench: Bench, timed: Sequence[Contestant], turns: ContestantTurns, pool: Pool) -> None:
    for at, contestant in enumerate(timed):
        if contestant.use.samples:  # by an earlier process
            continue
        bench.on_progress(f"monitoring {contestant.name}", at / len(timed), None)
        step_ms = _median_ms(contestant)
        watch = partial(observation.watch, contestant, bench.device, step_ms, bench.watched_s)
        with turns.of(contestant, "monitoring"):
            pool.attempt(contestant, watch)


def _profile(
    bench: Bench, timed: Sequence[Contestant], turns: ContestantTurns, pool: Pool
) -> str | None:
    """Returns the reason if that is not possible."""
    for at, contestant in enumerate(timed):
        if contestant.error is not None or contestant.window is not None:
            continue
        bench.on_progress(f"profiling {contestant.name}", at / len(timed), None)
        step_ms = _median_ms(contestant)
        trace = partial(observation.trace, contestant, bench.device, step_ms, bench.traced_steps)
        # If the profiler fails, the plan has not: its times are known already.
        with turns.of(contestant, "profiling"):
            why_not = pool.attempt(contestant, trace, note="could not be profiled")
        if why_not is not None:
            return why_not
    return None


def _median_ms(contestant: Contestant) -> float:
    return statistics.median(timing.ms_per_step for timing in contestant.timings)
