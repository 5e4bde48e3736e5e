"""`headrace.monitor_steps()`: what training steps take, watched all the time.

Nothing waits for the device and no profiler runs: a hook after each optimizer step reads the clock,
and a thread looks ten times a second at which line the training is. Every ten seconds the figures
are put together and handed on. A step that takes more than three times the median, such as one with
an evaluation, does not count.
"""

from __future__ import annotations

import logging
import statistics
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from time import perf_counter_ns
from typing import Any, NamedTuple

from headrace.device import cuda_namespace
from headrace.diagnosis.data_waits import DataWaits
from headrace.diagnosis.line_samples import LineSample, LineSampler, WaitingPlace
from headrace.diagnosis.step_figures import StepFigures, StepWarnings, WaitingLine
from headrace.diagnosis.steps import StepFinder, watch_steps

log = logging.getLogger("headrace")

_WARMUP_STEPS = 10
_REPORT_S = 10.0
#: So many steps are at most kept until they are reported.
_MAX_STEPS = 4000
#: A step that takes so many times the median does more than a step.
_UNUSUAL = 3.0
_MAX_LINES = 5

Use = Callable[[StepFigures], object]


class _Step(NamedTuple):
    end_ns: int
    ns: int
    data_ns: int


class StepMonitor:
    """Watches the steps inside its block. `latest` are the last figures, None before there are any;
    `use` is called with all of them, in the thread that trains."""

    def __init__(self, use: Use = lambda figures: None, *, every_s: float = _REPORT_S) -> None:
        self.latest: StepFigures | None = None
        self._use, self._every_ns = use, round(every_s * 1e9)
        self._finder, self._sampler = StepFinder(), LineSampler()
        self._data_waits, self._warnings = DataWaits(), StepWarnings()
        self._is_settled = self._is_running = False
        self._steps: list[_Step] = []
        self._ended_ns = self._since_ns = 0
        self._memory_first: int | None = None
        self._stack = ExitStack()

    def __enter__(self) -> StepMonitor:
        self._is_running = True
        self._stack.enter_context(watch_steps(self._on_call))
        self._stack.enter_context(self._data_waits.watching())
        self._stack.enter_context(self._sampler)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_running:
            self._is_running = False
            self._stack.close()
            self._report()

    @property
    def is_running(self) -> bool:
        """Whether its block has begun and not ended."""
        return self._is_running

    def __str__(self) -> str:
        return "no steps yet" if self.latest is None else str(self.latest)

    def _on_call(self, key: Hashable) -> None:
        ended = self._finder.on_call(key)
        if self._finder.is_lost:
            self._is_settled = False
            self._ended_ns = 0
        if not ended:
            return
        now_ns, data_ns = perf_counter_ns(), self._data_waits.take()
        if not self._is_settled:
            self._settle(now_ns)
            return
        self._steps.append(_Step(now_ns, now_ns - self._ended_ns, data_ns))
        self._ended_ns = now_ns
        if now_ns - self._since_ns >= self._every_ns or len(self._steps) >= _MAX_STEPS:
            self._report()

    def _settle(self, now_ns: int) -> None:
        """Begin to count once the warm-up is over."""
        if self._finder.steps < _WARMUP_STEPS:
            return
        self._finder.settle()
        self._is_settled = True
        thread = threading.get_ident()
        self._sampler.begin(thread)
        self._data_waits.begin(thread)
        self._ended_ns = self._since_ns = now_ns

    def _report(self) -> None:
        steps, self._steps = self._steps, []
        samples = self._sampler.take()
        self._since_ns = perf_counter_ns()
        if not steps:
            return
        median_ns = statistics.median(one.ns for one in steps)
        usual = [one for one in steps if one.ns <= _UNUSUAL * median_ns]
        memory = _memory()
        self._memory_first = memory if self._memory_first is None else self._memory_first
        self.latest = StepFigures(
            step=self._finder.steps,
            steps=len(steps),
            step_ms=median_ns / 1e6,
            slowest_ms=max(one.ns for one in steps) / 1e6,
            data_wait_ms=statistics.fmean(one.data_ns for one in usual) / 1e6,
            waits=_waits(samples, steps, _UNUSUAL * median_ns),
            memory_bytes=memory,
            memory_growth_bytes=None
            if memory is None or self._memory_first is None
            else memory - self._memory_first,
        )
        for warning in self._warnings.of(self.latest):
            log.warning("%s", warning)
        self._use(self.latest)


def _waits(
    samples: Sequence[LineSample], steps: Sequence[_Step], most_ns: float
) -> tuple[WaitingLine, ...]:
    """The lines that wait in steps that take at most so long."""
    looks, found = 0, Counter[WaitingPlace]()
    for at_ns, place in samples:
        at = bisect_left(steps, at_ns, key=lambda step: step.end_ns)
        if at < len(steps) and steps[at].ns <= most_ns:
            looks += 1
            found.update([] if place is None else [place])
    usual_ms = statistics.fmean(one.ns for one in steps if one.ns <= most_ns) / 1e6
    return tuple(
        WaitingLine(place, title, count / looks * usual_ms)
        for (place, title), count in found.most_common(_MAX_LINES)
    )


def _memory() -> int | None:
    cuda: Any = cuda_namespace()
    if not (cuda.is_available() and cuda.is_initialized()):
        return None
    return int(cuda.memory_allocated())
