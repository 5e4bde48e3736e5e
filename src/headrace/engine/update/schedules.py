"""Learning-rate schedulers, each stepped as in its own library's training loop.

Schedulers of PyTorch and transformers count their steps themselves: the engine calls `step()` after
each update or each epoch. Those that follow a metric get the epoch's mean loss. timm's get the
count after each update (`step_update`) and after each epoch (`step`); `t_in_epochs` decides which
of the two has an effect. A function of the update (`lr=get_lr`) sets the rate before each update.
"""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, Protocol

import torch

from headrace.errors import StepError
from headrace.source_lines import describe_function, users_line

log = logging.getLogger("headrace")
SchedulerInterval = Literal["step", "epoch"]
#: Returns the learning rate of an update (from 0), or one for each parameter group.
LearningRateFunction = Callable[[int], float | Sequence[float]]


class Scheduler(Protocol):
    """The methods that an engine needs from a scheduler. All of PyTorch's have them."""

    def step(self, *args: Any, **kwargs: Any) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Schedule:
    """Steps a scheduler without arguments, after each update or each epoch."""

    def __init__(self, scheduler: Any, every: SchedulerInterval) -> None:
        self._scheduler, self._every = scheduler, every

    def after_update(self, updates: int) -> None:
        """Step the scheduler, if it is due, after update number `updates`."""
        try:
            self._step_after_update(updates)
        except Exception as problem:
            self._raise(problem, f"update {updates:,}")

    def after_epoch(self, epochs: int, mean_loss: float) -> None:
        """Step the scheduler, if it is due, after epoch number `epochs` (from 1)."""
        try:
            self._step_after_epoch(epochs, mean_loss)
        except Exception as problem:
            self._raise(problem, f"epoch {epochs:,}")

    def _step_after_update(self, updates: int) -> None:
        if self._every == "step":
            self._scheduler.step()

    def _step_after_epoch(self, epochs: int, mean_loss: float) -> None:
        if self._every == "epoch":
            self._scheduler.step()

    def _raise(self, problem: Exception, after: str) -> NoReturn:
        """Raise what the scheduler's `step()` raised; or, if the schedule has ended, a `StepError`
        that says for how many steps it was made. `after` is the update or epoch."""
        name = type(self._scheduler).__name__
        steps = _total_steps(self._scheduler) if isinstance(problem, ValueError) else None
        if steps is None:
            problem.add_note(f"raised by the {name}'s step() after {after}")
            raise problem
        raise StepError(
            f"the scheduler ({name}) ran out after {after}, in the loop at {users_line()}: it was "
            f"made for {steps:,} steps ({problem}). All updates so far are complete. Create the "
            "scheduler with total_steps = epochs × updates per epoch; an epoch has "
            "len(loader) / accumulate updates, rounded up"
        ) from problem

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scheduler.load_state_dict(state)


class MetricSchedule(Schedule):
    """Steps a scheduler that follows a metric, such as `ReduceLROnPlateau`, with the epoch's mean
    loss."""

    def __init__(self, scheduler: Any, every: SchedulerInterval) -> None:
        super().__init__(scheduler, every)
        name = type(scheduler).__name__
        if every == "step":
            raise StepError(f"{name} needs the epoch's mean loss: use scheduler_every='epoch'")
        _require_min_mode(scheduler, name)

    def _step_after_epoch(self, epochs: int, mean_loss: float) -> None:
        self._scheduler.step(mean_loss)


class TimmSchedule(Schedule):
    """Steps a scheduler of timm with the number of updates and epochs."""

    def __init__(self, scheduler: Any, every: SchedulerInterval) -> None:
        super().__init__(scheduler, every)
        self._plateau: Any = getattr(scheduler, "lr_scheduler", None)
        if self._plateau is not None:
            _require_min_mode(self._plateau, type(scheduler).__name__)
        elif every == "epoch" and not getattr(scheduler, "t_in_epochs", True):
            log.warning(
                "scheduler_every = 'epoch', but this %s counts updates (t_in_epochs=False): it "
                "changes the learning rate after each update, as in timm's own training loop",
                type(scheduler).__name__,
            )

    def _step_after_update(self, updates: int) -> None:
        self._scheduler.step_update(updates)

    def _step_after_epoch(self, epochs: int, mean_loss: float) -> None:
        self._scheduler.step(epochs, mean_loss)

    def state_dict(self) -> dict[str, Any]:
        if self._plateau is None:
            return super().state_dict()
        # timm's own state does not say for how long the metric has not improved.
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


class FunctionSchedule(Schedule):
    """Sets the learning rates by a function of the update, before each update."""

    def __init__(self, function: LearningRateFunction, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(function, "step")
        self._function, self._optimizer, self._updates = function, optimizer, 0
        self._set(0)

    def _step_after_update(self, updates: int) -> None:
        self._set(updates)

    def _set(self, update: int) -> None:
        groups, returned = self._optimizer.param_groups, self._function(update)
        rates = returned if isinstance(returned, Sequence) else [returned] * len(groups)
        if len(rates) != len(groups) or not all(map(_is_rate, rates)):
            raise StepError(
                f"lr: {describe_function(self._function)} returned {returned!r:.80} for update "
                f"{update:,}: expected a number of 0 or more, or a list of {len(groups)}, one for "
                "each parameter group of the optimizer"
            )
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(float(rate))
            else:
                group["lr"] = float(rate)
        self._updates = update

    def _raise(self, problem: Exception, after: str) -> NoReturn:
        problem.add_note(f"raised by lr, {describe_function(self._function)}, after {after}")
        raise problem

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._set(int(state["updates"]))


def _is_rate(value: object) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]


def _require_min_mode(scheduler: Any, name: str) -> None:
    """Raise unless the scheduler expects its metric to fall, as the engine's mean loss does."""
    if getattr(scheduler, "mode", "min") != "min":
        raise StepError(
            f"{name} was made with mode={scheduler.mode!r}, but the engine gives it the epoch's "
            "mean training loss, which should fall: expected mode='min'. To follow another metric, "
            "step it yourself after engine.epoch()"
        )


def _total_steps(scheduler: Any) -> int | None:
    """How many steps a scheduler, or one inside it, was made for; None if there is no limit."""
    steps = getattr(scheduler, "total_steps", None)
    if isinstance(steps, int) and not isinstance(steps, bool):
        return steps
    inner = getattr(scheduler, "_schedulers", None) or [getattr(scheduler, "scheduler", None)]
    found = (_total_steps(one) for one in inner if one is not None)
    return next((one for one in found if one is not None), None)
