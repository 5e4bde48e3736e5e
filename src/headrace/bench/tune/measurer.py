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
from headrace.bench.tune.trials import Measurement
from headrace.bench.works.work import Work
from headrace.device import Device
from headrace.errors import BenchError
from headrace.plan import Plan

_GIB = 1 << 30
_OUT_OF_MEMORY = "out of memory: "  # the beginning of such an error


class WorkMeasurer:
    """Measures candidates on a workload. Candidates stay warmed up until they are released, as far
    as memory allows, so that a repeat costs only its steps.

    Before a plan's first run, its losses are compared with those of the space's first plan on the
    same batches; `compared_steps` = 0 skips that. `memory_cap` is in bytes.
    """

    def __init__(
        self,
        work: Work,
        device: Device,
        space: Space,
        *,
        warmup: int = 10,
        seed: int = 0,
        compared_steps: int = 10,
        tolerance: float = 0.01,
        memory_cap: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work, self._device, self._space = work, device, space
        self._seed, self._compared, self._tolerance = seed, compared_steps, tolerance
        self._cap = memory_cap
        self._clock = clock
        self._since_s = clock()
        self._pool = Pool(device, warmup)
        self._contestants: dict[str, Contestant] = {}
        self._comparisons: dict[int | None, LossComparison] = {}
        self._equal: dict[tuple[Plan, int | None], str | None] = {}

    def __enter__(self) -> WorkMeasurer:
        self._device.limit_memory(self._cap)
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.close()
        gc.unfreeze()
        self._device.limit_memory(None)

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
            unequal = self._compare(contestant, candidate)
            if contestant.error is None and unequal is not None:
                return Measurement(None, unequal=unequal)
        timing = (
            self._pool.attempt(contestant, partial(_turn, steps))
            if contestant.error is None
            else None
        )
        if timing is None:
            return _failed(contestant.error or "unknown error", contestant.peak_bytes)
        contestant.timings = [timing]
        # It ran like the plan without graphs or compile, which the search tries as well.
        if contestant.graphs is not None and contestant.graphs["why"] is not None:
            why = f"launched one by one, not as a graph: {contestant.graphs['why']}"
            return Measurement(None, peak_memory_bytes=contestant.peak_bytes, failed=why)
        if contestant.compiled is not None and contestant.compiled["why"] is not None:
            why = f"the step is not compiled: {contestant.compiled['why']}"
            return Measurement(None, peak_memory_bytes=contestant.peak_bytes, failed=why)
        peak = contestant.peak_bytes
        if self._cap is not None and peak is not None and peak > self._cap:
            why = f"needs {peak / _GIB:.2f} GiB, the limit is {self._cap / _GIB:.2f} GiB"
            return Measurement(None, peak_memory_bytes=peak, out_of_memory=why)
        units = contestant.units_per_step(self._work.unit) or 1.0
        return Measurement(timing.ms_per_step, units, peak)

    def _contestant(self, candidate: Candidate) -> Contestant:
        entry = PlanEntry(candidate.key, candidate.plan, candidate.loader)
        make = partial(EngineTrainable, self._work, self._device, entry, seed=self._seed)
        return Contestant(candidate.key, "plan", make, entry)

    def _compare(self, contestant: Contestant, candidate: Candidate) -> str | None:
        """How its losses differ from the first plan's; None if they do not. Loading does not change
        losses, so each plan is compared once."""
        compared = (candidate.plan, candidate.loader.batch_size)
        if not self._compared:
            return None
        if compared not in self._equal:
            if candidate.plan.compile:
                self._pool.close()  # the comparison resets all compiled code
            self._compare_losses(contestant, candidate)
            unequal = contestant.error is None and contestant.equal.verdict == "unequal"
            self._equal[compared] = contestant.equal.why if unequal else None
        return self._equal[compared]

    def _compare_losses(self, contestant: Contestant, candidate: Candidate) -> None:
        """Compare; if it runs out of memory, release all others and try again."""
        for last in (False, True):
            contestant.error = None
            try:
                contestant.compare_losses(self._comparison_for(candidate).compare)
            except BenchError as problem:
                if candidate.loader.batch_size is None:
                    raise  # the workload itself is broken
                contestant.fail(str(problem))
            if last or contestant.error is None or not contestant.error.startswith(_OUT_OF_MEMORY):
                return
            self._pool.close()

    def _comparison_for(self, candidate: Candidate) -> LossComparison:
        batch_size = candidate.loader.batch_size
        if batch_size not in self._comparisons:
            first = self._space.baseline_of(candidate)
            entry = PlanEntry(first.key, first.plan, first.loader)
            batches = first_batches(
                self._work, self._device, entry, seed=self._seed, count=self._compared
            )
            self._comparisons[batch_size] = LossComparison(
                self._work,
                self._device,
                entry,
                batches,
                seed=self._seed,
                tolerance=self._tolerance,
            )
        return self._comparisons[batch_size]


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
