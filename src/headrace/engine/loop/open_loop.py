"""The training loop of an engine that is open, of which there is at most one."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from headrace.engine.loop.loop import Pass
from headrace.engine.stages import Progress
from headrace.errors import StepError

Steps = Generator[Progress, None, None]


class OpenLoop:
    """The pass that is running, and the generator of `steps()` that runs it, if one does."""

    def __init__(self) -> None:
        self.running: Pass | None = None
        self._steps: weakref.ref[Steps] | None = None

    def attach(self, steps: weakref.ref[Steps]) -> None:
        self._steps = steps

    @contextmanager
    def of(self, run: Pass) -> Iterator[None]:
        """Inside the block `run` is the running pass."""
        self.running = run
        try:
            yield
        finally:
            self.running = None

    def end(self) -> None:
        """End a `steps()` loop that is still open. Python would otherwise end it whenever it
        collects the generator."""
        if self.running is None:
            return
        other = None if self._steps is None else self._steps()
        if other is not None and inspect.getgeneratorstate(other) == inspect.GEN_SUSPENDED:
            other.close()
        if self.running is not None:
            raise StepError("this engine is already in a training loop: end that one first")
