"""What the breaks of a divided model cost: the time of its own eager code, without its children.

    Detector.forward  ├ own ┤ backbone ├ own: the matcher ┤ head ├ own ┤

The clock is the host's. It contains the host's waits, since a matcher that reads a value back costs
that wait, and no time in which the host is somewhere else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


class _TimedCalls(threading.local):
    """For each call that runs in this thread, innermost last: the time of the calls inside it."""

    def __init__(self) -> None:
        self.inner_ns: list[int] = []


_calls = _TimedCalls()


def is_inside_break() -> bool:
    """Whether a call is timed in this thread."""
    return bool(_calls.inner_ns)


class BreakTimer:
    """Times the calls of one part of a model."""

    def __init__(self) -> None:
        self._calls = self._own_ns = self._restarts = 0

    @property
    def ms_per_call(self) -> float | None:
        """The mean of its own time; None without a call."""
        return self._own_ns / self._calls / 1e6 if self._calls else None

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function`, and time it."""
        stack, restarts = _calls.inner_ns, self._restarts
        stack.append(0)
        begun = time.perf_counter_ns()
        try:
            return function(*args, **kwargs)
        finally:
            took = time.perf_counter_ns() - begun
            own = took - stack.pop()
            if restarts == self._restarts:
                self._own_ns += own
                self._calls += 1
            if stack:
                stack[-1] += took

    def restart(self) -> None:
        """Forget all calls so far, and the one that runs now."""
        self._calls = self._own_ns = 0
        self._restarts += 1
