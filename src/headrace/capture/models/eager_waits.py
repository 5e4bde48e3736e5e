"""Eager calls of a model that wait for their backward."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from headrace.capture.models.lanes import Ticket
from headrace.capture.models.outputs import own_tensors

# For so many calls in a row others wait for a backward, which may never come.
_PATIENCE = 16


class EagerWaits:
    """In one backward either all calls are graphs or none, else their gradients would be added in
    another order. So calls beside an eager one that waits for its backward are eager, too."""

    def __init__(self) -> None:
        self._waiting: weakref.WeakSet[Ticket] = weakref.WeakSet()
        self._patience = _PATIENCE

    def note(self, result: Any) -> Any:
        """A call has run eagerly. It waits until its backward, or until its outputs are freed.
        Returns its result."""
        ticket = Ticket()
        for output in own_tensors(result, ()):
            if output.grad_fn is not None:
                self._waiting.add(ticket)
                output.register_hook(functools.partial(self._end, ticket))
        return result

    def _end(self, ticket: Ticket, gradient: torch.Tensor | None) -> None:
        self._waiting.discard(ticket)

    def is_any(self) -> bool:
        """Whether a call comes beside one that waits."""
        self._patience = self._patience - 1 if self._waiting else _PATIENCE
        return bool(self._waiting) and self._patience > 0
