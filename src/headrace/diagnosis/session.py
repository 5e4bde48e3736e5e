"""A running script, watched in three windows, so that looking does not change what is seen.

1. clean: only the times of steps.
2. profiled: the profiler without stacks says what host and device did, and when. If the device
   waits for Python between launches, a few more steps follow, in which its lines are sampled.
3. lines: every wait is noted with its line.

Each window begins and ends at a step's end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from headrace.capture import can_be_fused
from headrace.device import Device, chrome_trace, cuda_namespace, is_profiling, open_device
from headrace.diagnosis.breakdown import breakdown
from headrace.diagnosis.host_steps import HostSteps
from headrace.diagnosis.loaders import LoaderFacts, Loaders
from headrace.diagnosis.python_lines import LineTime, python_lines, sampled_lines
from headrace.diagnosis.rank_waits import CollectiveWaits, has_ranks, host_lines, this_rank
from headrace.diagnosis.steps import (
    Period,
    StepFinder,
    StepLine,
    watch_backward,
    watch_line,
    watch_steps,
)
from headrace.diagnosis.torch_calls import TorchCalls
from headrace.diagnosis.trace import StepTrace, read_trace
from headrace.diagnosis.waits import Wait, wait_at, watch_waits
from headrace.diagnosis.without_cupti import TimedSteps
from headrace.errors import ProgramError
from headrace.records import HostLine, LineRecord
from headrace.replacing import replaced
from headrace.source_lines import short_path

#: A window ends after so many seconds, once it has its least number of steps.
_MAX_WINDOW_S = 20.0
_MIN_STEPS = 2
#: Before the profiled steps, the host waits for the idle device after each of these pauses, to
#: relate the two clocks. They differ, so that each wait can be told from the others in the trace.
_CLOCK_PAUSES_S = 0.0, 0.0, 0.0002, 0.0006, 0.001
#: After so many backward passes without an optimizer step, each backward pass counts as a step.
_MANY_BACKWARDS = 64
#: Steps in which the device's work is measured without CUPTI.
_MEASURED_STEPS = 4
#: From this share of idle time on, the lines of Python between launches are looked for.
_WORTH_SAMPLING = 0.02


@dataclass(frozen=True, slots=True)
class Settings:
    """How many steps each window has."""

    warmup: int = 10
    clean: int = 20
    profiled: int = 8
    lines: int = 5
    step_line: StepLine | None = None
    #: Whether to use PyTorch's profiler, if CUPTI works; else only CUDA events.
    cupti: bool = True

    def __post_init__(self) -> None:
        for name, least in (("warmup", 1), ("clean", 2), ("profiled", 1), ("lines", 1)):
            if getattr(self, name) < least:
                raise ProgramError(f"{name} is {getattr(self, name)}; expected at least {least}")


Window = Literal["warm-up", "clean", "profiled", "ranks", "lines"]
#: Copies to the device, of which one line makes many when it moves a model.
_COPIES = ("copy from pageable memory", "copy of a strided view", "blocking copy")


@dataclass(slots=True)
class EarlyWaits:
    """How often the host waited at a line before its waits were looked for, and how often the
    script came to that line."""

    waits: int = 0
    visits: int = 0


@dataclass(slots=True)
class Measurements:
    """What one round of windows saw. Each window is complete, shorter, or empty if the script ended
    before."""

    #: The window that was begun last.
    window: Window = "warm-up"
    #: Nanoseconds of each clean step, and from an idle device to an idle one over all of them.
    clean_ns: list[int] = field(default_factory=list)
    clean_total_ns: int = 0
    nvml_share: float | None = None
    trace: StepTrace | None = None
    #: Whether the trace is the profiler's: else it has no single kernels.
    has_cupti: bool = True
    profiled_steps: int = 0
    profiled_total_ns: int = 0
    loader: LoaderFacts | None = None
    python_lines: list[LineTime] = field(default_factory=list)
    #: Of several ranks: the number of this one, how long it waited for others per step, by the
    #: clock of the host, and where its host was.
    rank: int | None = None
    rank_waits_ms: float | None = None
    host_lines: tuple[HostLine, ...] = ()
    #: The waits before the third window, by the user's line. On the fake device only, where looking
    #: changes no times.
    early_waits: dict[LineRecord, EarlyWaits] = field(default_factory=dict)
    #: The waits of each step in the third window.
    waits: list[list[Wait]] = field(default_factory=list)
    watched_total_ns: int = 0
    backwards: int = 0
    #: What could not be measured, and why.
    missing: list[str] = field(default_factory=list)
    is_complete: bool = False

    @property
    def step_ms(self) -> float | None:
        """Milliseconds of a clean step."""
        return self.clean_total_ns / len(self.clean_ns) / 1e6 if self.clean_ns else None

    @property
    def waits_per_step(self) -> float:
        return sum(map(len, self.waits)) / len(self.waits) if self.waits else 0.0


@dataclass(slots=True)
class Observations:
    """What is known of the script: its steps, how it ended, and the windows' measurements."""

    steps: int = 0
    calls: int = 0
    period: Period | None = None
    calls_per_step: int = 0
    on_cpu: bool = False
    device: Device | None = None
    settings: Settings = field(default_factory=Settings)
    measured: Measurements = field(default_factory=Measurements)
    notes: list[str] = field(default_factory=list)
    #: The lines of the step line's file that ran before it did.
    lines_that_ran: set[int] = field(default_factory=set)
    #: How many backward passes came before any optimizer step, and the line of the first.
    backwards_alone: int = 0
    backward_line: LineRecord | None = None
    #: The signal that ended the script, "Ctrl-C" or "SIGTERM"; "" if none did.
    signal: str = ""
    #: Whether the code is in a `with headrace.diagnose()` block, not in a script of its own.
    is_block: bool = False
    #: Whether the steps are those of a trace that somebody recorded.
    is_recorded: bool = False

    def note(self, text: str) -> None:
        """Add a sentence for the user, once."""
        if text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True, slots=True)
class _Traced:
    """Steps under the profiler. `total_ns` is by the host's clock."""

    steps: int
    total_ns: int
    trace: StepTrace | None


class Session:
    """Watches the steps of the code that runs inside its block.

    `device` is the fake device, if there is one; else the accelerator that the script uses.
    `on_complete` is called at the end of the last window, in the script's own thread: it may raise
    to end the script. If it has raised, the next step calls it again. If it ends the script, set
    `takes_batches`: before it is called, the script's loader is timed on its own, and the script
    does not get the batches that this takes.
    """

    #: The session that runs in this process: two would measure each other.
    _running: ClassVar[Session | None] = None

    def __init__(
        self,
        settings: Settings | None = None,
        device: Device | None = None,
        on_complete: Callable[[], object] = lambda: None,
        *,
        takes_batches: bool = False,
    ) -> None:
        self.settings = settings or Settings()
        self.seen = Observations(device=device, settings=self.settings)
        self._is_fake = device is not None
        self._on_complete, self._takes_batches = on_complete, takes_batches
        self._process = os.getpid()  # a script that forks is watched in its first process
        self._finder = StepFinder()
        self._loaders, self._torch_calls = Loaders(), TorchCalls()
        self._lock = threading.Lock()
        self._is_told = False  # `on_complete` was called, and has returned
        self._windows: Generator[None, None, None] | None = self._run_windows()
        self._optimizers: Any = {}
        #: A script without optimizers may update its weights itself.
        self._may_lack_optimizers = self.settings.step_line is None
        self._backwards = 0
        self._timed: TimedSteps | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Session:
        other = Session._running
        if other is not None and other._process == os.getpid():
            raise ProgramError(
                "this code is being diagnosed already: run the script without `headrace diagnose`, "
                "or without its headrace.diagnose() block"
            )
        next(self._windows or iter(()), None)
        # Before the steps are watched: a step's optimizer has ended when the step ends.
        self._stack.enter_context(self._torch_calls.watching_optimizers())
        step_line = self.settings.step_line
        if step_line is not None:
            watched = watch_line(step_line, self._on_call)
            self.seen.lines_that_ran = self._stack.enter_context(watched)
        else:
            watched_steps = watch_steps(self._on_call, self._before_call)
            self._optimizers = self._stack.enter_context(watched_steps)
        self._stack.enter_context(watch_backward(self._on_backward))
        self._stack.enter_context(self._loaders.watching())
        Session._running = self
        return self

    def __exit__(self, *exception: object) -> None:
        Session._running = None
        self._close_windows()  # first: they have replaced functions that the stack also has
        self._stack.close()
        self._note_steps()

    def _on_call(self, key: Hashable) -> None:
        windows = self._windows
        if os.getpid() != self._process:
            return
        if windows is None:
            if not self._is_told:  # the script caught what it raised, or asked for no batch
                self._complete()
            return
        ends_step = self._finder.on_call(key)
        if self._finder.is_lost:
            self._begin_again()
        if not ends_step:
            return
        with self._lock:
            try:
                ended = self.seen.measured.is_complete = next(windows, self) is self
            except Exception as problem:  # ours: the script must not fail for it
                ended = True
                measured = self.seen.measured
                measured.missing.append(
                    f"diagnose itself failed in the {measured.window} window: "
                    f"{type(problem).__name__}: {problem}"
                )
        if ended:
            self._windows = None
            self._note_steps()
            if not self._can_time_loader() or not self._loaders.time_alone(self._complete):
                self._complete()

    def _before_call(self) -> None:
        self._may_lack_optimizers = False

    def _can_time_loader(self) -> bool:
        """Whether batches may be taken, and something is predicted with what that shows. Ranks must
        all take as many batches."""
        return self._takes_batches and self.seen.measured.trace is not None and not has_ranks()

    def _complete(self) -> None:
        self._on_complete()
        self._is_told = True

    def _begin_again(self) -> None:
        """Forget the windows: the script has gone over to other steps."""
        with self._lock:
            self._close_windows()
            self._windows = self._run_windows()
            next(self._windows)

    def _close_windows(self) -> None:
        if self._windows is not None:
            windows, self._windows = self._windows, None
            try:
                windows.close()
            except RuntimeError as problem:  # the device may be unusable after the script's error
                measured = self.seen.measured
                measured.missing.append(
                    f"the {measured.window} window could not be ended: {problem}"
                )

    def _on_backward(self) -> None:
        self._backwards += 1
        if not self._may_lack_optimizers:
            return
        seen = self.seen
        seen.backwards_alone += 1
        if seen.backwards_alone == 1:
            seen.backward_line = wait_at(sys._getframe(1)).line
        if seen.backwards_alone > _MANY_BACKWARDS:
            seen.note("no optimizer step was seen: each backward pass counts as a step")
            self._on_call("backward")

    def _note_steps(self) -> None:
        self.seen.calls, self.seen.steps = self._finder.calls, self._finder.steps
        self.seen.period = self._finder.period
        self.seen.calls_per_step = self._finder.calls_per_step

    # --- windows: each `yield` waits for the end of a step --------------------------------------

    def _run_windows(self) -> Generator[None, None, None]:
        seen = self.seen
        measured = seen.measured = Measurements()
        with self._noted_early_waits(measured):
            yield
            while self._finder.steps < self.settings.warmup:
                yield
        self._finder.settle()
        if self._is_fake:
            seen.on_cpu = not self._uses_fake()
        else:
            seen.device = self._accelerator()
            seen.on_cpu = seen.device is None
        if not self._is_fake:
            yield from self._clean_window()
            if seen.device is not None:
                yield from self._profiled_window(seen.device)
                if measured.trace is not None:
                    yield from self._python_window(seen.device, measured.trace)
            if has_ranks():
                yield from self._ranks_window()
        if seen.device is not None and not seen.on_cpu:
            try:
                yield from self._lines_window(seen.device)
            finally:
                self._note_optimizers()
                self._note_blocking_launches()

    def _noted_early_waits(self, measured: Measurements) -> AbstractContextManager[None]:
        if not self._is_fake or self.seen.device is None:
            return nullcontext()
        last: LineRecord | None = None

        def note(wait: Wait) -> None:
            nonlocal last
            line = wait.called_from or wait.line
            if line is not None:
                early = measured.early_waits.setdefault(line, EarlyWaits())
                early.waits += 1
                early.visits += line != last or wait.operation not in _COPIES
            last = line

        return watch_waits(self.seen.device, note)

    def _clean_window(self) -> Iterator[None]:
        measured, device = self.seen.measured, self.seen.device
        measured.window = "clean"
        self._synchronize()
        start_ns = before_ns = time.perf_counter_ns()
        for _ in self._steps(self.settings.clean):
            yield
            now_ns = time.perf_counter_ns()
            measured.clean_ns.append(now_ns - before_ns)
            before_ns = now_ns
            # The script may end before the next step: what it does then is no part of a step.
            measured.clean_total_ns = now_ns - start_ns
        self._synchronize()
        measured.clean_total_ns = time.perf_counter_ns() - start_ns
        if device is not None:
            measured.nvml_share = device.use_share()

    def _profiled_window(self, device: Device) -> Iterator[None]:
        measured = self.seen.measured
        if is_profiling():
            measured.missing.append(
                "the script runs a profiler of its own, and there can be only one: no breakdown"
            )
            return
        measured.window = "profiled"

        def keep(traced: _Traced) -> None:
            measured.profiled_steps, measured.profiled_total_ns = traced.steps, traced.total_ns
            measured.trace = traced.trace

        if self.settings.cupti:
            try:
                yield from self._traced_steps(device, self.settings.profiled, keep)
            except RuntimeError as problem:
                self.seen.note(f"PyTorch's profiler failed: {problem}")
        if measured.trace is None:
            yield from self._timed_window(device)

    def _timed_window(self, device: Device) -> Iterator[None]:
        """Without CUPTI: what the host does, then what the device's work takes."""
        measured = self.seen.measured
        timed = TimedSteps(device, self._torch_calls, self._loaders, self._steps)
        noted: list[HostSteps] = []
        try:
            yield from timed.note_host(self.settings.profiled, noted.append)
            yield from timed.measure_device(_MEASURED_STEPS, noted[0])
        finally:
            measured.loader = self._loaders.facts
            if noted:
                measured.profiled_steps = len(noted[0].marks)
                measured.profiled_total_ns = noted[0].marks[-1] - noted[0].start_ns
                measured.trace = timed.trace(noted[0])
            measured.has_cupti = False
            if measured.trace is None:
                measured.missing.append(
                    "neither CUPTI nor CUDA events showed work of the GPU: no breakdown"
                )
        for note in timed.notes:
            self.seen.note(note)
        self._timed = timed

    def _python_window(self, device: Device, trace: StepTrace) -> Iterator[None]:
        """Where Python between launches makes the device wait: at which lines? Ranks leave this
        out, since they must all take as many steps."""
        if is_profiling() or has_ranks() or breakdown(trace).share("host") < _WORTH_SAMPLING:
            return

        def keep(traced: _Traced) -> None:
            if traced.trace is not None:
                self.seen.measured.python_lines = python_lines(traced.trace, samples)

        def keep_timed(host: HostSteps) -> None:
            assert self._timed is not None
            of_host = self._timed.trace(host)
            if of_host is not None:
                self.seen.measured.python_lines = python_lines(of_host, samples)

        with sampled_lines() as samples:
            if self._timed is None:
                yield from self._traced_steps(device, self.settings.lines, keep)
            else:
                yield from self._timed.note_host(self.settings.lines, keep_timed)

    def _ranks_window(self) -> Iterator[None]:
        """Of several ranks: where is the host, and how long does it wait for the others?"""
        measured, steps = self.seen.measured, 0
        measured.window, measured.rank = "ranks", this_rank()[0]
        waits = CollectiveWaits()
        with (
            sampled_lines() as samples,
            waits.watching(),
            self._torch_calls.noted(waits.edge),
            suppress(GeneratorExit),  # the script has ended: keep what there is
        ):
            for _ in self._steps(self.settings.lines):
                yield
                steps += 1
        if steps:
            measured.rank_waits_ms = waits.ns / steps / 1e6
            measured.host_lines = host_lines(samples, steps)

    def _traced_steps(
        self, device: Device, count: int, keep: Callable[[_Traced], object]
    ) -> Iterator[None]:
        """Run steps under the profiler, and call `keep` with them, also if the script ends."""
        marks: list[int] = []
        with (
            chrome_trace() as content,
            self._torch_calls.noted() as torch_calls,
            self._loaders.noted() as inputs,
        ):
            waits = [_timed(device, pause_s) for pause_s in _CLOCK_PAUSES_S]
            has_ended = True
            try:
                with suppress(GeneratorExit):  # the script has ended: read what there is
                    for _ in self._steps(count):
                        yield
                        marks.append(time.perf_counter_ns())
                    has_ended = False
            finally:
                device.synchronize("diagnose")
                now_ns = time.perf_counter_ns()
        self.seen.measured.loader = self._loaders.facts
        if marks:
            # What a script does after its last step is no part of a step.
            total_ns = (marks[-1] if has_ended else now_ns) - waits[-1][1]
            trace = read_trace(content, waits, marks, inputs, torch_calls)
            keep(_Traced(len(marks), total_ns, trace))

    def _lines_window(self, device: Device) -> Iterator[None]:
        measured = self.seen.measured
        measured.window = "lines"
        current: list[Wait] = []
        trains = threading.get_ident()

        def note(wait: Wait) -> None:
            current.append(replace(wait, in_other_thread=_is_other_thread(trains)))

        start_ns = time.perf_counter_ns()
        backwards = self._backwards
        with watch_waits(device, note), self._watched_zeroing():
            for _ in self._steps(self.settings.lines):
                yield
                # A new list: a thread may still add to the old one.
                measured.waits.append(current)
                current = []
                measured.watched_total_ns = time.perf_counter_ns() - start_ns
                measured.backwards = self._backwards - backwards

    def _steps(self, count: int) -> Iterator[int]:
        start_s = time.monotonic()
        for number in range(count):
            # Ranks must end a window at the same step: there only the count ends it.
            is_late = time.monotonic() - start_s > _MAX_WINDOW_S
            if number >= _MIN_STEPS and is_late and not has_ranks():
                return
            yield number

    # --- what else is worth knowing -------------------------------------------------------------

    def _accelerator(self) -> Device | None:
        """The GPU of the weights that are trained; None if they are on the CPU."""
        cuda: Any = cuda_namespace()
        if not (cuda.is_initialized() and cuda.is_available()):
            return None
        places = self._weights_places()
        on_gpu = [place for place in places if place.type == "cuda"]
        if on_gpu:
            return open_device(on_gpu[0])
        return None if places else open_device("cuda")

    def _uses_fake(self) -> bool:
        """Whether weights that are trained are on the fake device; if no optimizer knows them,
        whether anything is."""
        assert self.seen.device is not None
        places = self._weights_places()
        return any(place.type == "cuda" for place in places) or (
            not places and self.seen.device.peak_memory() > 0
        )

    def _weights_places(self) -> list[torch.device]:
        """The devices of the weights that are trained: that of the first weight of each group."""
        return [
            weight.device
            for optimizer in list(self._optimizers)
            if isinstance(optimizer, torch.optim.Optimizer)
            for group in optimizer.param_groups
            for weight in group["params"][:1]
        ]

    def _synchronize(self) -> None:
        if self.seen.device is not None:
            self.seen.device.synchronize("diagnose")

    def _watched_zeroing(self) -> AbstractContextManager[None]:
        """Note the lines at which `zero_grad` writes zeros."""
        optimizers: Any = torch.optim.Optimizer
        zero_grad = optimizers.zero_grad

        def zeroing(optimizer: Any, set_to_none: bool = True) -> Any:
            if not set_to_none:
                line = wait_at(sys._getframe(1)).line
                where = f" ({short_path(line.file)}:{line.line})" if line is not None else ""
                self.seen.note(
                    f"zero_grad(set_to_none=False){where} writes zeros to every gradient: leave "
                    "the argument out",
                )
            return zero_grad(optimizer, set_to_none)

        return replaced(optimizers, "zero_grad", zeroing)

    def _note_blocking_launches(self) -> None:
        if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
            self.seen.note(
                "CUDA_LAUNCH_BLOCKING is set: the host waits for every kernel; unset it unless "
                "you look for an error"
            )

    def _note_optimizers(self) -> None:
        for optimizer in list(self._optimizers):
            if not isinstance(optimizer, torch.optim.Optimizer):
                continue
            name = type(optimizer).__name__
            on_device = any(
                weight.device.type == "cuda"
                for group in optimizer.param_groups
                for weight in group["params"][:1]
            )
            is_fused = all(group.get("fused") for group in optimizer.param_groups)
            if on_device and not is_fused and can_be_fused(optimizer):
                self.seen.note(f"{name} is not fused: pass fused=True for fewer launches")


def _is_other_thread(trains: int) -> bool:
    """Whether this thread is one that the script has started besides the one that trains. Python
    knows no threads of autograd's, which run backward hooks: these train."""
    ident = threading.get_ident()
    thread = threading._active.get(ident)  # type: ignore[attr-defined]
    is_pythons = thread is not None and not isinstance(thread, threading._DummyThread)
    return is_pythons and ident != trains


def _timed(device: Device, pause_s: float) -> tuple[int, int]:
    """When a wait for the idle device began and ended."""
    time.sleep(pause_s)
    start_ns = time.perf_counter_ns()
    device.synchronize("diagnose")
    return start_ns, time.perf_counter_ns()
