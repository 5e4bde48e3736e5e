"""Unwraps optimizers and schedulers that Accelerate's `Accelerator.prepare` has wrapped.

Accelerate's wrappers step only when Accelerate's own gradient accumulation says so, and scale fp16
gradients. In an engine, the engine does both. So it uses the wrapped object where that computes the
same, and refuses the wrapper elsewhere. Nothing here imports accelerate.
"""

from __future__ import annotations

from typing import Any

from headrace.capture import is_prepared
from headrace.errors import StepError


def unwrap_optimizer(optimizer: Any, accumulate: int) -> Any:
    """The optimizer inside Accelerate's wrapper; another optimizer is returned as it is.
    `accumulate` is the engine's number of batches per update. Raises `StepError` if the wrapper
    does more than the engine can do."""
    if not is_prepared(optimizer, "AcceleratedOptimizer"):
        return optimizer
    if type(optimizer).__name__ != "AcceleratedOptimizer":
        raise StepError(
            f"the optimizer is Accelerate's {type(optimizer).__name__}, whose backend (DeepSpeed, "
            "Megatron) updates the weights itself: expected an optimizer that was prepared without "
            "such a backend, or a plain torch.optim.Optimizer"
        )
    if optimizer.scaler is not None:
        raise StepError(
            "the optimizer was prepared by Accelerate with mixed_precision='fp16', which scales "
            "losses in accelerator.backward(), but the engine calls backward() itself. Expected "
            "Accelerator(mixed_precision='no') and Engine(precision='fp16'), or bf16"
        )
    steps = getattr(optimizer.gradient_state, "num_steps", 1)
    if steps not in (1, accumulate):
        raise StepError(
            f"the optimizer was prepared by Accelerate with gradient_accumulation_steps={steps}, "
            f"but the engine has accumulate={accumulate}, and it alone decides when to update. "
            f"Use Engine(accumulate={steps}), or create the Accelerator without that option"
        )
    return unwrap_optimizer(optimizer.optimizer, accumulate)


def unwrap_scheduler(scheduler: Any) -> Any:
    """The scheduler inside Accelerate's wrapper; another scheduler is returned as it is. Raises
    `StepError` if the wrapper steps it in a way that the engine cannot."""
    if not is_prepared(scheduler, "AcceleratedScheduler"):
        return scheduler
    if type(scheduler).__name__ != "AcceleratedScheduler":
        raise StepError(
            f"the scheduler is Accelerate's {type(scheduler).__name__}, whose backend (DeepSpeed, "
            "Megatron) steps it: expected a scheduler that was prepared without such a backend"
        )
    processes = _processes(scheduler)
    if processes > 1 and scheduler.step_with_optimizer and not scheduler.split_batches:
        raise StepError(
            f"the scheduler was prepared by Accelerate, which steps it {processes} times after "
            "each update, once for each process; the engine steps it once. Create the schedule for "
            "the number of updates, and give the engine the scheduler before it is prepared"
        )
    return unwrap_scheduler(scheduler.scheduler)


def _processes(scheduler: Any) -> int:
    states = (getattr(optimizer, "accelerator_state", None) for optimizer in scheduler.optimizers)
    return max((getattr(state, "num_processes", 1) for state in states), default=1)
