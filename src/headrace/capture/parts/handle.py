"""`SpeedUpHandle`: the parts of a loop as graphs, until they are closed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from headrace.capture.models.graphed_model import GraphedModel
from headrace.capture.parts.breaks import BreakTimer
from headrace.capture.parts.gain import Gain
from headrace.capture.parts.given_parts import large_children
from headrace.capture.parts.installed import Switch, install_forward, install_step
from headrace.capture.reports.part import Counts, PartTally
from headrace.capture.reports.report import Way
from headrace.capture.reports.speed_up_report import SpeedUpReport
from headrace.capture.updates.graphed_update import GraphedUpdate
from headrace.device import Device

log = logging.getLogger("headrace")


class SpeedUpHandle:
    """What `speed_up` returns. `close()` gives the model and the optimizer their own methods back,
    as the end of a `with` block does. What it was given holds it until then."""

    def __init__(
        self,
        models: list[tuple[torch.nn.Module, GraphedModel]],
        updates: list[tuple[torch.optim.Optimizer, GraphedUpdate]],
        off: str | None,
        loader: Iterable[Any] | None,
    ) -> None:
        self._off, self._switch = off, Switch()
        self._as_captured = False
        self._models: list[GraphedModel] = []
        self._updates = [update for _, update in updates]
        self._undo: list[Callable[[], None]] = []
        self._timers: dict[str, BreakTimer] = {}
        self._on_replay: list[Callable[[torch.optim.Optimizer], object]] = []
        #: The loader that was given, wrapped by `prefetch` unless it copies batches itself; None if
        #: none was.
        self.loader = loader
        for model, graphed in models:
            self._add(model, graphed)
        self._gain: Gain | None = None
        for optimizer, update in updates:
            undo = install_step(optimizer, update, self._switch, self._replayed, self._updated)
            self._undo.append(undo)

    def choose(self, device: Device, shapes: int) -> None:
        """Compare steps with graphs and without, and keep what is faster."""
        self._gain = Gain(
            device,
            shapes=shapes,
            use_graphs=self.use_graphs,
            counts=self.counts,
            decided=self._decided,
        )

    def _updated(self, optimizer: torch.optim.Optimizer) -> None:
        if self._gain is not None:
            self._gain.updated(optimizer)

    def _decided(self, pays: bool, decision: str) -> None:
        log.info("speed_up: %s", decision)
        if not pays:
            self.give_up()

    def _add(self, model: torch.nn.Module, graphed: GraphedModel) -> None:
        self._models.append(graphed)
        if self._as_captured:
            graphed.trials.agreement.answer_as_captured()
        timer = self._timers[graphed.part.name] = BreakTimer()
        self._undo.append(install_forward(model, graphed, self._switch, timer))
        graphed.when_divided(functools.partial(self._divide, model, graphed))

    def _divide(self, model: torch.nn.Module, graphed: GraphedModel) -> None:
        """Capture a model's children, since the whole of it cannot be."""
        self._timers[graphed.part.name].restart()
        own = {id(one.model) for one in self._models}
        for name, child in large_children(model):
            if id(child) not in own and "forward" not in vars(child):
                own.add(id(child))
                self._add(child, graphed.for_child(child, name))

    def _pieces(self) -> list[GraphedModel | GraphedUpdate]:
        return [*self._models, *self._updates]

    def parts(self) -> list[PartTally]:
        """What runs as graphs, or may: more once a model has been divided."""
        return [one.part for one in self._pieces()]

    def when_replayed(self, call: Callable[[torch.optim.Optimizer], object]) -> None:
        """Call this after each replay of an optimizer's step."""
        self._on_replay.append(call)

    def _replayed(self, optimizer: torch.optim.Optimizer) -> None:
        for call in self._on_replay:
            call(optimizer)

    def report(self) -> SpeedUpReport:
        """Which parts run as graphs, which do not, and why."""
        parts = [one.report() for one in self._pieces()]
        used = [one.name for one in parts if one.replays and one.why is None]
        models = {one.name for one in parts[: len(self._models)]}
        children = [name for name in used if name in models and "." in name]
        way: Way = "parts" if used else "eager"
        if children and len(children) == len(models.intersection(used)):
            way = "children"
        timed = ((name, timer.ms_per_call) for name, timer in self._timers.items())
        eager = {one.name for one in parts if one.why is not None}
        break_ms = {name: ms for name, ms in timed if name in eager and ms is not None}
        decision = None if self._gain is None else self._gain.decision
        return SpeedUpReport(tuple(parts), self._off, way, break_ms, decision)

    def counts(self) -> Counts:
        """How many calls were replayed, and how many were on the way to that."""
        return PartTally.counts(self.parts())

    @property
    def answers_as_captured(self) -> bool:
        """Whether code of a model has asked whether it is captured, and is told so."""
        return any(one.trials.agreement.as_captured for one in self._models)

    def answer_as_captured(self) -> None:
        """Tell code from the first call on that it is captured, as in a run that this one
        continues."""
        self._as_captured = True
        for one in self._models:
            one.trials.agreement.answer_as_captured()

    def use_graphs(self, used: bool) -> None:
        """Whether later calls may be replayed and captured. If not, they are plain calls."""
        self._switch.set(used)

    def give_up(self) -> None:
        """Graphs gain nothing: from now on all runs as it did without `speed_up`."""
        for part in self.parts():
            part.leave("graphs gain nothing in this loop")
        self.use_graphs(False)
        self.close()

    def close(self) -> None:
        """Give back the original methods, and free the graphs. Calls that wait for their backward
        still get it."""
        while self._undo:
            self._undo.pop()()
        for piece in self._pieces():
            piece.close()

    def __enter__(self) -> SpeedUpHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
