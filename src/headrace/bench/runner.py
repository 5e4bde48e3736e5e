"""Runs a benchmark: every contestant on the same work, taking turns in one process.

1. losses: each alone, with deterministic kernels, compared step by step with the reference
2. warm-up: each is made and run until its code is compiled and its graph captured
3. time: `repeats` rounds in which each has its turn of `steps` steps, each round begun by another
4. a second of each with an eye on the driver's figures, then some steps under the profiler

From the third on, no other benchmark on this machine does anything.
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
from headrace.bench.rows import noise_of, row_of, with_speedups
from headrace.bench.trainable import EngineTrainable, Timing, Trainable
from headrace.bench.verdict import scored, verdict_of
from headrace.bench.works.work import Work
from headrace.device import Device
from headrace.plan import refuse_replaced_plans
from headrace.runs.records import BenchResult, BenchSettings, BenchWork, PlanResult

#: Called with what is done now, how much of it is done (0 to 1), and the seconds left, if known.
Watcher = Callable[[str, float, float | None], object]


@dataclass(frozen=True)
class Bench:
    """A benchmark: what is measured and how. `run` does it.

    `compared_steps` 0 leaves the comparison of losses out; `watched_s` 0 the driver's figures.
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
    watcher: Watcher = field(default=lambda what, done, left_s: None)

    def run(self) -> BenchResult:
        """Measure. Interrupted with Ctrl-C, the result has what is known by then. A work that
        cannot be made at all is a `BenchError`; what goes wrong later is in the rows."""
        refuse_replaced_plans("bench")
        contestants = self._contestants()
        pool = Pool(self.device, self.warmup)
        missing: list[str] = []
        interrupted = False
        # What is there already need not be looked at by each collection of garbage.
        gc.freeze()
        try:
            with MachineLock(self._say_waiting) as lock:
                self.watcher(f"making {self.work.name}", 0.0, None)
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
                "all plans side by side: they did not fit into memory and were made anew for turns"
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
        self.watcher("waiting for another benchmark on this machine", 0.0, None)

    # --- the four passes --------------------------------------------------------------------------

    def _batches(self) -> list[Any]:
        """Also where nothing is compared one is asked for: what is wrong with the work itself is
        an error now, not one in every row."""
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
        # The reference first: if it fails, nothing can be compared, but times can still be taken.
        for at, one in enumerate(sorted(contestants, key=lambda one: one.name != reference.name)):
            self.watcher(f"losses of {one.name}", at / len(contestants), None)
            one.compare_losses(comparison.compare)

    def _warm_up(self, contestants: Sequence[Contestant], pool: Pool) -> None:
        for at, one in enumerate(contestants):
            if one.error is None:
                self.watcher(f"warming up {one.name}", at / len(contestants), None)
                pool.attempt(one, lambda _: None)

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
            self.watcher(f"round {repeat + 1} of {self.repeats}", repeat / self.repeats, left_s)
            for one in _rotated(contestants, repeat):
                if one.error is None:
                    timing = pool.attempt(one, self._turn)
                    if timing is not None:
                        one.timings.append(timing)

    def _turn(self, trainable: Trainable) -> Timing:
        if trainable.lead_in:
            trainable.run(trainable.lead_in)
        return trainable.run(self.steps)

    def _observe(self, contestants: Sequence[Contestant], pool: Pool, missing: list[str]) -> None:
        """All are watched before the first is traced: a profiler leaves something behind."""
        timed = [one for one in contestants if one.error is None and one.timings]
        for at, one in enumerate(timed if self.watched_s else ()):
            self.watcher(f"watching {one.name}", at / len(timed), None)
            watch = partial(observation.watch, one, self.device, _median_ms(one), self.watched_s)
            pool.attempt(one, watch)
        for at, one in enumerate(timed):
            if one.error is not None:
                continue
            self.watcher(f"tracing {one.name}", at / len(timed), None)
            trace = partial(observation.trace, one, self.device, _median_ms(one), self.traced_steps)
            # A profiler that fails says nothing about the plan, which has its times already.
            why_not = pool.attempt(one, trace, unless="its work could not be traced")
            if why_not is not None:
                missing.append(f"GPU busy time: {why_not}")
                break
        if timed and self.watched_s and all(one.nvml_share is None for one in timed):
            missing.append("use and power of the GPU: no driver here tells them")
        if timed and all(one.peak_bytes is None for one in timed):
            missing.append(f"memory: nothing counts what is allocated on {self.device}")

    # --- the result -------------------------------------------------------------------------------

    def _observing_s(self, contestants: Sequence[Contestant]) -> float:
        """About how long the last passes take."""
        alive = [one for one in contestants if one.error is None]
        return len(alive) * (self.watched_s + 1.0)

    def _result(
        self, contestants: Sequence[Contestant], missing: list[str], interrupted: bool
    ) -> BenchResult:
        reference = reference_of(self.entries)
        units = {one.name: one.units_per_step(self.work.unit) for one in contestants}
        usual = units[reference.name] or next((n for n in units.values() if n), None)
        rows: list[PlanResult] = []
        for one in contestants:
            if interrupted and one.error is None and not one.timings:
                one.fail("interrupted before it was measured")
            rows.append(row_of(one, units[one.name] or usual))
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
                usual or 0.0,
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
    """Each round begins with another: nobody always runs after the same one."""
    first = repeat % len(contestants)
    return [*contestants[first:], *contestants[:first]]


def _median_ms(one: Contestant) -> float:
    return statistics.median(timing.ms_per_step for timing in one.timings)
