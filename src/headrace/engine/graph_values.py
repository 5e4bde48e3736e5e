"""The numbers a graph keeps as they were at capture: the optimizer's settings and Python's values.

They are compared before every batch. Where they change now and then, graphs are dropped and
captured anew; where they change all the time, there is no use for graphs.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from headrace.engine import graph_rules
from headrace.engine.compiled import loss_of
from headrace.engine.python_state import PythonState
from headrace.engine.step import Parts
from headrace.errors import CaptureError
from headrace.parallel import unwrap

# Values that change oftener than every so many batches leave a graph no use.
_STEADY_BATCHES = 10
_MOST_CHANGES = 3


class FrozenValues:
    """The values with which a step's graphs were captured, or will be."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._settings: tuple[Hashable, ...] | None = None
        self._python: PythonState | None = None
        self._since_change = self._changes = 0
        # Gradients that nobody clears, of parameters that the optimizer does not have.
        self._outside: list[tuple[torch.Tensor, torch.Tensor]] = []

    def look(self) -> bool:
        """Before a batch: whether values are others than those that graphs were captured with.
        Raises `CaptureError` if they change all the time."""
        self._since_change += 1
        settings, before = graph_rules.settings(self._parts), self._settings
        changed = self._python_state().changed()
        # The user cleared them: a graph would write to the old ones.
        cleared = any(parameter.grad is not gradient for parameter, gradient in self._outside)
        if settings == before and changed is None:
            return cleared
        if before is not None:
            self._changes += self._since_change < _STEADY_BATCHES
            if self._changes == _MOST_CHANGES:
                raise CaptureError(
                    str(changed)
                    if changed is not None
                    else f"the optimizer's {graph_rules.changed_setting(before, settings)} changes "
                    "from step to step, and a graph keeps it as it was (a scheduler's "
                    "cycle_momentum, say; SGD's lr needs fused=True)"
                )
        self._settings, self._since_change = settings, 0
        return before is not None or cleared

    def captured(self) -> None:
        """A step was captured with the values as they are now."""
        parts = self._parts
        self._settings = graph_rules.settings(parts)
        own = {id(p) for p in parts.group.parameters()}
        self._outside = [
            (p, p.grad) for p in parts.model.parameters() if p.grad is not None and id(p) not in own
        ]

    def tensors(self) -> list[torch.Tensor]:
        """Those that Python values hold."""
        return [] if self._python is None else self._python.tensors()

    def require_unchanged(self) -> None:
        """After a capture: raises `CaptureError` if it has changed a value."""
        if self._python is not None and (changed := self._python.changed_so_far()):
            raise CaptureError(str(changed))

    def put_back(self) -> None:
        """After a capture that came to nothing: values are as they were."""
        if self._python is not None:
            self._python.put_back()

    def drop_graphs(self) -> None:
        self._outside = []

    def look_anew(self) -> None:
        """Other modules have other attributes."""
        self._python = None

    def _python_state(self) -> PythonState:
        if self._python is None:
            parts = self._parts
            loss = loss_of(parts.forward.loss)
            self._python = PythonState(parts.device, loss, unwrap(parts.model))
            if (iterator := self._python.iterator()) is not None:
                name, line = iterator
                where = "" if line is None else f" ({line})"
                raise CaptureError(
                    f"the loss function draws from the iterator {name}{where}, and a graph would "
                    "repeat what it drew at capture: let the loader draw from it, for each batch"
                )
        return self._python
