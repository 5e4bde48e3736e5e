"""What a step of somebody's script is: the period of its optimizer steps and graph replays.

A plain loop calls one optimizer once per step, a GAN two optimizers in turn, a loop with the
optimizer in backward one per parameter, and a captured loop replays a graph. All of them repeat a
sequence; one round of it is a step.
"""

from __future__ import annotations

import ast
import heapq
import itertools
import linecache
import os
import sys
import threading
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from headrace.device import cuda_namespace
from headrace.errors import ProgramError
from headrace.replacing import replaced

#: How often a sequence must repeat before it counts as the period.
_ROUNDS = 3
#: The number of the first step whose end is known: the period is found in the steps before it.
FIRST_STEP = _ROUNDS + 1
#: A script whose calls do not repeat is given up after so many: then each call of the optimizer
#: that is called most often ends a step.
_MAX_CALLS = 4000
#: The parts of a statement that are no part of its first lines.
_BODIES = (ast.stmt, ast.excepthandler, ast.match_case)
#: How often a period that was settled may be given up for another.
_MAX_LOSSES = 3
#: How many calls are remembered once the period is settled: a training may have millions.
_KEPT_CALLS = 1000
#: The period is searched after each of the first calls, then after every few.
_EVERY_CALL, _EVERY_FEW = 100, 16


@dataclass(frozen=True, slots=True)
class Period:
    """One step as a sequence of calls. A step ends with every `count`-th call of `last`."""

    calls: tuple[Hashable, ...]
    last: Hashable
    count: int
    #: Whether the script's calls really repeat this sequence.
    repeats: bool = True


def find_period(calls: Sequence[Hashable], at_least: int = 0) -> Period | None:
    """The shortest sequence that `calls` repeat at their end: at least three times, over at least
    half of all calls, since a script may begin differently, and over `at_least` calls. None if
    there is none yet."""
    total = len(calls)
    for length in range(1, total // _ROUNDS + 1):
        covered = max(_ROUNDS * length, (total + 1) // 2, at_least)
        start = total - covered
        if start < 0:
            return None
        if all(calls[at] == calls[at - length] for at in range(start + length, total)):
            while start > 0 and calls[start - 1] == calls[start - 1 + length]:
                start -= 1
            return _period(tuple(calls[start : start + length]))
    return None


def _period(calls: tuple[Hashable, ...]) -> Period:
    """Let the step end with a call that occurs once in it, if there is one: a call that is skipped
    now and then (an overflow in fp16, say) then shifts no later step."""
    for last in reversed(calls):
        if calls.count(last) == 1:
            return Period(calls, last, 1)
    return Period(calls, calls[-1], calls.count(calls[-1]))


class _Settled(NamedTuple):
    """How many calls and steps there were when the period was settled."""

    calls: int
    steps: int


class StepFinder:
    """Tells which calls end a step, from the calls alone.

    `on_call` returns True if the call ended a step. Until the period is known it returns False;
    `steps` then counts the steps that were made meanwhile. After `settle` the period stays, unless
    other calls take its place: then `is_lost` is True once, and another period is looked for.
    """

    def __init__(self) -> None:
        self.period: Period | None = None
        self.steps = 0
        self.calls = 0
        self.is_lost = False
        self._history: list[Hashable] = []
        self._settled: _Settled | None = None
        self._ended_at = 0
        self._at_least = 0
        self._since_last = 0
        self._others = 0
        self._losses = 0

    def settle(self) -> None:
        """Keep the period from now on."""
        self._settled = _Settled(self.calls, self.steps)
        self._ended_at = self.calls

    @property
    def calls_per_step(self) -> int:
        """How many calls a step has: since `settle`, or else in the period."""
        settled = self._settled
        if settled is not None and self.steps > settled.steps:
            return round((self._ended_at - settled.calls) / (self.steps - settled.steps))
        return 0 if self.period is None else len(self.period.calls)

    def on_call(self, key: Hashable) -> bool:
        self.calls += 1
        self.is_lost = False
        self._history.append(key)
        if self._settled is not None and len(self._history) > 2 * _KEPT_CALLS:
            del self._history[:-_KEPT_CALLS]
        if self.period is None:
            self._find()
            return False
        if key not in self.period.calls:
            self._on_other_call()
            return False
        self._others = 0
        if key == self.period.last:
            self._since_last += 1
        if key != self.period.last or self._since_last < self.period.count:
            self._lose_if_endless()
            return False
        self._since_last = 0
        self.steps += 1
        self._ended_at = self.calls
        return True

    def _find(self) -> None:
        history = self._history
        if len(history) > _EVERY_CALL and len(history) % _EVERY_FEW:
            return  # searching takes longer the more calls there are
        self.period = find_period(history, self._at_least)
        if self.period is not None:
            self.steps = len(history) // len(self.period.calls)
        elif len(history) >= _MAX_CALLS:
            often = max(set(history), key=history.count)
            self.period = Period((often,), often, 1, repeats=False)
            self.steps = history.count(often)
        else:
            self.steps = len(history) if len(set(history)) == 1 else 0

    def _on_other_call(self) -> None:
        """A call that is not in the period. Before `settle`, it is a part of the true one. Later,
        it may be rare; but if it comes soon, or again and again, it is not."""
        assert self.period is not None
        if not self.period.repeats:
            return
        if self._settled is None:
            self._start_anew()
            return
        self._others += 1
        is_soon = self.calls <= 2 * self._settled.calls
        has_replaced = self._others >= _ROUNDS * len(self.period.calls)
        if is_soon or has_replaced:
            self._lose()
        else:
            self._lose_if_endless()

    def _lose_if_endless(self) -> None:
        """The call that ends a step may never come again, while others of the period do."""
        assert self.period is not None
        if self._settled is None or not self.period.repeats:
            return
        if self.calls - self._ended_at > 2 * _ROUNDS * len(self.period.calls):
            self._lose()

    def _lose(self) -> None:
        if self._losses < _MAX_LOSSES:
            self._losses += 1
            self.is_lost = True
            self.period, self.steps = None, 0
            self._settled = None
            self._others = self._since_last = 0

    def _start_anew(self) -> None:
        """What looked like the period was only a part of it, such as the first of several steps of
        a GAN's discriminator. The next one must hold for longer."""
        self._at_least = _ROUNDS * len(self._history)
        self.period, self.steps = None, 0


@contextmanager
def watch_steps(
    on_call: Callable[[Hashable], object], before_call: Callable[[], object] | None = None
) -> Iterator[WeakKeyDictionary[Any, int]]:
    """Call `on_call` after each optimizer step and graph replay inside the block, with a number for
    the optimizer or graph, and `before_call` before it. After those inside a capture, which run
    nothing, `on_call` is not called. Yields the optimizers and graphs with their numbers.

    An optimizer that takes the place of one that is gone, in the next fold of a cross-validation
    say, gets its number.
    """
    numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
    unused = itertools.count()
    # The numbers of optimizers and graphs that are gone, by kind, as heaps. The first one called of
    # a kind then gets the number that the first one had before.
    free: defaultdict[Hashable, list[int]] = defaultdict(list)
    finalizers: list[Any] = []
    cuda: Any = cuda_namespace()
    graph = cuda.CUDAGraph
    replay = graph.replay
    tell_before = before_call or (lambda: None)

    def number(one: object) -> int:
        if one not in numbers:
            same_kind = free[_kind(one)]
            numbers[one] = heapq.heappop(same_kind) if same_kind else next(unused)
            finalizers.append(weakref.finalize(one, heapq.heappush, same_kind, numbers[one]))
            finalizers[-1].atexit = False
        return numbers[one]

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        tell_before()

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_capturing():
            on_call(number(optimizer))

    def replay_and_tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        tell_before()
        result = replay(self, *args, **kwargs)
        if not is_capturing():
            on_call(number(self))
        return result

    # A compiled optimizer step would trace the hooks, and not call them again.
    hooks = [register_optimizer_step_post_hook(torch.compiler.disable(after_step))]
    if before_call is not None:
        hooks.append(register_optimizer_step_pre_hook(torch.compiler.disable(before_step)))
    try:
        with replaced(graph, "replay", replay_and_tell):
            yield numbers
    finally:
        for hook in hooks:
            hook.remove()
        for finalizer in finalizers:
            finalizer.detach()


def _kind(one: Any) -> Hashable:
    """The class of an optimizer or graph, and the shapes of an optimizer's weights. If they have
    none, as those of a lazy module, it is a kind of its own."""
    groups = getattr(one, "param_groups", ())
    try:
        shapes = tuple(tuple(weight.shape for weight in group["params"]) for group in groups)
    except (AttributeError, KeyError, RuntimeError, TypeError):
        return object()
    return type(one), shapes


@contextmanager
def watch_backward(on_backward: Callable[[], object]) -> Iterator[None]:
    """Call `on_backward` after each backward pass inside the block, in the frame that called it. A
    pass inside another one, as checkpointing makes them, is a part of that one."""
    autograd: Any = torch.autograd
    backward = autograd.backward

    def backward_and_tell(*args: Any, **kwargs: Any) -> Any:
        is_inside = torch._C._current_graph_task_id() != -1
        result = backward(*args, **kwargs)
        if not is_inside:
            on_backward()
        return result

    # Disabled, since a compiled step would trace it.
    with replaced(autograd, "backward", torch.compiler.disable(backward_and_tell)):
        yield


def is_capturing() -> bool:
    cuda: Any = cuda_namespace()
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


# --- a step that the user names by a line ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepLine:
    """A line of the script that runs once per step."""

    file: str
    line: int

    @classmethod
    def parse(cls, text: str) -> StepLine:
        file, colon, line = text.rpartition(":")
        if not colon or not file or not line.isdigit() or int(line) < 1:
            raise ProgramError(f"{text}: expected a file and a line, as in train.py:120")
        if not Path(file).is_file():
            raise ProgramError(
                f"{file}: no such file; expected a file and a line, as in train.py:120"
            )
        return cls(os.path.realpath(file), int(line))

    def is_in(self, code: CodeType) -> bool:
        """Whether the code is of this line's file."""
        return os.path.realpath(code.co_filename) == self.file


def watch_line(
    step_line: StepLine, on_call: Callable[[Hashable], object]
) -> AbstractContextManager[set[int]]:
    """Call `on_call` each time the line begins, inside the block; for the line of a loop, each time
    its body begins. Until then, the lines of its file that run are added to the set that the block
    gets."""
    watch = _monitored if hasattr(sys, "monitoring") else _traced
    return watch(step_line, on_call)


@cache
def _continuations(code: CodeType, line: int) -> frozenset[int]:
    """The offsets at which a line goes on after other lines of its statement: in `f(⏎ x⏎ )`, the
    first line runs for `f`, and once more for the call."""
    first, last = _statement(code.co_filename, line)
    found: set[int] = set()
    before, is_begun = None, False
    for offset, _, number in code.co_lines():
        if number == line and number != before and is_begun:
            found.add(offset)
        is_begun = number == line or (is_begun and number is not None and first <= number <= last)
        before = number
    return frozenset(found)


def _statement(file: str, line: int) -> tuple[int, int]:
    """The first and the last line of the statement at a line; of `for` and such without the
    body."""
    innermost = _innermost(file, line)
    if innermost is None:
        return line, line
    parts = [one for one in ast.iter_child_nodes(innermost) if not isinstance(one, _BODIES)]
    ends = [getattr(one, "end_lineno", 0) for part in parts for one in ast.walk(part)]
    return innermost.lineno, max(innermost.lineno, *ends, 0)


def _innermost(file: str, line: int) -> ast.stmt | None:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None
    statements = (node for node in ast.walk(tree) if isinstance(node, ast.stmt))
    around = [one for one in statements if one.lineno <= line <= (one.end_lineno or 0)]
    return max(around, key=lambda one: (one.lineno, -(one.end_lineno or 0)), default=None)


@cache
def _body_start(code: CodeType, line: int) -> int | None:
    """The offset at which the body of the loop at a line begins. None if there is no loop, or if
    its body is on the same line.

    The line of a loop runs once more than its body, for the last test; that of `while True` only
    once."""
    loop = _innermost(code.co_filename, line)
    if not isinstance(loop, ast.For | ast.AsyncFor | ast.While):
        return None
    first, last = loop.body[0], loop.body[-1]
    start = min([first.lineno, *(one.lineno for one in getattr(first, "decorator_list", ()))])
    if not _statement(code.co_filename, line)[1] < start:
        return None
    lines = ((at, number) for at, _, number in code.co_lines() if number is not None)
    return next((at for at, number in lines if start <= number <= (last.end_lineno or 0)), None)


def _begins_step(code: CodeType, line: int, offset: int, step_line: int) -> bool:
    """Whether a step begins with the instruction at an offset, which is the first of its line."""
    body = _body_start(code, step_line)
    if body is not None:
        return offset == body
    return line == step_line and offset not in _continuations(code, line)


@contextmanager
def _monitored(step_line: StepLine, on_call: Callable[[Hashable], object]) -> Iterator[set[int]]:
    """Python 3.12 and later: every other line is switched off when it is first reached."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    tool = monitoring.PROFILER_ID
    files: dict[str, bool] = {}
    ran: set[int] = set()

    def on_line(code: CodeType, line: int) -> Any:
        name = code.co_filename
        if name not in files:
            files[name] = step_line.is_in(code)
        if not files[name]:
            return monitoring.DISABLE
        ran.add(line)
        if not _begins_step(code, line, sys._getframe(1).f_lasti, step_line.line):
            return monitoring.DISABLE
        on_call("line")
        return None

    monitoring.use_tool_id(tool, "headrace")
    monitoring.register_callback(tool, monitoring.events.LINE, on_line)
    monitoring.set_events(tool, monitoring.events.LINE)
    monitoring.restart_events()  # an earlier block may have switched off the lines of this one
    try:
        yield ran
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, monitoring.events.LINE, None)
        monitoring.free_tool_id(tool)


@contextmanager
def _traced(step_line: StepLine, on_call: Callable[[Hashable], object]) -> Iterator[set[int]]:
    """Watch the line with a trace function. It slows every call down a little, so it is used only
    before Python 3.12, which has a better way."""
    in_file: dict[CodeType, bool] = {}
    has_line: dict[CodeType, bool] = {}
    ran: set[int] = set()

    def on_frame(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code not in in_file:
            in_file[code] = step_line.is_in(code)
            has_line[code] = in_file[code] and any(
                line == step_line.line for _, _, line in code.co_lines()
            )
        is_looking = step_line.line not in ran  # after that, only the line's own code is traced
        return on_event if has_line[code] or (is_looking and in_file[code]) else None

    def on_event(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            ran.add(frame.f_lineno)
            if has_line[frame.f_code]:
                if _begins_step(frame.f_code, frame.f_lineno, frame.f_lasti, step_line.line):
                    on_call("line")
            elif step_line.line in ran:
                frame.f_trace_lines = False
        return on_event

    before = sys.gettrace()
    sys.settrace(on_frame)
    threading.settrace(on_frame)
    callers = [frame for frame, _ in traceback.walk_stack(None) if step_line.is_in(frame.f_code)]
    for frame in callers:  # a trace function sees only frames that begin later
        frame.f_trace = on_frame(frame, "call", None)
    try:
        yield ran
    finally:
        for frame in callers:
            frame.f_trace = None
        sys.settrace(before)
        threading.settrace(before)
