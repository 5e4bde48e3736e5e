"""What stands in for `model.forward` and `optimizer.step`, and how the originals come back."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headrace.capture.models.graphed_model import GraphedModel
from headrace.capture.parts.accelerated import optimizer_inside, wrapper_steps_by
from headrace.capture.parts.breaks import BreakTimer, is_inside_break
from headrace.capture.updates.graphed_update import GraphedUpdate

#: Optimizers whose step has been replaced.
_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


class Switch:
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
        self, model: torch.nn.Module, graphed: GraphedModel, switch: Switch, timer: BreakTimer
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


def install_forward(
    model: torch.nn.Module, graphed: GraphedModel, switch: Switch, timer: BreakTimer
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


def install_step(
    given: torch.optim.Optimizer,
    update: GraphedUpdate,
    switch: Switch,
    replayed: Callable[[torch.optim.Optimizer], object],
    updated: Callable[[torch.optim.Optimizer], object],
) -> Callable[[], None]:
    optimizer = optimizer_inside(given)
    before, plain = vars(optimizer).get("step"), optimizer.step

    @functools.wraps(plain)
    def step(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        before = update.part.replays
        result = update(closure) if switch.is_on else plain(closure)
        if update.part.replays != before:
            replayed(optimizer)
        updated(optimizer)
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
