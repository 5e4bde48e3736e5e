"""Learning-rate schedules: linear warmup, then constant or inverse square root."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def noam(optimizer: Optimizer, width: int, warmup: int) -> LambdaLR:
    """The original Transformer's schedule: width^-½ · min(step^-½, step · warmup^-1½).

    Steps count from 1. It is `inverse_sqrt` with a peak of 1 / √(width · warmup).
    """
    return inverse_sqrt(optimizer, warmup, peak=1 / math.sqrt(width * warmup))


def inverse_sqrt(optimizer: Optimizer, warmup: int, peak: float) -> LambdaLR:
    """Linear to `peak` at step `warmup`, then falling with the square root of the step."""
    return _schedule(optimizer, peak, InverseSqrt(warmup))


def constant(optimizer: Optimizer, warmup: int, peak: float) -> LambdaLR:
    """Linear to `peak` at step `warmup`, then constant. A warmup of 0 starts at the peak."""
    return _schedule(optimizer, peak, Constant(warmup))


@dataclass  # no slots, not frozen: LambdaLR saves and loads its `__dict__`
class InverseSqrt:
    """Factor of the peak after this many updates: 1 / warmup for the first update."""

    warmup: int

    def __call__(self, updates: int) -> float:
        step = updates + 1
        return min(step / self.warmup, math.sqrt(self.warmup / step))


@dataclass
class Constant:
    """Factor of the peak after this many updates."""

    warmup: int

    def __call__(self, updates: int) -> float:
        return min(1.0, (updates + 1) / self.warmup) if self.warmup else 1.0


def _schedule(optimizer: Optimizer, peak: float, factor: InverseSqrt | Constant) -> LambdaLR:
    """Set the learning rate of all parameter groups to `peak`, and schedule it with `factor`.

    The rate that the optimizer was made with has no effect.
    """
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(peak)
        else:
            group["lr"] = peak
        group["initial_lr"] = peak
    return LambdaLR(optimizer, factor)
