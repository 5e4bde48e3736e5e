"""Eager runs under a trace: those that must agree before a capture, those that check a graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from headrace.capture.watching.recheck import Recheck
from headrace.capture.watching.trace import OperationTrace, Storage, storages
from headrace.capture.watching.tracer import StepTracer
from headrace.capture.watching.watch import StepWatch
from headrace.device import Device, Obstacle, torch_draw

log = logging.getLogger("headrace")


@dataclass(slots=True)
class TracedRun:
    """One run under a trace. `known` is memory that it may read, since other checks notice if it
    is replaced."""

    tracer: StepTracer
    known: set[Storage]
    obstacles: Sequence[Obstacle] = field(default_factory=list)

    @property
    def trace(self) -> OperationTrace:
        return self.tracer.trace

    def allow_host_draws(self) -> None:
        """Random numbers that were drawn on the host are no obstacle, if a replay can repeat them.
        Call it right after the run."""
        draws = self.trace.host_draws
        draws.end()
        if draws.are_all:
            self.obstacles = [one for one in self.obstacles if one.what != torch_draw().what]

    def allow_host_constants(self) -> None:
        """Copies from the host are no obstacle, if a capture can read what they copied. Call it
        right after the run."""
        if self.trace.host_constants is not None:
            self.obstacles = self.trace.host_constants.excuse(self.obstacles)


class Trials:
    """The trials of one function, by the key of their graph. Calls of a key are watched from the
    `first` use on, or from the `last` while many keys are watched. `can_deny`: see `StepWatch`."""

    def __init__(
        self, device: Device, *, first: int, last: int, recheck: int, can_deny: bool = False
    ) -> None:
        self._device = device
        self.watch = StepWatch(first, last, can_deny=can_deny)
        self.recheck = Recheck(recheck)

    @contextmanager
    def run(
        self,
        caller: CodeType,
        tensors: Callable[[], list[torch.Tensor]],
        *,
        constants_of: Sequence[torch.Tensor] | None = None,
    ) -> Iterator[TracedRun]:
        """Run the function in this block, inside the trial's `tracer`. `caller` is the code around
        the user's. `tensors` are those that it may read; there may be more of them afterwards. With
        `constants_of`, what it copies from the host is noted, and what it reads back of these."""
        tracer = StepTracer(self._device, caller, as_captured=self.watch.as_captured)
        trial = TracedRun(tracer, storages(tensors()))
        with self._device.watch() as obstacles:
            if constants_of is not None:
                tracer.trace.note_constants(self._device, constants_of)
            yield trial
        trial.obstacles = obstacles
        trial.known |= storages(tensors())

    def record(
        self,
        key: Hashable,
        caller: CodeType,
        work: Callable[[], object],
        tensors: Callable[[], list[torch.Tensor]],
    ) -> None:
        """Run what is being captured under a trace, for work of which no two eager runs are alike
        before it is captured. Checks compare with this run."""
        tracer = StepTracer(self._device, caller)
        with tracer:
            work()
        tracer.trace.leave_out(storages(tensors()))
        self.watch.agree(key, tracer.trace)

    def learn(self, key: Hashable, trial: TracedRun, *, first: bool) -> str | None:
        """Add a trial before a capture. Returns why nothing can be captured, if that is clear."""
        return self.watch.learn(key, trial.trace, trial.obstacles, trial.known, first=first)

    def difference(self, key: Hashable, trial: TracedRun) -> str | None:
        """What a trial did otherwise than those that the key's graph was captured after."""
        return self.watch.difference(key, trial.trace, trial.obstacles, trial.known)

    def learn_of(self, graph: Any, found: str | None, name: str) -> bool:
        """A graph was checked, and differs (`found`) or not. Returns whether it must be dropped."""
        if not self.recheck.learn(graph, found):
            return False
        log.warning("%s: %s", name, self.recheck.differed)
        return True
