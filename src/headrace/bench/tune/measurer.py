"""Runs a candidate on a work: its losses once, then its time as often as it is asked for."""

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
_NO_ROOM = "out of memory: "  # as errors of that kind begin


class WorkMeasurer:
    """Measures candidates on a work. Those that are still in the race stay warmed up, side by side,
    as far as memory goes, so that a repeat costs no more than its steps.

    Before its first run a plan's losses are compared with those of the space's first plan, on the
    same batches; `compared_steps` 0 leaves that out. `memory_cap` is in bytes.
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
        """Some steps of a candidate. Whatever goes wrong in them is a result."""
        found = self._measured(candidate, steps)
        before_s, self._since_s = self._since_s, self._clock()
        return replace(found, took_s=self._since_s - before_s)

    def let_go(self, candidate: Candidate) -> None:
        """Free what a candidate holds. It may be measured again, and is then made anew."""
        if candidate.key in self._contestants:
            self._pool.let_go(candidate.key)

    def _measured(self, candidate: Candidate, steps: int) -> Measurement:
        one = self._contestants.get(candidate.key)
        if one is None:
            one = self._contestants[candidate.key] = self._contestant(candidate)
            unequal = self._compare(one, candidate)
            if one.error is None and unequal is not None:
                return Measurement(None, unequal=unequal)
        timing = self._pool.attempt(one, partial(_turn, steps)) if one.error is None else None
        if timing is None:
            return _failed(one.error or "no reason is known", one.peak_bytes)
        one.timings = [timing]
        # It runs, but as the plan without graphs, or without compile, does, which is tried too.
        if one.graphs is not None and one.graphs["why"] is not None:
            why = f"launched one by one, not as a graph: {one.graphs['why']}"
            return Measurement(None, peak_memory_bytes=one.peak_bytes, failed=why)
        if one.compiled is not None and one.compiled["why"] is not None:
            why = f"the step is not compiled: {one.compiled['why']}"
            return Measurement(None, peak_memory_bytes=one.peak_bytes, failed=why)
        peak = one.peak_bytes
        if self._cap is not None and peak is not None and peak > self._cap:
            why = f"takes {peak / _GIB:.2f} GiB, the cap is {self._cap / _GIB:.2f} GiB"
            return Measurement(None, peak_memory_bytes=peak, out_of_memory=why)
        units = one.units_per_step(self._work.unit) or 1.0
        return Measurement(timing.ms_per_step, units, peak)

    def _contestant(self, candidate: Candidate) -> Contestant:
        entry = PlanEntry(candidate.key, candidate.plan, candidate.loader)
        make = partial(EngineTrainable, self._work, self._device, entry, seed=self._seed)
        return Contestant(candidate.key, "plan", make, entry)

    def _compare(self, one: Contestant, candidate: Candidate) -> str | None:
        """Why its losses are not the first plan's; None if they are. Loading changes none: of two
        candidates with the same plan one is looked at."""
        looked = (candidate.plan, candidate.loader.batch_size)
        if not self._compared:
            return None
        if looked not in self._equal:
            if candidate.plan.compile:
                self._pool.close()  # what was compiled before is forgotten meanwhile
            self._compare_losses(one, candidate)
            unequal = one.error is None and one.equal.verdict == "unequal"
            self._equal[looked] = one.equal.why if unequal else None
        return self._equal[looked]

    def _compare_losses(self, one: Contestant, candidate: Candidate) -> None:
        """Out of memory is tried once more with nobody else there."""
        for last in (False, True):
            one.error = None
            try:
                one.compare_losses(self._comparison_for(candidate).compare)
            except BenchError as problem:
                if candidate.loader.batch_size is None:
                    raise  # the work itself
                one.fail(str(problem))
            if last or one.error is None or not one.error.startswith(_NO_ROOM):
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
    gc.collect()  # not in the midst of a run
    gc.freeze()
    if trainable.lead_in:
        trainable.run(trainable.lead_in)
    return trainable.run(steps)


def _failed(error: str, peak: int | None) -> Measurement:
    if error.startswith(_NO_ROOM):
        return Measurement(None, peak_memory_bytes=peak, out_of_memory=error.removeprefix(_NO_ROOM))
    return Measurement(None, peak_memory_bytes=peak, failed=error)
