"""Measures candidates on a work: compares a plan's losses once, then times it as often as asked."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from headrace.bench.contestants import Contestant, Pool
from headrace.bench.loss_comparison import LossComparison, first_batches
from headrace.bench.plan_list import PlanEntry
from headrace.bench.trainable import EngineTrainable, Timing, Trainable
from headrace.bench.tune.candidates import Candidate, Space
from headrace.bench.tune.trial import Measurement
from headrace.bench.works.work import Workload
from headrace.device import Device
from headrace.plan import Plan

_OUT_OF_MEMORY = "out of memory: "  # the beginning of such an error


class WorkMeasurer:
    """Measures candidates on a workload. Candidates stay warmed up until they are released, as far
    as memory allows, so that a repeat costs only its steps.

    Before a plan's first run, its losses are compared with those of the space's first plan on the
    same batches; `compared_steps` = 0 skips that.
    """

    def __init__(
        self,
        work: Workload,
        device: Device,
        space: Space,
        *,
        warmup: int = 10,
        seed: int = 0,
        compared_steps: int = 10,
        tolerance: float = 0.01,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work = work
        self._device = device
        self._space = space
        self._seed = seed
        self._compared = compared_steps
        self._tolerance = tolerance
        self._clock = clock
        self._since_s = clock()
        self._pool = Pool(device, warmup)
        self._contestants: dict[str, Contestant] = {}
        self._comparison: LossComparison | None = None
        self._unequal: dict[Plan, str | None] = {}

    def __enter__(self) -> WorkMeasurer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.close()
        gc.unfreeze()

    def measure(self, candidate: Candidate, steps: int) -> Measurement:
        """Time some steps of a candidate. An error is a result, too."""
        found = self._measured(candidate, steps)
        before_s, self._since_s = self._since_s, self._clock()
        return replace(found, took_s=self._since_s - before_s)

    def release(self, candidate: Candidate) -> None:
        """Free a candidate's memory. If it is measured again, it is rebuilt."""
        if candidate.key in self._contestants:
            self._pool.release(candidate.key)

    def _measured(self, candidate: Candidate, steps: int) -> Measurement:
        contestant = self._contestants.get(candidate.key)
        if contestant is None:
            contestant = self._contestants[candidate.key] = self._contestant(candidate)
            unequal = self._compare(contestant, candidate.plan)
            if contestant.error is None and unequal is not None:
                return Measurement(None, unequal=unequal)
        timing = (
            self._pool.attempt(contestant, partial(_turn, steps))
            if contestant.error is None
            else None
        )
        if timing is None:
            return _failed(contestant.error or "unknown error", contestant.peak_bytes)
        contestant.timings.append(timing)
        # It ran like the plan without graphs or compile, which the search tries as well.
        graphs = contestant.graphs
        if graphs is not None and graphs["why"] is not None and graphs["way"] == "eager":
            why = f"launched one by one, not as a graph: {graphs['why']}"
            return Measurement(None, peak_memory_bytes=contestant.peak_bytes, failed=why)
        if contestant.compiled is not None and contestant.compiled["why"] is not None:
            why = f"the step is not compiled: {contestant.compiled['why']}"
            return Measurement(None, peak_memory_bytes=contestant.peak_bytes, failed=why)
        units = contestant.units_per_step(self._work.unit) or 1.0
        return Measurement(timing.ms_per_step, units, contestant.peak_bytes)

    def _contestant(self, candidate: Candidate) -> Contestant:
        entry = PlanEntry(candidate.key, candidate.plan, candidate.loader)
        make = partial(EngineTrainable, self._work, self._device, entry, seed=self._seed)
        return Contestant(candidate.key, "plan", make, entry)

    def _compare(self, contestant: Contestant, plan: Plan) -> str | None:
        """How its losses differ from the first plan's; None if they do not. Loading does not change
        losses, so each plan is compared once."""
        if not self._compared:
            return None
        if plan not in self._unequal:
            if plan.compile:
                self._pool.close()  # the comparison resets all compiled code
            self._compare_losses(contestant)
            unequal = contestant.error is None and contestant.equal.verdict == "unequal"
            self._unequal[plan] = contestant.equal.why if unequal else None
        return self._unequal[plan]

    def _compare_losses(self, contestant: Contestant) -> None:
        """Compare; if it runs out of memory, release all others and try again."""
        if self._comparison is None:
            self._comparison = self._first_comparison()
        contestant.compare_losses(self._comparison.compare)
        if contestant.error is not None and contestant.error.startswith(_OUT_OF_MEMORY):
            self._pool.close()
            contestant.compare_losses(self._comparison.compare)

    def _first_comparison(self) -> LossComparison:
        first = self._space.first()
        entry = PlanEntry(first.key, first.plan, first.loader)
        return LossComparison(
            self._work,
            self._device,
            entry,
            first_batches(self._work, self._device, entry, seed=self._seed, count=self._compared),
            seed=self._seed,
            tolerance=self._tolerance,
        )


def _turn(steps: int, trainable: Trainable) -> Timing:
    gc.collect()  # now, not during the run
    gc.freeze()
    if trainable.lead_in:
        trainable.run(trainable.lead_in)
    return trainable.run(steps)


def _failed(error: str, peak: int | None) -> Measurement:
    if error.startswith(_OUT_OF_MEMORY):
        return Measurement(
            None, peak_memory_bytes=peak, out_of_memory=error.removeprefix(_OUT_OF_MEMORY)
        )
    return Measurement(None, peak_memory_bytes=peak, failed=error)
