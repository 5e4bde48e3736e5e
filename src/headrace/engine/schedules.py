"""Learning-rate schedulers, each stepped as its own library's training loop would step it.

PyTorch's (and transformers', which are PyTorch's) count their steps themselves: `step()` after each
update or each epoch. Those that follow a metric are given the epoch's mean loss. timm's are told
the count, after each update (`step_update`) and after each epoch (`step`), and do nothing in one of
the two, as `t_in_epochs` says.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any, Literal, NoReturn, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from headrace.engine.accelerated import plain_optimizer, plain_scheduler
from headrace.errors import StepError
from headrace.source_lines import users_line

log = logging.getLogger("headrace")
Every = Literal["step", "epoch"]


class Scheduler(Protocol):
    """What an engine can be given as a scheduler: PyTorch's, or another with these methods."""

    def step(self, *args: Any, **kwargs: Any) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Schedule:
    """A scheduler that is stepped without arguments, after each update or each epoch."""

    def __init__(self, scheduler: Any, every: Every) -> None:
        self._scheduler, self._every = scheduler, every

    def tell_update(self, updates: int) -> None:
        """The optimizer has made its `updates`-th update, and it was counted."""
        try:
            self.after_update(updates)
        except Exception as problem:
            self._raise(problem, f"update {updates:,}")

    def tell_epoch(self, epochs: int, mean_loss: float) -> None:
        """The `epochs`-th epoch has ended."""
        try:
            self.after_epoch(epochs, mean_loss)
        except Exception as problem:
            self._raise(problem, f"epoch {epochs:,}")

    def after_update(self, updates: int) -> None:
        if self._every == "step":
            self._scheduler.step()

    def after_epoch(self, epochs: int, mean_loss: float) -> None:
        if self._every == "epoch":
            self._scheduler.step()

    def _raise(self, problem: Exception, after: str) -> NoReturn:
        """An error of its `step()`, `after` an update or an epoch; or a `StepError` that says what
        the scheduler was made for, if it has run out."""
        name = type(self._scheduler).__name__
        steps = _steps_of(self._scheduler) if isinstance(problem, ValueError) else None
        if steps is None:
            problem.add_note(f"raised by the {name}'s step() after {after}")
            raise problem
        raise StepError(
            f"the scheduler ({name}) ran out after {after}, in the loop at {users_line()}: it was "
            f"made for {steps:,} steps ({problem}). All updates so far were made. Make the "
            "scheduler with total_steps = epochs × updates per epoch; an epoch has "
            "len(loader) / accumulate updates, rounded up"
        ) from problem

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scheduler.load_state_dict(state)


class MetricSchedule(Schedule):
    """A scheduler that follows the epoch's mean loss, as `ReduceLROnPlateau` does."""

    def __init__(self, scheduler: Any, every: Every) -> None:
        super().__init__(scheduler, every)
        name = type(scheduler).__name__
        if every == "step":
            raise StepError(f"{name} needs a finished loss: give scheduler_every='epoch' with it")
        _require_falling(scheduler, name)

    def after_epoch(self, epochs: int, mean_loss: float) -> None:
        self._scheduler.step(mean_loss)


class CountedSchedule(Schedule):
    """A scheduler of timm's kind, which is told the number of updates and of epochs."""

    def __init__(self, scheduler: Any, every: Every) -> None:
        super().__init__(scheduler, every)
        self._plateau: Any = getattr(scheduler, "lr_scheduler", None)
        if self._plateau is not None:
            _require_falling(self._plateau, type(scheduler).__name__)
        elif every == "epoch" and not getattr(scheduler, "t_in_epochs", True):
            log.warning(
                "scheduler_every = 'epoch', but this %s counts updates (t_in_epochs=False): it "
                "changes the learning rate after each update, as in timm's own training loop",
                type(scheduler).__name__,
            )

    def after_update(self, updates: int) -> None:
        self._scheduler.step_update(updates)

    def after_epoch(self, epochs: int, mean_loss: float) -> None:
        self._scheduler.step(epochs, mean_loss)

    def state_dict(self) -> dict[str, Any]:
        if self._plateau is None:
            return super().state_dict()
        # timm's own state of it lacks how long the metric has not improved.
        return {
            "own": super().state_dict(),
            "plateau": self._plateau.state_dict(),
            "restore_lr": self._scheduler.restore_lr,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._plateau is None:
            super().load_state_dict(state)
            return
        super().load_state_dict(state["own"])
        self._plateau.load_state_dict(state["plateau"])
        self._scheduler.restore_lr = state["restore_lr"]


def schedule_of(
    scheduler: Scheduler | None, every: Every, optimizer: torch.optim.Optimizer, accumulate: int
) -> Schedule | None:
    """How to step `scheduler`, which must belong to the engine's (plain) optimizer."""
    if every not in ("step", "epoch"):
        raise StepError(f"scheduler_every = {every!r}: expected 'step' or 'epoch'")
    if scheduler is None:
        return None
    plain = plain_scheduler(scheduler)
    _require_methods(plain)
    wrapper: Any = getattr(plain, "optimizer", None)
    if plain_optimizer(wrapper, accumulate) is not optimizer:
        raise StepError("the scheduler belongs to another optimizer than the engine's")
    if wrapper is not optimizer:
        wrapper._opt_called = True  # else PyTorch warns that it was not: what it wraps is
    if callable(getattr(plain, "step_update", None)):
        return CountedSchedule(plain, every)
    wanted = _wanted_by(plain)
    if isinstance(plain, ReduceLROnPlateau) or wanted in (["metrics"], ["metric"]):
        return MetricSchedule(plain, every)
    if wanted:
        raise StepError(
            f"{type(plain).__name__}.step() cannot be called without {', '.join(wanted)}: expected "
            "a scheduler whose step() takes nothing, or a metric"
        )
    return Schedule(plain, every)


def _require_methods(scheduler: Any) -> None:
    if isinstance(scheduler, LRScheduler):
        return
    missing = [
        name
        for name in ("step", "state_dict", "load_state_dict")
        if not callable(getattr(scheduler, name, None))
    ]
    if missing:
        raise StepError(
            f"the scheduler is a {type(scheduler).__name__} without {', '.join(missing)}(): "
            "expected a torch.optim.lr_scheduler.LRScheduler, or one of timm's or transformers'"
        )


def _wanted_by(scheduler: Any) -> list[str]:
    """The names of the arguments without which its `step` cannot be called."""
    either = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, parameter in inspect.signature(scheduler.step).parameters.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind not in either
    ]


def _require_falling(scheduler: Any, name: str) -> None:
    """The engine's metric is a loss: it falls as training goes well."""
    if getattr(scheduler, "mode", "min") != "min":
        raise StepError(
            f"{name} was made with mode={scheduler.mode!r}, and the engine gives it the epoch's "
            "mean training loss, which is to fall: expected mode='min'. To follow another metric, "
            "step it yourself after engine.epoch()"
        )


def _steps_of(scheduler: Any) -> int | None:
    """How many steps a scheduler, or one inside it, was made for, where there is a limit."""
    steps = getattr(scheduler, "total_steps", None)
    if isinstance(steps, int) and not isinstance(steps, bool):
        return steps
    inner = getattr(scheduler, "_schedulers", None) or [getattr(scheduler, "scheduler", None)]
    found = (_steps_of(one) for one in inner if one is not None)
    return next((one for one in found if one is not None), None)
