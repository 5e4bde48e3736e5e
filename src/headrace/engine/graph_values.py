"""The values that a graph freezes at capture: optimizer settings and Python values of the step.

They are compared before every batch. If one changes now and then, the graphs are dropped and
captured again. If values keep changing, the step is not worth capturing.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from headrace.engine.capturable_optimizer import takes_rates_as_tensors
from headrace.engine.compiled import uncompiled
from headrace.engine.python_state import PythonState
from headrace.engine.step import StepParts
from headrace.errors import CaptureError
from headrace.parallel import unwrap

# Changes less than this many batches apart are frequent.
_STEADY_BATCHES = 10
# After this many frequent changes the step is no longer captured.
_MAX_FREQUENT_CHANGES = 3
# Entries of a parameter group that are not compared: the parameters, what a scheduler remembers,
# and what a capture sets.
_NO_SETTINGS = ("params", "capturable", "initial_lr", "max_lr", "min_lr", "swa_lr")


class FrozenValues:
    """The values with which a step's graphs were captured, or will be."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._settings: tuple[Hashable, ...] | None = None
        self._python: PythonState | None = None
        self._batches_since_change = self._frequent_changes = 0
        # Parameters that the optimizer does not have, with their gradients: only the user clears
        # those.
        self._outside: list[tuple[torch.Tensor, torch.Tensor]] = []

    def check(self) -> bool:
        """Call before each batch. Returns whether a value differs from what graphs were captured
        with, so that they must be dropped. Raises `CaptureError` if values change too often."""
        self._batches_since_change += 1
        settings, before = _settings(self._parts), self._settings
        changed = self._python_state().changed()
        # If the user has cleared one, a graph would write to the old tensor.
        cleared = any(parameter.grad is not gradient for parameter, gradient in self._outside)
        if settings == before and changed is None:
            return cleared
        if before is not None:
            self._frequent_changes += self._batches_since_change < _STEADY_BATCHES
            if self._frequent_changes == _MAX_FREQUENT_CHANGES:
                raise CaptureError(
                    str(changed)
                    if changed is not None
                    else f"the optimizer's {_changed_setting(before, settings)} changes from step "
                    "to step, and a graph would repeat the value it was captured with: keep it "
                    "constant (cycle_momentum=False in a scheduler; SGD's lr needs fused=True)"
                )
        self._settings, self._batches_since_change = settings, 0
        return before is not None or cleared

    def note_capture(self) -> None:
        """Call after a capture: graphs now hold the present values."""
        parts = self._parts
        self._settings = _settings(parts)
        own = {id(p) for p in parts.group.parameters()}
        self._outside = [
            (p, p.grad) for p in parts.model.parameters() if p.grad is not None and id(p) not in own
        ]

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the Python values."""
        return [] if self._python is None else self._python.tensors()

    def require_unchanged(self) -> None:
        """Call after a capture. Raises `CaptureError` if it has changed a Python value."""
        if self._python is not None and (changed := self._python.changed_so_far()):
            raise CaptureError(str(changed))

    def restore_python(self) -> None:
        """Undo what a failed capture has changed in Python values."""
        if self._python is not None:
            self._python.restore()

    def forget_capture(self) -> None:
        """Call when all graphs are dropped."""
        self._outside = []

    def find_again(self) -> None:
        """Look for Python values again before the next batch: the model has other modules."""
        self._python = None

    def _python_state(self) -> PythonState:
        if self._python is None:
            parts = self._parts
            loss = uncompiled(parts.forward.loss)
            self._python = PythonState(parts.device, loss, unwrap(parts.model))
            if (iterator := self._python.iterator()) is not None:
                name, line = iterator
                where = "" if line is None else f" ({line})"
                raise CaptureError(
                    f"the loss function draws from the iterator {name}{where}, and a graph would "
                    "repeat what it drew at capture: draw from it in the loader instead"
                )
        return self._python


def _settings(parts: StepParts) -> tuple[Hashable, ...]:
    """The settings that a graph freezes, by name: the optimizer's, clip_norm and ema_decay."""
    by_tensor = takes_rates_as_tensors(parts)
    decay = None if parts.update.ema is None else parts.update.ema.decay
    clip_norm = None if parts.update.clipping is None else parts.update.clipping.max_norm
    frozen: list[tuple[str, Any]] = [("clip_norm", clip_norm), ("ema_decay", decay)]
    for group in parts.optimizer.param_groups:
        for name, value in group.items():
            if name in _NO_SETTINGS or (name == "lr" and by_tensor):
                continue
            frozen.append((name, id(value) if isinstance(value, torch.Tensor) else value))
    return tuple(frozen)


def _changed_setting(before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    """The name of the first setting that differs."""
    differing = (one[0] for one, other in zip(before, after, strict=False) if one != other)
    return str(next(differing, "number of parameter groups"))
