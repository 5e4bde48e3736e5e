"""What an optimizer's step reads and writes besides gradients, and whether it is still there."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch


class UpdateMemory:
    """Where an optimizer's parameters were at a capture, and which tensors it had for them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = optimized(optimizer)
        self._addresses = list(map(torch.Tensor.data_ptr, self._parameters))
        self._state = optimizer.state
        self._of_parameters = [*self._state.values(), _END]
        # Views show what the dicts hold now.
        self._views = [one.values() for one in self._state.values()]
        self._values = [*chain.from_iterable(self._views), _END]

    def has_moved(self, parameters: list[torch.Tensor]) -> bool:
        """Whether something is another object, or in other memory. `parameters` are the present
        ones. No Python code runs for each of them."""
        state = self._optimizer.state
        return not (
            state is self._state
            and len(parameters) == len(self._parameters)
            and all(map(operator.is_, parameters, self._parameters))
            and _are_same(state.values(), self._of_parameters)
            and _are_same(chain.from_iterable(self._views), self._values)
            and list(map(torch.Tensor.data_ptr, parameters)) == self._addresses
        )


_END = object()


def _are_same(objects: Iterable[Any], others: list[Any]) -> bool:
    """Whether these are the same objects, and as many: `others` has an `_END` after the last."""
    return all(map(operator.is_, chain(objects, (_END,)), others))


def optimized(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """An optimizer's parameters."""
    return list(chain.from_iterable(map(_PARAMETERS, optimizer.param_groups)))


_PARAMETERS = operator.itemgetter("params")
