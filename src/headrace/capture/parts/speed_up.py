"""`speed_up(model, optimizer)`: a loop's parts as graphs, and the loop as it is.

    handle = hr.speed_up(model, optimizer)
    for batch in loader:
        loss = loss_fn(model(batch.x), batch.y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(handle.report())

Forward and backward of the model and the optimizer's step are replayed as graphs. Everything else,
such as the loss, clipping, schedules and logging, runs as it always does.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from headrace.capture.models.graphed_model import GraphedModel
from headrace.capture.models.model_trials import GraphOptions
from headrace.capture.parts.accelerated import copies_by_itself, optimizer_inside
from headrace.capture.parts.breaks import BreakTimer
from headrace.capture.parts.gain import Gain
from headrace.capture.parts.given_parts import device_of, large_children, names_of
from headrace.capture.parts.installed import Switch, install_forward, install_step
from headrace.capture.reports.part import PartTally
from headrace.capture.reports.report import Way
from headrace.capture.reports.speed_up_report import SpeedUpReport
from headrace.capture.updates.graphed_update import GraphedUpdate
from headrace.data import prefetch
from headrace.device import Device, available_devices, open_device
from headrace.errors import StepError
from headrace.plan import PLAN_VARIABLE


class SpeedUpHandle:
    """What `speed_up` returns. `close()` gives the model and the optimizer their own methods back,
    as the end of a `with` block does. What it was given holds it until then."""

    def __init__(
        self,
        models: list[tuple[torch.nn.Module, GraphedModel]],
        updates: list[tuple[torch.optim.Optimizer, GraphedUpdate]],
        off: str | None,
        loader: Iterable[Any] | None,
        measured_on: Device | None = None,
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
        if measured_on is not None and updates:
            self._gain = Gain(measured_on, self.use_graphs, lambda: self.replays)
        ends = None if self._gain is None else self._gain.step_ends
        for optimizer, update in updates:
            undo = install_step(optimizer, update, self._switch, self._replayed, ends)
            self._undo.append(undo)
            ends = None  # the first optimizer's update ends a step

    def _add(self, model: torch.nn.Module, graphed: GraphedModel) -> None:
        self._models.append(graphed)
        if self._as_captured:
            graphed.trials.answer_as_captured()
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
        gain = None if self._gain is None else self._gain.text
        return SpeedUpReport(tuple(parts), self._off, way, break_ms, gain)

    @property
    def replays(self) -> int:
        """How often a part was replayed."""
        return sum(one.replays for one in self.parts())

    @property
    def answers_as_captured(self) -> bool:
        """Whether code of a model has asked whether it is captured, and is told so."""
        return any(one.trials.answers_as_captured for one in self._models)

    def answer_as_captured(self) -> None:
        """Tell code from the first call on that it is captured, as in a run that this one
        continues."""
        self._as_captured = True
        for one in self._models:
            one.trials.answer_as_captured()

    def use_graphs(self, used: bool) -> None:
        """Whether later calls may be replayed and captured. If not, they are plain calls."""
        self._switch.set(used)

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


def speed_up(
    *parts: torch.nn.Module | torch.optim.Optimizer,
    loader: Iterable[Any] | None = None,
    compile: bool = False,  # noqa: A002
    device: Device | str | torch.device | None = None,
    after: int = 2,
    shapes: int = 16,
    recheck: int = 1000,
    check: int = 0,
    measure: bool = False,
) -> SpeedUpHandle:
    """Replay models' forward and backward, and optimizers' steps, as graphs, in your own loop.

    Call it once before the loop, with all models and optimizers that train: nothing else changes.

    - `loader`: wrapped by `prefetch`; iterate over `.loader` of what this returns. One that
      Accelerate has prepared copies batches itself, and is told not to wait for that.
    - `compile`: compile the models with `torch.compile` first.
    - `device`: where they train. Default: the device of the first parameter; if that is the CPU and
      no `loader` is given, the accelerator that they may be moved to before the first step.
    - `after`: how many calls with a shape run eagerly before it is captured.
    - `shapes`: how many graphs a model has at most.
    - `recheck`: at its replays 10, 30, 100, 300 and then after each `recheck` of them, a graph is
      compared with a call that runs eagerly; 0: never.
    - `check`: how many of the first replays of each part are compared with the part run eagerly;
      `report()` says what differs.
    - `measure`: run some of the first steps with graphs and some without, in turns, which takes a
      host wait each turn. `report()` says what graphs gain, and the faster way stays.

    What no graph can repeat runs eagerly, and `report()` of the result says why. With
    `HEADRACE_PLAN=baseline` in the environment, and on a CPU, it does nothing.
    """
    models = [one for one in parts if isinstance(one, torch.nn.Module)]
    optimizers = [one for one in parts if isinstance(one, torch.optim.Optimizer)]
    odd = [one for one in parts if one not in (*models, *optimizers)]
    if odd or not parts:
        found = type(odd[0]).__name__ if odd else "nothing"
        raise StepError(f"speed_up was given {found}; expected models and optimizers")
    if after < 1 or shapes < 1 or recheck < 0 or check < 0:
        raise StepError(
            f"speed_up: shapes = {shapes}, after = {after}, recheck = {recheck}, check = {check}; "
            "expected at least 1 for the first two, and 0 or more for the others"
        )
    if device is None:
        device = device_of(models, optimizers)
        if device.type == "cpu" and loader is None:
            device = available_devices()[0].partition(":")[0]  # the current one of its kind
    opened = open_device(device)
    off = None
    if os.environ.get(PLAN_VARIABLE) == "baseline":
        off = f"{PLAN_VARIABLE}=baseline is set"
    elif not opened.captures:
        off = f"{opened} captures no graphs"
    if off is not None:
        opened.warn_once(f"speed_up: {off}", "speed_up does nothing: %s", off)
        return SpeedUpHandle([], [], off, loader)
    if loader is not None and not copies_by_itself(loader):
        loader = prefetch(loader, opened)
    names = names_of((*models, *optimizers))
    graphed, options = [], GraphOptions(after, shapes, recheck, check)
    for model in models:
        forward = torch.compile(model.forward) if compile else model.forward
        graphed.append((model, GraphedModel(model, forward, opened, names[id(model)], options)))
    updates = []
    for one in optimizers:
        inner, name = optimizer_inside(one), names[id(one)]
        update = GraphedUpdate(inner, opened, name=name, after=after, check=check)
        updates.append((one, update))
    return SpeedUpHandle(graphed, updates, None, loader, opened if measure else None)
