"""Runs a benchmark: all contestants train the same workload, in turns, in one process.

1. losses: each trains alone with deterministic kernels; its losses are compared with the
   reference's, step by step
2. warm-up: each is built and runs until its code is compiled and its graph captured
3. timing: `repeats` rounds of `steps` steps each; every round starts with another contestant.
   What it costs to begin and to end a pass is left out, and told apart
4. observation: each runs for a second while the monitor samples the device, then for a few steps
   under the profiler

During 3 and 4, other benchmarks on this machine wait.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from headrace.bench import observation
from headrace.bench.contestants import Contestant, Pool
from headrace.bench.environment import environment_of
from headrace.bench.loss_comparison import LossComparison, first_batches
from headrace.bench.machine_lock import MachineLock
from headrace.bench.peers import Peer
from headrace.bench.plan_list import PlanEntry, noise_pair, reference_of
from headrace.bench.plan_results import noise_of, plan_result, with_speedups
from headrace.bench.trainable import EngineTrainable, Timing, Trainable
from headrace.bench.verdict import scored, verdict_of
from headrace.bench.works.work import Work
from headrace.device import Device
from headrace.plan import refuse_plan_variable
from headrace.runs.records import BenchResult, BenchSettings, BenchWork, PlanResult

# Steps of the pass that is timed beside each round's: with a first and a last one.
_SHORT_PASS = 2

#: Called with the current activity, the share of it that is done, and the seconds left, if known.
ProgressCallback = Callable[[str, float, float | None], object]


@dataclass(frozen=True)
class Bench:
    """A benchmark: what to measure, and how. `run` measures it.

    `compared_steps` = 0 skips the comparison of losses, `watched_s` = 0 the monitor, and
    `traced_steps` = 0 the profiler.
    """

    work: Work
    device: Device
    entries: Sequence[PlanEntry]
    peers: Sequence[Peer] = ()
    steps: int = 20
    repeats: int = 5
    warmup: int = 10
    seed: int = 0
    precision: str | None = None
    tolerance: float = 0.01
    compared_steps: int = 10
    watched_s: float = 1.0
    traced_steps: int = 6
    command: str = ""
    on_progress: ProgressCallback = field(default=lambda activity, done, left_s: None)

    def run(self) -> BenchResult:
        """Measure. After Ctrl-C, returns what was measured so far. Raises `BenchError` if the
        workload cannot be built; later errors are in the rows."""
        refuse_plan_variable("bench")
        contestants = self._contestants()
        pool = Pool(self.device, self.warmup)
        missing: list[str] = []
        interrupted = False
        # Garbage collections during the measurement need not look at what exists already.
        gc.freeze()
        try:
            with MachineLock(self._say_waiting) as lock:
                self.on_progress(f"building {self.work.name}", 0.0, None)
                self._compare(contestants, self._batches())
                self._warm_up(contestants, pool)
                lock.begin_measuring()
                self._time(contestants, pool)
                self._observe(contestants, pool, missing)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            pool.close()
            gc.unfreeze()
        if pool.was_full:
            missing.append(
                "all plans side by side: they did not fit into memory, so each was rebuilt for its "
                "turns"
            )
        return self._result(contestants, missing, interrupted)

    def _contestants(self) -> list[Contestant]:
        plans = [
            Contestant(entry.name, "plan", partial(self._planned, entry), entry)
            for entry in self.entries
        ]
        precision = self.precision or reference_of(self.entries).plan.precision
        peers = [
            Contestant(
                peer.name, "peer", partial(peer.make, self.work, self.device, precision, self.seed)
            )
            for peer in self.peers
        ]
        return [*plans, *peers]

    def _planned(self, entry: PlanEntry) -> Trainable:
        return EngineTrainable(self.work, self.device, entry, seed=self.seed)

    def _say_waiting(self) -> None:
        self.on_progress("waiting for another benchmark on this machine", 0.0, None)

    # --- the four passes --------------------------------------------------------------------------

    def _batches(self) -> list[Any]:
        """The workload's first batches, at least one: an error in the workload is raised here and
        not repeated in every row."""
        return first_batches(
            self.work,
            self.device,
            reference_of(self.entries),
            seed=self.seed,
            count=max(1, self.compared_steps),
        )

    def _compare(self, contestants: Sequence[Contestant], batches: list[Any]) -> None:
        if not self.compared_steps:
            return
        reference = reference_of(self.entries)
        comparison = LossComparison(
            self.work,
            self.device,
            reference,
            batches,
            seed=self.seed,
            tolerance=self.tolerance,
        )
        # The reference first. If it fails, there is nothing to compare with, only times.
        for at, contestant in enumerate(
            sorted(contestants, key=lambda contestant: contestant.name != reference.name)
        ):
            self.on_progress(f"comparing losses of {contestant.name}", at / len(contestants), None)
            contestant.compare_losses(comparison.compare)

    def _warm_up(self, contestants: Sequence[Contestant], pool: Pool) -> None:
        for at, contestant in enumerate(contestants):
            if contestant.error is None:
                self.on_progress(f"warming up {contestant.name}", at / len(contestants), None)
                pool.attempt(contestant, lambda _: None)

    def _time(self, contestants: Sequence[Contestant], pool: Pool) -> None:
        gc.collect()
        gc.freeze()
        began_s = time.monotonic()
        for repeat in range(self.repeats):
            left_s = None
            if repeat:
                so_far_s = time.monotonic() - began_s
                left_s = so_far_s / repeat * (self.repeats - repeat)
                left_s += self._observing_s(contestants)
            self.on_progress(f"round {repeat + 1} of {self.repeats}", repeat / self.repeats, left_s)
            for contestant in _rotated(contestants, repeat):
                if contestant.error is None:
                    timing = pool.attempt(contestant, self._turn)
                    if timing is not None:
                        contestant.timings.append(timing)

    def _turn(self, trainable: Trainable) -> Timing:
        if trainable.lead_in:
            trainable.run(trainable.lead_in)
        # Two passes of different lengths: to begin and to end one cancels out.
        whole = trainable.run(self.steps + _SHORT_PASS)
        return whole.without(trainable.run(_SHORT_PASS))

    def _observe(self, contestants: Sequence[Contestant], pool: Pool, missing: list[str]) -> None:
        """Monitor all, then profile all: a profiler slows down what runs after it."""
        timed = [
            contestant
            for contestant in contestants
            if contestant.error is None and contestant.timings
        ]
        for at, contestant in enumerate(timed if self.watched_s else ()):
            self.on_progress(f"monitoring {contestant.name}", at / len(timed), None)
            watch = partial(
                observation.watch, contestant, self.device, _median_ms(contestant), self.watched_s
            )
            pool.attempt(contestant, watch)
        for at, contestant in enumerate(timed if self.traced_steps else ()):
            if contestant.error is not None:
                continue
            self.on_progress(f"profiling {contestant.name}", at / len(timed), None)
            trace = partial(
                observation.trace,
                contestant,
                self.device,
                _median_ms(contestant),
                self.traced_steps,
            )
            # If the profiler fails, the plan has not: its times are known already.
            why_not = pool.attempt(contestant, trace, note="could not be profiled")
            if why_not is not None:
                missing.append(f"GPU busy time: {why_not}")
                break
        if timed and self.watched_s and all(contestant.nvml_share is None for contestant in timed):
            missing.append("GPU use and power: no driver here reports them")
        if timed and all(contestant.peak_bytes is None for contestant in timed):
            missing.append(f"memory: {self.device} does not count allocations")

    # --- the result -------------------------------------------------------------------------------

    def _observing_s(self, contestants: Sequence[Contestant]) -> float:
        """An estimate of how long the observation takes."""
        running = [contestant for contestant in contestants if contestant.error is None]
        return len(running) * (self.watched_s + 1.0)

    def _result(
        self, contestants: Sequence[Contestant], missing: list[str], interrupted: bool
    ) -> BenchResult:
        reference = reference_of(self.entries)
        units = {
            contestant.name: contestant.units_per_step(self.work.unit) for contestant in contestants
        }
        # Peers do not count their samples.
        known = units[reference.name] or next((n for n in units.values() if n), None)
        rows: list[PlanResult] = []
        for contestant in contestants:
            if interrupted and contestant.error is None and not contestant.timings:
                contestant.fail("interrupted before it was measured")
            rows.append(plan_result(contestant, units[contestant.name] or known))
        rows = with_speedups(rows, reference.name)
        pair = noise_pair(self.entries)
        noise = noise_of(rows, None if pair is None else (pair[0].name, pair[1].name))
        rows = scored(rows, reference.name, noise)
        return BenchResult(
            work=BenchWork(
                self.work.name,
                self.work.description,
                dict(self.work.options),
                self.work.unit,
                known or 0.0,
            ),
            settings=BenchSettings(
                plans=tuple(entry.name for entry in self.entries),
                peers=tuple(peer.name for peer in self.peers),
                steps=self.steps,
                warmup=self.warmup,
                repeats=self.repeats,
                seed=self.seed,
                precision=self.precision,
                tolerance=self.tolerance,
                compared_steps=self.compared_steps,
            ),
            environment=environment_of(self.device, self.command),
            rows=tuple(rows),
            noise=noise,
            verdict=verdict_of(rows, reference.name, noise),
            missing=tuple(missing),
            interrupted=interrupted,
        )


def _rotated(contestants: Sequence[Contestant], repeat: int) -> Iterable[Contestant]:
    """The order of a round: each round starts with the next contestant."""
    first = repeat % len(contestants)
    return [*contestants[first:], *contestants[:first]]


def _median_ms(contestant: Contestant) -> float:
    return statistics.median(timing.ms_per_step for timing in contestant.timings)
