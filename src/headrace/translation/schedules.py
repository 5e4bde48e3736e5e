"""Learning-rate schedules: linear warm-up, then constant or with the inverse square root."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from headrace.errors import TranslationError


def noam(optimizer: Optimizer, width: int, warmup: int, factor: float = 1.0) -> LambdaLR:
    """The first Transformer's: factor · width^-½ · min(step^-½, step · warmup^-1½), steps from 1.

    It is `inverse_sqrt` with a peak of factor / √(width · warmup).
    """
    _check_whole("width", width, low=1)
    _check_whole("warmup", warmup, low=1)
    _check_number("factor", factor)
    return inverse_sqrt(optimizer, warmup, peak=factor / math.sqrt(width * warmup))


def inverse_sqrt(optimizer: Optimizer, warmup: int, peak: float) -> LambdaLR:
    """Up in a line to `peak` at step `warmup`, then down with the root of the step."""
    _check_whole("warmup", warmup, low=1)
    return _schedule(optimizer, peak, InverseSqrt(warmup))


def constant(optimizer: Optimizer, warmup: int, peak: float) -> LambdaLR:
    """Up in a line to `peak` at step `warmup`, and there it stays; with 0, from the start."""
    _check_whole("warmup", warmup, low=0)
    return _schedule(optimizer, peak, Constant(warmup))


@dataclass  # no slots, and not frozen: LambdaLR keeps its `__dict__` as state
class InverseSqrt:
    """The share of the peak that an update has. They are counted from 0: the first is 1/warmup."""

    warmup: int

    def __call__(self, updates: int) -> float:
        step = updates + 1
        return min(step / self.warmup, math.sqrt(self.warmup / step))


@dataclass
class Constant:
    """The share of the peak that an update has, counted from 0."""

    warmup: int

    def __call__(self, updates: int) -> float:
        return min(1.0, (updates + 1) / self.warmup) if self.warmup else 1.0


def _schedule(optimizer: Optimizer, peak: float, share: InverseSqrt | Constant) -> LambdaLR:
    """Every group of the optimizer gets the same rate, whatever it was made with: a schedule says
    what a rate is, not by how much to multiply another."""
    _check_number("peak", peak)
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(peak)
        else:
            group["lr"] = peak
        group["initial_lr"] = peak
    return LambdaLR(optimizer, share)


def _check_whole(name: str, value: object, *, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise TranslationError(f"{name} = {value!r}: expected a whole number from {low}")


def _check_number(name: str, value: object) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not 0 <= value < math.inf:  # type: ignore[operator]
        raise TranslationError(f"{name} = {value!r}: expected a number from 0")
