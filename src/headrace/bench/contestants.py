"""Contestants: the plans and peers to measure, with their measurements, and the pool that keeps
them ready to run."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from headrace.bench.equality import ComparedLosses
from headrace.bench.plan_list import PlanEntry
from headrace.bench.trainable import (
    Timing,
    Trainable,
    describe_error,
    is_out_of_memory,
    release_memory,
    require_usable,
)
from headrace.bench.works.work import Unit
from headrace.device import Device
from headrace.machine import BusyWindow
from headrace.records import Equality, StoredSample, StoredTimeline

Result = TypeVar("Result")
log = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True)
class Use:
    """What the monitor has sampled, and the means of it."""

    samples: tuple[StoredSample, ...] = ()
    nvml_share: float | None = None
    power_w: float | None = None
    cpu_share: float | None = None


@dataclass
class Contestant:
    """A plan or peer with its measurements so far. `make` builds its trainable. After an `error` it
    does not run again."""

    name: str
    kind: Literal["plan", "peer"]
    make: Callable[[], Trainable]
    entry: PlanEntry | None = None
    error: str | None = None
    is_compared: bool = False
    losses: tuple[float, ...] = ()
    reference_losses: tuple[float, ...] = ()  # if not those in the reference's own row
    equal: Equality = field(default_factory=Equality)
    timings: list[Timing] = field(default_factory=list)
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    graphs: dict[str, Any] | None = None
    compiled: dict[str, Any] | None = None
    use: Use = field(default_factory=Use)
    window: BusyWindow | None = None
    timeline: StoredTimeline | None = None
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def collecting_notes(self) -> Iterator[None]:
        """Inside the block, Headrace's warnings become this contestant's notes, not output."""
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
        """Store its losses and how they compare with the reference's."""
        self.error = None
        with self.collecting_notes():
            found = compare(self.entry, self.make)
        if found.error is not None:
            self.fail(found.error)
        self.losses, self.reference_losses = found.losses, found.reference_losses
        self.equal, self.is_compared = found.equal, True

    def measured(self) -> dict[str, Any]:
        """All that is known of it but its timings, to be pickled."""
        given = ("name", "kind", "make", "entry", "timings")
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in given}

    def resume(self, measured: dict[str, Any]) -> None:
        """Go on from what another process has measured."""
        for name, value in measured.items():
            setattr(self, name, value)

    def fail(self, why: str) -> None:
        self.error = why

    def skip_comparison(self, why: str) -> None:
        self.equal = Equality("not compared", why=why)

    def watched(self, use: Use) -> None:
        """Store what the monitor has sampled."""
        self.use = use

    def traced(self, window: BusyWindow, timeline: StoredTimeline) -> None:
        """Store what the profiler has recorded."""
        self.window = window
        self.timeline = timeline

    def units_per_step(self, unit: Unit) -> float | None:
        """Samples or tokens per step; None if nothing counted them, as with a peer."""
        results = [timing.result for timing in self.timings if timing.result is not None]
        steps = sum(result.statistics.batches for result in results)
        if not steps:
            return None
        if unit == "tokens":
            return sum(sum(result.weights) for result in results) / steps
        return sum(result.statistics.samples for result in results) / steps

    @property
    def min_warm_up(self) -> int:
        """How many steps until the plan's graph is captured and was replayed once."""
        if self.entry is None or self.entry.plan.graphs == "off":
            return 1
        return self.entry.plan.graph_after + 3


class _Notes(logging.Handler):
    def __init__(self, contestant: Contestant) -> None:
        super().__init__(logging.WARNING)
        self._one = contestant

    def emit(self, record: logging.LogRecord) -> None:
        text, entry = record.getMessage(), self._one.entry
        # A plan that does not pin memory needs no warning about it.
        if ("not pinned" not in text or entry is None or entry.plan.pin) and (
            text not in self._one.notes
        ):
            self._one.notes.append(text)


class Pool:
    """Keeps the trainables of all contestants warmed up, so that they can take turns.

    If they do not fit into memory together, the pool releases all but one and rebuilds each for its
    turn. That takes longer and does not change the times.
    """

    def __init__(self, device: Device, warm_up: int) -> None:
        self._device, self._warm_up = device, warm_up
        self._trainables: dict[str, Trainable] = {}
        #: Whether the trainables did not fit into memory together.
        self.was_full = False

    def attempt(
        self,
        contestant: Contestant,
        action: Callable[[Trainable], Result],
        *,
        note: str | None = None,
    ) -> Result | None:
        """Call `action` with a contestant's trainable, which is built and warmed up if necessary.

        Out of memory, the pool releases all others and tries again. A failure becomes the
        contestant's error or, if `note` is given, a note that begins with that text. Raises
        `DeviceLost` if the device cannot be used any more.
        """
        for _ in range(2):
            try:
                with contestant.collecting_notes():
                    return self._apply(contestant, action)
            except (Exception, SystemExit) as problem:
                full = is_out_of_memory(problem)
                trainable = self._trainables.get(contestant.name)
                why = describe_error(problem, None if trainable is None else trainable.trained)
            require_usable(self._device, why)
            # Outside `except`: the error's traceback keeps tensors alive.
            others = [name for name in self._trainables if name != contestant.name]
            self.release(contestant.name)
            if not (full and others):
                break
            self.was_full = True
            self.release(*others)
        if note is None:
            contestant.fail(why)
        else:
            contestant.notes.append(f"{note}: {why}")
        return None

    def release(self, *names: str) -> None:
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
            self.release(*self._trainables)

    def _apply(self, contestant: Contestant, action: Callable[[Trainable], Result]) -> Result:
        trainable = self._ready(contestant)
        result = action(trainable)
        # Each time: a later batch shape may not be captured or compiled.
        contestant.graphs, contestant.compiled = trainable.graphs(), trainable.compiled()
        return result

    def _ready(self, contestant: Contestant) -> Trainable:
        if contestant.name in self._trainables:
            return self._trainables[contestant.name]
        device = self._device
        device.release_unused()
        before = device.memory()
        device.reset_peak_memory()
        # Stored before the warm-up: if that fails, `attempt` knows the step and frees the memory.
        trainable = self._trainables[contestant.name] = contestant.make()
        trainable.run(max(self._warm_up, contestant.min_warm_up))
        if contestant.peak_bytes is None:
            peak, reserved = device.peak_memory(), device.memory().peak_reserved
            # The CPU does not count allocations.
            contestant.peak_bytes = peak - before.allocated if peak else None
            contestant.reserved_bytes = reserved - before.reserved if reserved else None
        return trainable
