"""Eager runs under a trace: those that must agree before a capture, those that check a graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch

from headrace.capture.watching.recheck import Recheck
from headrace.capture.watching.trace import storages
from headrace.capture.watching.traced_run import TracedRun
from headrace.capture.watching.tracer import StepTracer
from headrace.capture.watching.watch import StepWatch
from headrace.device import Device

log = logging.getLogger("headrace")


class Trials:
    """The trials of one function, by the key of their graph. Warnings call it `name`. Calls of a
    key are watched from the `first` use on, or from the `last` while many keys are watched.
    `can_deny`: see `StepWatch`."""

    def __init__(
        self,
        device: Device,
        name: str,
        *,
        first: int,
        last: int,
        recheck: int,
        can_deny: bool = False,
    ) -> None:
        self._device, self._name = device, name
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
        trial.end(obstacles, storages(tensors()))

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

    def judge(
        self,
        graph: Any,
        found: str | None,
        drop: Callable[[str], None],
        give_up: Callable[[str], None],
    ) -> None:
        """A graph was checked. If it differs (`found`), `drop` the graphs, and `give_up` once that
        has happened too often."""
        if self.recheck.learn(graph, found):
            log.warning("%s: %s", self._name, self.recheck.differed)
            drop(f"a call that was checked differs from its graph: {found}")
            if self.recheck.is_hopeless:
                give_up(f"it changes while its graphs are in use: {found}")
