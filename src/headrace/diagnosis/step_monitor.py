"""`headrace.monitor_steps()`: what training steps take, watched all the time.

Nothing waits for the device and no profiler runs: a hook after each optimizer step reads the clock,
and a thread looks ten times a second at which line the training is. Every ten seconds the figures
are put together and handed on. A step that takes more than three times the median, such as one with
an evaluation, does not count.
"""

from __future__ import annotations

import logging
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch.utils.data.dataloader import _BaseDataLoaderIter

from headrace.device import cuda_namespace
from headrace.diagnosis.steps import StepFinder, watch_steps
from headrace.diagnosis.waits import users_frames, wait_at
from headrace.replacing import replaced
from headrace.source_lines import short_path

log = logging.getLogger("headrace")

_WARMUP_STEPS = 10
_REPORT_S = 10.0
#: So many steps are at most kept until they are reported.
_MAX_STEPS = 4000
_SAMPLE_S = 0.1
#: A step that takes so many times the median does more than a step.
_UNUSUAL = 3.0
#: A step is slower than at first, and the loader the limit, from these shares on, twice in a row.
_SLOWER, _LOADER_LIMIT = 1.2, 0.2
_MAX_LINES = 5
_MAX_PLACES = 1000
#: Forms of which the line alone does not say that the host waits there.
_NO_WAITS = ("other", "inside PyTorch", "in backward", "headrace")


@dataclass(frozen=True, slots=True)
class WaitingLine:
    """A line at which the host waits for the device, and for how long per step, from samples."""

    place: str
    title: str
    ms: float


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What steps took since the last figures. `step` is the number of the last one, `steps` how
    many there were. `step_ms` is the median, `data_wait_ms` how long the loader was waited for per
    step. Memory is PyTorch's on the device; `memory_growth_bytes` is since the first figures."""

    step: int
    steps: int
    step_ms: float
    slowest_ms: float
    data_wait_ms: float
    waits: tuple[WaitingLine, ...] = ()
    memory_bytes: int | None = None
    memory_growth_bytes: int | None = None

    def __str__(self) -> str:
        text = f"step {self.step:,}: {self.step_ms:.2f} ms, {self.data_wait_ms:.2f} ms for data"
        return "; ".join([text, *(f"{one.place} {one.ms:.2f} ms" for one in self.waits)])


Use = Callable[[StepFigures], object]


class _Step(NamedTuple):
    ns: int
    data_ns: int


class StepMonitor:
    """Watches the steps inside its block. `latest` are the last figures, None before there are any;
    `use` is called with all of them, in the thread that trains."""

    def __init__(self, use: Use = lambda figures: None, *, every_s: float = _REPORT_S) -> None:
        self.latest: StepFigures | None = None
        self._use, self._every_ns = use, round(every_s * 1e9)
        self._finder, self._sampler = StepFinder(), _Sampler()
        self._watch = _Watch()
        self._is_settled = self._is_running = False
        self._steps: list[_Step] = []
        self._ended_ns = self._since_ns = self._data_ns = 0
        self._thread: int | None = None
        self._memory_first: int | None = None
        self._stack = ExitStack()

    def __enter__(self) -> StepMonitor:
        self._is_running = True
        self._stack.enter_context(watch_steps(self._on_call))
        loader: Any = _BaseDataLoaderIter
        waiting = self._timing(loader.__next__)
        self._stack.enter_context(replaced(loader, "__next__", waiting))
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

    def _timing(self, next_batch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timing(iterator: Any) -> Any:
            start_ns = perf_counter_ns()
            try:
                return next_batch(iterator)
            finally:
                if threading.get_ident() == self._thread:
                    self._data_ns += perf_counter_ns() - start_ns

        return timing

    def _on_call(self, key: Hashable) -> None:
        ended = self._finder.on_call(key)
        if self._finder.is_lost:
            self._is_settled = False
            self._ended_ns = 0
        if not ended:
            return
        now_ns, data_ns = perf_counter_ns(), self._data_ns
        self._data_ns = 0
        if not self._is_settled:
            self._settle(now_ns)
            return
        self._steps.append(_Step(now_ns - self._ended_ns, data_ns))
        self._ended_ns = now_ns
        if now_ns - self._since_ns >= self._every_ns or len(self._steps) >= _MAX_STEPS:
            self._report()

    def _settle(self, now_ns: int) -> None:
        """Begin to count once the warm-up is over."""
        if self._finder.steps < _WARMUP_STEPS:
            return
        self._finder.settle()
        self._is_settled = True
        self._thread = threading.get_ident()
        self._sampler.begin(self._thread)
        self._ended_ns = self._since_ns = now_ns

    def _report(self) -> None:
        steps, self._steps = self._steps, []
        seconds = (perf_counter_ns() - self._since_ns) / 1e9
        samples = self._sampler.take()
        self._since_ns = perf_counter_ns()
        if not steps:
            return
        median_ns = statistics.median(one.ns for one in steps)
        usual = [one for one in steps if one.ns <= _UNUSUAL * median_ns]
        memory = _memory()
        self._memory_first = memory if self._memory_first is None else self._memory_first
        share_ms = seconds * 1e3 / len(steps)
        self.latest = StepFigures(
            step=self._finder.steps,
            steps=len(steps),
            step_ms=median_ns / 1e6,
            slowest_ms=max(one.ns for one in steps) / 1e6,
            data_wait_ms=statistics.fmean(one.data_ns for one in usual) / 1e6,
            waits=tuple(
                WaitingLine(place, title, share * share_ms)
                for (place, title), share in samples.most_common(_MAX_LINES)
            ),
            memory_bytes=memory,
            memory_growth_bytes=None
            if memory is None or self._memory_first is None
            else memory - self._memory_first,
        )
        for warning in self._watch.warnings(self.latest):
            log.warning("%s", warning)
        self._use(self.latest)


def _memory() -> int | None:
    cuda: Any = cuda_namespace()
    if not (cuda.is_available() and cuda.is_initialized()):
        return None
    return int(cuda.memory_allocated())


class _Watch:
    """Says once when a step has become slower, and once when the loader is the limit."""

    def __init__(self) -> None:
        self._first: StepFigures | None = None
        self._before: dict[str, bool] = {}
        self._told: set[str] = set()

    def warnings(self, figures: StepFigures) -> list[str]:
        first = self._first = self._first or figures
        slower = figures.step_ms / first.step_ms
        found = {
            "slower": (
                slower >= _SLOWER,
                f"a step takes {figures.step_ms:.1f} ms, {slower:.2f} times as long as at first"
                f"{_why(first, figures)}",
            ),
            "loader": (
                figures.data_wait_ms >= _LOADER_LIMIT * figures.step_ms,
                f"the data loader is the limit: {figures.data_wait_ms:.2f} ms of a step of "
                f"{figures.step_ms:.2f} ms are spent waiting for it; more processes (num_workers) "
                "make it faster",
            ),
        }
        warnings = []
        for name, (holds, text) in found.items():
            if holds and self._before.get(name) and name not in self._told:
                self._told.add(name)
                warnings.append(f"step {figures.step:,}: {text}")
            self._before[name] = holds
        return warnings


def _why(first: StepFigures, now: StepFigures) -> str:
    """What has grown most, if that is a good part of the difference."""
    before = {one.place: one.ms for one in first.waits}
    grown = {f"at {one.place}": one.ms - before.get(one.place, 0.0) for one in now.waits}
    grown["waiting for the data loader"] = now.data_wait_ms - first.data_wait_ms
    most = max(grown, key=lambda name: grown[name])
    is_much = grown[most] >= 0.5 * (now.step_ms - first.step_ms)
    return f"; {grown[most]:.1f} ms more are spent {most}" if is_much else ""


class _Sampler:
    """Looks at the line where a thread is, ten times a second, and counts those that wait."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._stop = threading.Event()
        self._looks = 0
        self._found: Counter[tuple[str, str]] = Counter()
        self._known: dict[tuple[CodeType, int], tuple[str, str] | None] = {}
        self._looker = threading.Thread(target=self._run, name="headrace sampler", daemon=True)

    def __enter__(self) -> _Sampler:
        self._looker.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._looker.join()

    def begin(self, thread: int) -> None:
        self._thread = thread

    def take(self) -> Counter[tuple[str, str]]:
        """The share of the time at each line that waits, since the last call."""
        found, looks = self._found, self._looks
        self._found, self._looks = Counter(), 0
        return Counter({name: count / looks for name, count in found.items()} if looks else {})

    def look(self, frame: FrameType | None) -> None:
        self._looks += 1
        innermost, _ = users_frames(frame)
        if innermost is None:
            return
        key = innermost.f_code, innermost.f_lasti
        if key not in self._known:
            if len(self._known) >= _MAX_PLACES:
                self._known.clear()
            self._known[key] = _waiting_place(frame)
        place = self._known[key]
        if place is not None:
            self._found[place] += 1

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            if self._thread is not None:
                self.look(sys._current_frames().get(self._thread))


def _waiting_place(frame: FrameType | None) -> tuple[str, str] | None:
    wait = wait_at(frame)
    line = wait.called_from or wait.line
    if line is None or wait.form.name in _NO_WAITS:
        return None
    return f"{short_path(line.file)}:{line.line}", wait.form.title
