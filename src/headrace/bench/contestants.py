"""Those who are measured: plans and peers, what is known of each so far, and the pool that they
are kept ready in."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from headrace.bench.equality import ComparedLosses
from headrace.bench.plan_list import PlanEntry
from headrace.bench.trainable import (
    Timing,
    Trainable,
    describe_error,
    is_out_of_memory,
    release_memory,
)
from headrace.bench.works.work import Unit
from headrace.device import Device
from headrace.runs import BusyWindow
from headrace.runs.records import Equality, Sample, StoredTimeline

Result = TypeVar("Result")
log = logging.getLogger("headrace")


@dataclass
class Contestant:
    """One row to be. `make` makes its trainable anew. After an `error` it takes part no longer."""

    name: str
    kind: Literal["plan", "peer"]
    make: Callable[[], Trainable]
    entry: PlanEntry | None = None
    error: str | None = None
    losses: tuple[float, ...] = ()
    reference_losses: tuple[float, ...] = ()  # compared with, if not those of its own row
    equal: Equality = field(default_factory=Equality)
    timings: list[Timing] = field(default_factory=list)
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    graphs: dict[str, Any] | None = None
    compiled: dict[str, Any] | None = None
    samples: tuple[Sample, ...] = ()
    nvml_share: float | None = None
    power_w: float | None = None
    cpu_share: float | None = None
    window: BusyWindow | None = None
    timeline: StoredTimeline | None = None
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Inside the block, warnings of Headrace's are this row's notes: they are not printed."""
        handler = _Notes(self)
        propagates, log.propagate = log.propagate, False
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.propagate = propagates

    def compare_losses(
        self, compare: Callable[[PlanEntry | None, Callable[[], Trainable]], ComparedLosses]
    ) -> None:
        """Fill in its losses and whether they agree with the reference's."""
        with self.noting():
            found = compare(self.entry, self.make)
        if found.error is not None:
            self.fail(found.error)
        self.losses, self.reference_losses = found.losses, found.reference_losses
        self.equal = found.equal

    def fail(self, why: str) -> None:
        self.error = why

    def units_per_step(self, unit: Unit) -> float | None:
        """Samples or tokens a step; None where nothing counted them."""
        results = [timing.result for timing in self.timings if timing.result is not None]
        steps = sum(result.statistics.batches for result in results)
        if not steps:
            return None
        if unit == "tokens":
            return sum(sum(result.weights) for result in results) / steps
        return sum(result.statistics.samples for result in results) / steps

    @property
    def least_warm_up(self) -> int:
        """Steps until everything of the plan is there: its graph is captured, and replayed once."""
        if self.entry is None or self.entry.plan.graphs == "off":
            return 1
        return self.entry.plan.graph_after + 3


class _Notes(logging.Handler):
    def __init__(self, one: Contestant) -> None:
        super().__init__(logging.WARNING)
        self._one = one

    def emit(self, record: logging.LogRecord) -> None:
        text, entry = record.getMessage(), self._one.entry
        # That its memory is not pinned is what the plan asks for.
        if ("not pinned" not in text or entry is None or entry.plan.pin) and (
            text not in self._one.notes
        ):
            self._one.notes.append(text)


class Pool:
    """The trainables of all contestants, warmed up and kept side by side: they can take turns.

    Where their memory does not suffice, all others are let go of and made anew when their turn
    comes: slower to measure, but the figures are the same.
    """

    def __init__(self, device: Device, warm_up: int) -> None:
        self._device, self._warm_up = device, warm_up
        self._trainables: dict[str, Trainable] = {}
        #: Whether some had to be let go of.
        self.was_full = False

    def attempt(
        self, one: Contestant, action: Callable[[Trainable], Result], *, unless: str | None = None
    ) -> Result | None:
        """Do something with a contestant's trainable, which is made first if need be.

        What goes wrong is its error, or, with `unless`, a note that begins so; out of memory is
        tried once more with nobody else there.
        """
        for _ in range(2):
            try:
                with one.noting():
                    return self._done(one, action)
            except Exception as problem:
                full = is_out_of_memory(problem)
                trainable = self._trainables.get(one.name)
                why = describe_error(problem, None if trainable is None else trainable.trained)
            # Not inside `except`: the error's traceback holds on to the memory.
            others = [name for name in self._trainables if name != one.name]
            self.let_go(one.name)
            if not (full and others):
                break
            self.was_full = True
            self.let_go(*others)
        if unless is None:
            one.fail(why)
        else:
            one.notes.append(f"{unless}: {why}")
        return None

    def let_go(self, *names: str) -> None:
        for name in names:
            trainable = self._trainables.pop(name, None)
            if trainable is not None:
                trainable.close()
            del trainable
        gc.unfreeze()
        release_memory(self._device)
        gc.freeze()

    def close(self) -> None:
        if self._trainables:
            self.let_go(*self._trainables)

    def _done(self, one: Contestant, action: Callable[[Trainable], Result]) -> Result:
        trainable = self._ready(one)
        result = action(trainable)
        # Each time: a later batch may have a shape that cannot be captured, or compiled.
        one.graphs, one.compiled = trainable.graphs(), trainable.compiled()
        return result

    def _ready(self, one: Contestant) -> Trainable:
        if one.name in self._trainables:
            return self._trainables[one.name]
        device = self._device
        device.release_unused()
        before = device.memory()
        device.reset_peak_memory()
        # Kept before it is warmed up: if that fails, its step is known and its memory is freed.
        trainable = self._trainables[one.name] = one.make()
        trainable.run(max(self._warm_up, one.least_warm_up))
        if one.peak_bytes is None:
            peak, reserved = device.peak_memory(), device.memory().peak_reserved
            # Nothing is counted on the CPU.
            one.peak_bytes = peak - before.allocated if peak else None
            one.reserved_bytes = reserved - before.reserved if reserved else None
        return trainable
