"""Schedulers that run out in the midst of training, in words."""

from __future__ import annotations

from typing import Any

from headrace.errors import StepError
from headrace.sites import users_line


def scheduler_error(scheduler: Any, problem: Exception, after: str) -> Exception:
    """What to raise for a scheduler whose `step()` raised, `after` an update or an epoch: the error
    itself, or a `StepError` that says what the scheduler was made for, if it has run out."""
    steps = _steps_of(scheduler) if isinstance(problem, ValueError) else None
    if steps is None:
        problem.add_note(f"raised by the {type(scheduler).__name__}'s step() after {after}")
        return problem
    found = StepError(
        f"the scheduler ({type(scheduler).__name__}) ran out after {after}, in the loop at "
        f"{users_line()}: it was made for {steps:,} steps ({problem}). All updates so far were "
        "made. Make the scheduler with total_steps = epochs × updates per epoch; an epoch has "
        "len(loader) / accumulate updates, rounded up"
    )
    found.__cause__ = problem
    return found


def _steps_of(scheduler: Any) -> int | None:
    """How many steps a scheduler, or one inside it, was made for, where there is a limit."""
    steps = getattr(scheduler, "total_steps", None)
    if isinstance(steps, int) and not isinstance(steps, bool):
        return steps
    inner = getattr(scheduler, "_schedulers", None) or [getattr(scheduler, "scheduler", None)]
    found = (_steps_of(one) for one in inner if one is not None)
    return next((one for one in found if one is not None), None)
