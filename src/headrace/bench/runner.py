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
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from headrace.bench.contestants import Contestant, Pool
from headrace.bench.environment import environment_of
from headrace.bench.known import EarlierResults
from headrace.bench.loss_comparison import LossComparison, first_batches
from headrace.bench.machine_lock import Holder, MachineLock
from headrace.bench.observing import observe
from headrace.bench.outcome import result_of
from headrace.bench.peers import Peer
from headrace.bench.plan_list import PlanEntry, reference_of
from headrace.bench.trainable import DeviceLost, EngineTrainable, Timing, Trainable
from headrace.bench.turns import ContestantTurns
from headrace.bench.works.work import Workload
from headrace.device import Device
from headrace.plan import refuse_plan_variable
from headrace.records import BenchResult
from headrace.schema import listed

# Steps of the pass that is timed beside each round's: with a first and a last one.
_SHORT_PASS = 2

#: Called with the current activity, the share of it that is done, and the seconds left, if known.
ProgressCallback = Callable[[str, float, float | None], object]
log = logging.getLogger("headrace")


@dataclass(frozen=True)
class Bench:
    """A benchmark: what to measure, and how. `run` measures it.

    `compared_steps` = 0 skips the comparison of losses, `watched_s` = 0 the monitor, and
    `traced_steps` = 0 the profiler. Without `wait` it measures even while another benchmark does.
    `on_result` gets the results so far, after turns of the contestants. With `known`, it goes on
    from what an earlier process has measured.
    """

    work: Workload
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
    wait: bool = True
    on_progress: ProgressCallback = field(default=lambda activity, done, left_s: None)
    on_result: Callable[[BenchResult], object] | None = None
    known: EarlierResults | None = None

    def run(self) -> BenchResult:
        """Measure. After Ctrl-C, returns what was measured so far. Raises `BenchError` if the
        workload cannot be built; later errors are in the rows. If a contestant leaves the device
        unusable, returns what was measured so far or, with `known`, raises `DeviceLost`: another
        process can go on."""
        refuse_plan_variable("bench")
        contestants, missing = self._contestants(), list[str]()
        # Now: a device that a contestant leaves unusable cannot be described.
        environment = environment_of(self.device, self.command)

        def store() -> None:
            if self.on_result is not None:
                why = "interrupted before it was measured"
                so_far = result_of(self, contestants, missing, environment, why)
                self.on_result(replace(so_far, interrupted=True))

        turns = ContestantTurns(contestants, self.known, store)
        pool = Pool(self.device, self.warmup)
        unmeasured: str | None = None
        # Garbage collections during the measurement need not look at what exists already.
        gc.freeze()
        try:
            waiting = partial(self._say_waiting, missing)
            with MachineLock(waiting, command=self.command, wait=self.wait) as lock:
                self.on_progress(f"building {self.work.name}", 0.0, None)
                turns.begin()
                self._compare(contestants, turns, self._batches())
                self._warm_up(contestants, turns, pool)
                lock.begin_measuring()
                self._time(contestants, turns, pool)
                missing += observe(self, contestants, turns, pool)
        except KeyboardInterrupt:
            unmeasured = "interrupted before it was measured"
        except DeviceLost:
            assert turns.lost is not None
            unmeasured = f"not measured: {turns.lost.name} {turns.lost}"
            if self.known is not None:
                raise
        finally:
            if turns.lost is None:  # else closing fails, too
                pool.close()
            gc.unfreeze()
        if pool.was_full:
            missing.append(
                "all plans side by side: they did not fit into memory, so each was rebuilt for its "
                "turns"
            )
        result = result_of(self, contestants, missing, environment, unmeasured)
        return replace(result, interrupted=unmeasured is not None and turns.lost is None)

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

    def _say_waiting(self, missing: list[str], holders: Sequence[Holder]) -> None:
        others = f": {listed(holders)}" if holders else ""
        if not self.wait:
            missing.append(f"an idle machine; another benchmark ran beside this one{others}")
            return
        log.warning(
            "waiting for another benchmark on this machine%s; --no-wait measures beside it",
            others,
        )

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

    def _compare(
        self, contestants: Sequence[Contestant], turns: ContestantTurns, batches: list[Any]
    ) -> None:
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
        reference_lost = next(one.error for one in contestants if one.name == reference.name)
        # The reference first. If it fails, there is nothing to compare with, only times.
        for at, contestant in enumerate(
            sorted(contestants, key=lambda contestant: contestant.name != reference.name)
        ):
            if contestant.error is not None or contestant.is_compared:
                continue  # by an earlier process
            if reference_lost is not None:
                contestant.skip_comparison(f"{reference.name} failed")
                continue
            self.on_progress(f"comparing losses of {contestant.name}", at / len(contestants), None)
            with turns.of(contestant, "comparing losses"):
                contestant.compare_losses(comparison.compare)

    def _warm_up(
        self, contestants: Sequence[Contestant], turns: ContestantTurns, pool: Pool
    ) -> None:
        for at, contestant in enumerate(contestants):
            if contestant.error is None and len(contestant.timings) < self.repeats:
                self.on_progress(f"warming up {contestant.name}", at / len(contestants), None)
                with turns.of(contestant, "warming up"):
                    pool.attempt(contestant, lambda _: None)

    def _time(self, contestants: Sequence[Contestant], turns: ContestantTurns, pool: Pool) -> None:
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
                if contestant.error is None and len(contestant.timings) <= repeat:
                    with turns.of(contestant, "timing"):
                        timing = pool.attempt(contestant, self._turn)
                        if timing is not None:
                            contestant.timings.append(timing)

    def _turn(self, trainable: Trainable) -> Timing:
        if trainable.lead_in:
            trainable.run(trainable.lead_in)
        # Two passes of different lengths: to begin and to end one cancels out.
        whole = trainable.run(self.steps + _SHORT_PASS)
        return whole.without(trainable.run(_SHORT_PASS))

    def _observing_s(self, contestants: Sequence[Contestant]) -> float:
        """An estimate of how long the observation takes."""
        return sum(one.error is None for one in contestants) * (self.watched_s + 1.0)


def _rotated(contestants: Sequence[Contestant], repeat: int) -> Iterable[Contestant]:
    """The order of a round: each round starts with the next contestant."""
    first = repeat % len(contestants)
    return [*contestants[first:], *contestants[:first]]
