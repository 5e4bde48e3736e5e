"""What Accelerate's `prepare` has wrapped. Nothing here imports accelerate."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


def is_prepared(prepared: object, name: str = "AcceleratedOptimizer") -> bool:
    """Whether an object's class is Accelerate's wrapper `name`, or derived from it."""
    return any(
        kind.__name__ == name and kind.__module__.partition(".")[0] == "accelerate"
        for kind in type(prepared).__mro__
    )


def copies_by_itself(loader: object) -> bool:
    """Whether a prepared loader copies its batches to the device. If so, it no longer waits for the
    copies, as with Accelerate's setting `non_blocking`."""
    if not (is_prepared(loader, "DataLoaderShard") or is_prepared(loader, "DataLoaderDispatcher")):
        return False
    if getattr(loader, "device", None) is None:
        return False
    vars(loader)["_non_blocking"] = True
    return True


def optimizer_inside(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside Accelerate's wrapper, which decides when to step it; another optimizer
    is returned as it is."""
    while type(optimizer).__name__ == "AcceleratedOptimizer" and is_prepared(optimizer):
        inner: Any = optimizer
        optimizer = inner.optimizer
    return optimizer


def wrapper_steps_by(wrapper: Any, step: Callable[..., Any]) -> None:
    """Let a wrapper with a gradient scaler call this `step`: it keeps the one that its optimizer
    had when it was prepared."""
    if getattr(wrapper, "scaler", None) is not None:
        module: Any = sys.modules[type(wrapper).__module__]
        vars(wrapper).update(
            _optimizer_original_step_method=step,
            _optimizer_patched_step_method=module.patch_optimizer_step(wrapper, step),
        )
