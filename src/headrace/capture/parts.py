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
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.capture.accelerated import copies_by_itself, optimizer_inside, wrapper_steps_by
from headrace.capture.breaks import BreakTimer, is_inside_break
from headrace.capture.gain import Gain
from headrace.capture.graphed_model import GraphedModel
from headrace.capture.graphed_update import GraphedUpdate
from headrace.capture.model_trials import GraphOptions
from headrace.capture.part import PartReport, PartTally
from headrace.capture.report import Way
from headrace.data import prefetch
from headrace.device import Device, available_devices, open_device
from headrace.errors import StepError
from headrace.plan import PLAN_VARIABLE

#: Optimizers whose step has been replaced.
_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
# Replaying a graph takes the host as long as launching the kernels of a few layers.
_MIN_LAYERS = 8


@dataclass(frozen=True, slots=True)
class SpeedUpReport:
    """What `speed_up` did. `off` says why it does nothing at all; None if it is at work. `way` is
    the most that is replayed now: "parts", only "children" of a model, or nothing ("eager").
    `break_ms` is, for each part of a model that runs eagerly, how long a call of it keeps the host,
    without the parts inside it. `gain` says what graphs gain, if that is measured."""

    parts: tuple[PartReport, ...]
    off: str | None = None
    way: Way = "eager"
    break_ms: Mapping[str, float] = field(default_factory=dict)
    gain: str | None = None

    def __str__(self) -> str:
        if self.off is not None:
            return f"speed_up does nothing: {self.off}"
        return "\n".join([*self._lines(None, ""), *([] if self.gain is None else [self.gain])])

    def _lines(self, parent: str | None, indent: str) -> Iterator[str]:
        """The parts below a part, each with those below it."""
        for part in self.parts:
            if self._parent_of(part.name) != parent:
                continue
            lines = str(part).splitlines()
            if part.name in self.break_ms:
                lines[0] += f", {self.break_ms[part.name]:.2f} ms a call of its own"
            yield from (indent + line for line in lines)
            yield from self._lines(part.name, indent + "    ")

    def _parent_of(self, name: str) -> str | None:
        """The part that a child was made of: the longest name that its own begins with."""
        above = [one.name for one in self.parts if name.startswith(f"{one.name}.")]
        return max(above, key=len, default=None)


class SpeedUp:
    """What `speed_up` returns. `close()` gives the model and the optimizer their own methods back,
    as the end of a `with` block does."""

    def __init__(
        self,
        models: list[tuple[torch.nn.Module, GraphedModel]],
        updates: list[tuple[torch.optim.Optimizer, GraphedUpdate]],
        off: str | None,
        loader: Iterable[Any] | None,
        measured_on: Device | None = None,
    ) -> None:
        self._off, self._switch = off, _Switch()
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
            undo = _install_step(optimizer, update, self._switch, self._on_replay, ends)
            self._undo.append(undo)
            ends = None  # the first optimizer's update ends a step

    def _add(self, model: torch.nn.Module, graphed: GraphedModel) -> None:
        self._models.append(graphed)
        if self._as_captured:
            graphed.trials.answer_as_captured()
        timer = self._timers[graphed.part.name] = BreakTimer()
        self._undo.append(_install_forward(model, graphed, self._switch, timer))
        graphed.when_divided(functools.partial(self._divide, model, graphed))

    def _divide(self, model: torch.nn.Module, graphed: GraphedModel) -> None:
        """Capture a model's children, since the whole of it cannot be."""
        self._timers[graphed.part.name].restart()
        own = {id(one.model) for one in self._models}
        for name, child in _children(model):
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

    def __enter__(self) -> SpeedUp:
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
) -> SpeedUp:
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
        device = _device_of(models, optimizers)
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
        return SpeedUp([], [], off, loader)
    if loader is not None and not copies_by_itself(loader):
        loader = prefetch(loader, opened)
    names = _names((*models, *optimizers))
    graphed, options = [], GraphOptions(after, shapes, recheck, check)
    for model in models:
        forward = torch.compile(model.forward) if compile else model.forward
        graphed.append((model, GraphedModel(model, forward, opened, names[id(model)], options)))
    updates = []
    for one in optimizers:
        inner, name = optimizer_inside(one), names[id(one)]
        update = GraphedUpdate(inner, opened, name=name, after=after, check=check)
        updates.append((one, update))
    return SpeedUp(graphed, updates, None, loader, opened if measure else None)


def _children(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The largest parts of a model that are called, and are large enough for a graph to pay."""
    for name, child in model.named_children():
        layers = sum(1 for one in child.modules() if next(one.children(), None) is None)
        if layers < _MIN_LAYERS or next(child.parameters(), None) is None:
            continue
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            yield from ((f"{name}.{inner}", one) for inner, one in _children(child))
        else:
            yield name, child


def _device_of(
    models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]
) -> torch.device:
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            return torch.device(tensor.device)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                found: torch.device = tensor.device
                return found
    return torch.device("cpu")


def _inside(part: object) -> object:
    return optimizer_inside(part) if isinstance(part, torch.optim.Optimizer) else part


def _names(parts: Iterable[object]) -> dict[int, str]:
    """A name for each part: its type, numbered where there are several."""
    types_of = {id(one): type(_inside(one)).__name__ for one in parts}
    names: dict[int, str] = {}
    for key, kind in types_of.items():
        alike = [other for other, one in types_of.items() if one == kind]
        names[key] = kind if len(alike) == 1 else f"{kind} {alike.index(key) + 1}"
    return names


# --- behind the methods ---------------------------------------------------------------------------


class _Switch:
    """Whether what `speed_up` has installed does anything."""

    def __init__(self) -> None:
        self.is_on = True

    def set(self, is_on: bool) -> None:
        self.is_on = is_on


def is_sped_up(part: torch.nn.Module | torch.optim.Optimizer) -> bool:
    """Whether `speed_up` has the model or the optimizer already."""
    if isinstance(part, torch.optim.Optimizer):
        return part in _optimizers
    return isinstance(vars(part).get("forward"), _Forward)


class _Forward:
    """`model.forward` of a graphed model. Copies of the model get their class's own."""

    def __init__(
        self, model: torch.nn.Module, graphed: GraphedModel, switch: _Switch, timer: BreakTimer
    ) -> None:
        self._plain: Callable[..., Any] = model.forward
        self._before = vars(model).get("forward")
        functools.update_wrapper(self, self._plain)  # others read the signature
        self._graphed, self._switch, self._timer = graphed, switch, timer
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._switch.is_on or torch.compiler.is_compiling():
            return self._plain(*args, **kwargs)
        if self._graphed.part.why is not None or is_inside_break():
            return self._timer.call(self._graphed, *args, **kwargs)
        return self._graphed(*args, **kwargs)

    def restore_in(self, attributes: dict[str, Any]) -> None:
        """Put back what a model's attributes had in its place."""
        if self._before is not None:
            attributes["forward"] = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _class_forward(memo.get(id(self._model), self._model))

    def __reduce__(self) -> Any:
        return _class_forward, (self._model,)


@contextmanager
def own_forwards(model: torch.nn.Module) -> Iterator[None]:
    """In the block, a model and its children have their own `forward`, for code that reads it."""
    found = [(vars(one), vars(one).get("forward")) for one in model.modules()]
    installed = [(own, forward) for own, forward in found if isinstance(forward, _Forward)]
    for own, forward in installed:
        del own["forward"]
        forward.restore_in(own)
    try:
        yield
    finally:
        for own, forward in installed:
            own["forward"] = forward


def _class_forward(model: torch.nn.Module) -> Any:
    return types.MethodType(type(model).forward, model)


def _install_forward(
    model: torch.nn.Module, graphed: GraphedModel, switch: _Switch, timer: BreakTimer
) -> Callable[[], None]:
    own = vars(model)
    names = ("forward", "__getstate__")
    before: dict[str, Any] = {name: own[name] for name in names if name in own}
    installed = _Forward(model, graphed, switch, timer)

    def state() -> Any:
        """A copy or a pickle has what the model had before."""
        found = before["__getstate__"]() if "__getstate__" in before else _class_state(model)
        if isinstance(found, dict):
            ours = (id(installed), id(state))
            found = before | {name: one for name, one in found.items() if id(one) not in ours}
        return found

    own["forward"], own["__getstate__"] = installed, state

    def undo() -> None:
        if own.get("forward") is not installed:
            return  # somebody has wrapped it: what they call runs eagerly from now on
        for name in names:
            own.pop(name, None)
        own.update(before)

    return undo


def _class_state(model: torch.nn.Module) -> Any:
    own: Any = getattr(type(model), "__getstate__", None)
    if own is None or own is getattr(object, "__getstate__", None):
        return dict(vars(model))
    return own(model)


def _install_step(
    given: torch.optim.Optimizer,
    update: GraphedUpdate,
    switch: _Switch,
    on_replay: list[Callable[[torch.optim.Optimizer], object]],
    step_ends: Callable[[], None] | None = None,
) -> Callable[[], None]:
    optimizer = optimizer_inside(given)
    before, plain = vars(optimizer).get("step"), optimizer.step

    @functools.wraps(plain)
    def step(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        before = update.part.replays
        result = update(closure) if switch.is_on else plain(closure)
        if update.part.replays != before:
            for call in on_replay:
                call(optimizer)
        if step_ends is not None:
            step_ends()
        return result

    # A method, since learning rate schedulers unwrap it.
    installed: Any = types.MethodType(step, optimizer)
    optimizer.step = installed  # type: ignore[method-assign]
    _optimizers.add(optimizer)
    wrapper_steps_by(given, installed)

    def undo() -> None:
        _optimizers.discard(optimizer)
        if vars(optimizer).get("step") is not installed:
            return
        del optimizer.step
        if before is not None:
            optimizer.step = before  # type: ignore[method-assign]
        wrapper_steps_by(given, optimizer.step)

    return undo
