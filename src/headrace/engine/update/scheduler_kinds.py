"""Which way of stepping a scheduler needs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from headrace.engine.update.accelerate_wrappers import unwrap_optimizer, unwrap_scheduler
from headrace.engine.update.schedules import (
    FunctionSchedule,
    LearningRateFunction,
    MetricSchedule,
    Schedule,
    Scheduler,
    SchedulerInterval,
    TimmSchedule,
)
from headrace.errors import StepError


def schedule_of(
    scheduler: Scheduler | None,
    every: SchedulerInterval,
    optimizer: torch.optim.Optimizer,
    accumulate: int,
    lr: LearningRateFunction | None,
) -> Schedule | None:
    """The way to step `scheduler`, or to set the rates by the function `lr`; None if there is
    neither. Raises `StepError` if the engine cannot step the scheduler, or if it belongs to another
    optimizer than `optimizer`, the engine's."""
    if every not in ("step", "epoch"):
        raise StepError(f"scheduler_every = {every!r}: expected 'step' or 'epoch'")
    if lr is not None:
        if scheduler is not None:
            raise StepError("both lr and scheduler are given: expected one of them")
        if not callable(lr):
            raise StepError(
                f"lr is {lr!r:.80}: expected a function of the update (0, 1, …) that returns the "
                "learning rate. A constant rate is the optimizer's"
            )
        return FunctionSchedule(lr, optimizer)
    if scheduler is None:
        return None
    plain = unwrap_scheduler(scheduler)
    _require_methods(plain)
    wrapper: Any = getattr(plain, "optimizer", None)
    if unwrap_optimizer(wrapper, accumulate) is not optimizer:
        raise StepError(
            "the scheduler belongs to another optimizer than the engine's: create it with the "
            "optimizer that you give the engine"
        )
    if wrapper is not optimizer:
        # The engine steps the wrapped optimizer; PyTorch would warn that nobody steps the wrapper.
        wrapper._opt_called = True
    if callable(getattr(plain, "step_update", None)):
        return TimmSchedule(plain, every)
    required = _required_arguments(plain)
    if isinstance(plain, ReduceLROnPlateau) or required in (["metrics"], ["metric"]):
        return MetricSchedule(plain, every)
    if required:
        raise StepError(
            f"{type(plain).__name__}.step() cannot be called without {', '.join(required)}: "
            "expected a scheduler whose step() takes no argument, or a metric"
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


def _required_arguments(scheduler: Any) -> list[str]:
    """The names of the arguments that its `step()` requires."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, parameter in inspect.signature(scheduler.step).parameters.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind not in variadic
    ]
