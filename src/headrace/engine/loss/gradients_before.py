"""The gradients of an optimizer's parameters before a call."""

from __future__ import annotations

import itertools
import operator

import torch

_GRADIENT = operator.attrgetter("grad")


class GradientsBefore:
    """The gradients of an optimizer's parameters, as they were when this was made. An epoch begins
    with it, and there may be thousands: no Python code runs for each."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        groups = (group["params"] for group in optimizer.param_groups)
        self._parameters: list[torch.Tensor] = list(itertools.chain.from_iterable(groups))
        self._before = self._now()
        self._versions = _versions(self._before)

    def have_changed(self) -> bool:
        now = self._now()
        return not all(map(operator.is_, now, self._before)) or _versions(now) != self._versions

    def restore(self) -> None:
        for parameter, gradient in zip(self._parameters, self._before, strict=True):
            parameter.grad = gradient

    def _now(self) -> list[torch.Tensor | None]:
        return list(map(_GRADIENT, self._parameters))


def _versions(gradients: list[torch.Tensor | None]) -> list[int]:
    return [gradient._version for gradient in gradients if gradient is not None]
