"""What `Accelerator.prepare` makes of an optimizer and a scheduler, and what is inside.

Accelerate's wrappers step only when Accelerate's own gradient accumulation says so, and scale fp16
gradients. In an engine both are the engine's business: it works with the wrapped object, where
that computes the same, and refuses the wrapper otherwise. Nothing here imports accelerate.
"""

from __future__ import annotations

from typing import Any

from headrace.errors import StepError


def plain_optimizer(optimizer: Any, accumulate: int) -> Any:
    """The optimizer that Accelerate has wrapped; any other as it is. `accumulate` is the engine's
    number of batches an update."""
    if not _is_wrapper(optimizer, "AcceleratedOptimizer"):
        return optimizer
    if type(optimizer).__name__ != "AcceleratedOptimizer":
        raise StepError(
            f"the optimizer is Accelerate's {type(optimizer).__name__}, whose backend (DeepSpeed, "
            "Megatron) updates the weights itself: expected an optimizer that was prepared without "
            "one, or a plain torch.optim.Optimizer"
        )
    if optimizer.scaler is not None:
        raise StepError(
            "the optimizer was prepared by Accelerate with mixed_precision='fp16', which scales "
            "losses in accelerator.backward(); the engine calls backward itself. Expected "
            "Accelerator(mixed_precision='no') and Engine(precision='fp16'), or bf16"
        )
    steps = getattr(optimizer.gradient_state, "num_steps", 1)
    if steps not in (1, accumulate):
        raise StepError(
            f"the optimizer was prepared by Accelerate with gradient_accumulation_steps={steps}, "
            f"and the engine has accumulate={accumulate}; the engine alone decides when to update. "
            f"Give Engine(accumulate={steps}), or make the Accelerator without it"
        )
    return plain_optimizer(optimizer.optimizer, accumulate)


def plain_scheduler(scheduler: Any) -> Any:
    """The scheduler that Accelerate has wrapped; any other as it is."""
    if not _is_wrapper(scheduler, "AcceleratedScheduler"):
        return scheduler
    if type(scheduler).__name__ != "AcceleratedScheduler":
        raise StepError(
            f"the scheduler is Accelerate's {type(scheduler).__name__}, whose backend (DeepSpeed, "
            "Megatron) steps it: expected a scheduler that was prepared without one"
        )
    processes = _processes(scheduler)
    if processes > 1 and scheduler.step_with_optimizer and not scheduler.split_batches:
        raise StepError(
            f"the scheduler was prepared by Accelerate, which steps it {processes} times after "
            "each update, once for each process; the engine steps it once. Make the schedule for "
            "the number of updates and give the engine the scheduler that was not prepared"
        )
    return plain_scheduler(scheduler.scheduler)


def _processes(scheduler: Any) -> int:
    states = (getattr(optimizer, "accelerator_state", None) for optimizer in scheduler.optimizers)
    return max((getattr(state, "num_processes", 1) for state in states), default=1)


def _is_wrapper(wrapper: object, name: str) -> bool:
    """Whether its class is Accelerate's class of this name, or made from it."""
    return any(
        kind.__name__ == name and kind.__module__.partition(".")[0] == "accelerate"
        for kind in type(wrapper).__mro__
    )
