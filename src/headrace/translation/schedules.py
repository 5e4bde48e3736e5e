"""Learning-rate schedules: linear warmup, then constant or inverse square root."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from headrace.errors import TranslationError


def noam(optimizer: Optimizer, width: int, warmup: int, factor: float = 1.0) -> LambdaLR:
    """The original Transformer's schedule: factor · width^-½ · min(step^-½, step · warmup^-1½).

    Steps count from 1. It is `inverse_sqrt` with a peak of factor / √(width · warmup).
    """
    _check_whole("width", width, low=1)
    _check_whole("warmup", warmup, low=1)
    _check_number("factor", factor)
    return inverse_sqrt(optimizer, warmup, peak=factor / math.sqrt(width * warmup))


def inverse_sqrt(optimizer: Optimizer, warmup: int, peak: float) -> LambdaLR:
    """Linear to `peak` at step `warmup`, then falling with the square root of the step."""
    _check_whole("warmup", warmup, low=1)
    return _schedule(optimizer, peak, InverseSqrt(warmup))


def constant(optimizer: Optimizer, warmup: int, peak: float) -> LambdaLR:
    """Linear to `peak` at step `warmup`, then constant. A warmup of 0 starts at the peak."""
    _check_whole("warmup", warmup, low=0)
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
    _check_number("peak", peak)
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(peak)
        else:
            group["lr"] = peak
        group["initial_lr"] = peak
    return LambdaLR(optimizer, factor)


def _check_whole(name: str, value: object, *, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise TranslationError(f"{name} = {value!r}: expected a whole number, at least {low}")


def _check_number(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:  # type: ignore[operator]
        raise TranslationError(f"{name} = {value!r}: expected a number, at least 0")
