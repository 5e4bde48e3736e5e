"""Differences between what the first replays of a part have made and what eager calls have.

A model's call, or an optimizer's step, runs eagerly beside its replay, on clones. What the loop has
is what the replay has made: a comparison costs time and memory alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.device import Device

#: Which differences of a tensor, as a share of its largest value, come from rounding: in float32,
#: in products of lower precision, and in float64.
_SINGLE, _LOWER, _DOUBLE = 1e-4, 2e-2, 1e-9
#: A tensor counts as having values of at least this share of the largest in its group: what is
#: zero but for rounding has no digits to compare.
_LEAST_SHARE = 1e-2

#: A tensor's name, what a replay has made, and what the eager call has.
Pair = tuple[str, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """How replays compare with eager calls. `worst` is the largest difference of a tensor, as a
    share of its largest value, `where` the tensor; 0 means that all bits are the same. `is_equal`:
    no difference is larger than rounding."""

    replays: int
    is_equal: bool
    worst: float
    where: str


class Differences:
    """Collects the differences of the first `count` replays of a part."""

    def __init__(self, device: Device, count: int = 0) -> None:
        self._device, self._left = device, count
        #: How many replays were compared.
        self.replays = 0
        self._worst, self._where = 0.0, ""
        self._is_equal = True

    def begins(self) -> bool:
        """Whether to compare the replay that comes now. Counts it."""
        if self._left <= 0:
            return False
        self._left -= 1
        self.replays += 1
        return True

    def report(self) -> CheckReport | None:
        """What was found; None if nothing was compared."""
        if not self.replays:
            return None
        return CheckReport(self.replays, self._is_equal, self._worst, self._where)

    def compare(self, pairs: Sequence[Pair], *, lower_precision: bool = False) -> None:
        """Compare tensors of one group: outputs, say, or gradients. The host waits for the device,
        as often as there are tensors."""
        with self._device.ledger.waiting("check"):
            self._compare(pairs, lower_precision or _has_tf32(self._device))

    def _compare(self, pairs: Sequence[Pair], lower_precision: bool) -> None:
        floating = [one for one in pairs if one[2].is_floating_point() and one[2].numel()]
        largest = max((_largest(expected) for _, _, expected in floating), default=0.0)
        for name, found, expected in pairs:
            difference = _difference(found, expected, _LEAST_SHARE * largest)
            if difference > _tolerance(expected.dtype, lower_precision):
                if self._is_equal:
                    self._worst = 0.0
                self._is_equal = False
            elif not self._is_equal:
                continue  # what is named is a difference that counts
            if difference > self._worst:
                self._worst, self._where = difference, f"{name}, replay {self.replays}"


def _difference(found: torch.Tensor, expected: torch.Tensor, least: float) -> float:
    """The largest difference, as a share of the largest expected value, or of `least`."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    same = (found == expected) | ((found != found) & (expected != expected))
    if bool(same.all()):
        return 0.0
    if not expected.is_floating_point():
        return float("inf")
    apart = (found.double() - expected.double()).abs()
    apart = torch.where(same, torch.zeros_like(apart), apart)
    largest = max(_largest(expected), least)
    worst = float(apart.max())
    return worst / largest if largest and worst == worst else float("inf")


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor.detach().double().abs().nan_to_num(0.0, posinf=0.0)
    return float(finite.max()) if finite.numel() else 0.0


def _tolerance(dtype: torch.dtype, lower_precision: bool) -> float:
    if dtype == torch.float64:
        return _DOUBLE
    return _LOWER if lower_precision or dtype != torch.float32 else _SINGLE


def _has_tf32(device: Device) -> bool:
    return "matmul tf32" in (device.float32_switches() or "")
