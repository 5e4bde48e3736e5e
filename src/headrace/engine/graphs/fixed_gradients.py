"""Gradients that only the user replaces, and that a graph would go on using."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch

from headrace.capture import GRADIENTS_REPLACED

_GRADIENT = operator.attrgetter("grad")


class FixedGradients:
    """The gradients at the last capture: of parameters that the optimizer does not have, and with
    accumulation of all."""

    def __init__(self) -> None:
        self._parameters: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor | None] = []

    def keep(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = [p for p in parameters if p.grad is not None]
        self._gradients = list(map(_GRADIENT, self._parameters))

    def replaced(self) -> str | None:
        """Why the graphs must go, if one of the gradients is another tensor by now."""
        now = map(_GRADIENT, self._parameters)
        return None if all(map(operator.is_, now, self._gradients)) else GRADIENTS_REPLACED
