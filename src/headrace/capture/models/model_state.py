"""`ModelState`: what a model's graphs depend on, and the key that a call's graph has."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from headrace.capture.guards.kernel_settings import KernelSettings
from headrace.capture.guards.module_guards import CodeGuards, ModuleGuards
from headrace.capture.models.captured_model import CallKey
from headrace.capture.models.eager import require_plain_model
from headrace.capture.reading.user_compiled import describe_own_graphs
from headrace.capture.state.gradients import GradientBuffers
from headrace.capture.state.signatures import signature
from headrace.capture.state.state import StepState
from headrace.data import rebuild_batch
from headrace.errors import CaptureError

_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class ModelState:
    """A model's tensors, modules and code, as they are when this is made. Raises `CaptureError` if
    no graph can take them."""

    def __init__(self, step: StepState) -> None:
        device, model = step.device, step.modules[0]
        require_plain_model(model)
        self.guards = ModuleGuards(model)
        if not all(map(device.holds, (*self.guards.parameters, *self.guards.buffers))):
            raise CaptureError(f"some of its parameters or buffers are not on {device}")
        self._code = CodeGuards(step)
        if (compiled := self._code.reader.owners.own_graphs) is not None:
            raise CaptureError(describe_own_graphs(compiled))
        self.gradients = GradientBuffers(device, self.guards.parameters)
        self._device = device
        self._settings = KernelSettings(device)
        self._modes = _Flags(self.guards.modes)
        self._trained = _Flags(self._which_require_gradients)

    def _which_require_gradients(self) -> list[bool]:
        return list(map(_REQUIRES_GRAD, self.guards.parameters))

    def change_of_model(self) -> str | None:
        """What of the model is another object now, or in other memory: all this is out of date."""
        return None if self.guards.hold() else self.guards.difference()

    def change_of_code(self) -> str | None:
        """A value that the model's code reads, and that has changed."""
        changed = self._code.changed()
        return None if changed is None else str(changed)

    def key(self, call: Any, leaves: list[Any]) -> CallKey:
        """The key of a call, whose leaves are given, too. Raises `CaptureError` for arguments that
        no graph can take."""
        differentiated = tuple(
            [at for at, leaf in enumerate(leaves) if getattr(leaf, "requires_grad", False)]
        )
        if differentiated:
            call = rebuild_batch(
                call, [leaf.detach() if leaf.requires_grad else leaf for leaf in leaves]
            )
        return CallKey(
            self._settings.now(),
            signature(call, self._device),
            differentiated,
            self._trained.number(),
            self._modes.number(),
        )


class _Flags:
    """Many flags, as a number for each combination of them: keys are hashed at every call."""

    def __init__(self, read: Callable[[], list[bool]]) -> None:
        self._read = read
        self._last: list[bool] = []
        self._number = 0
        self._numbers: dict[tuple[bool, ...], int] = {(): 0}

    def number(self) -> int:
        now = self._read()
        if now != self._last:
            self._number = self._numbers.setdefault(tuple(now), len(self._numbers))
            self._last = now
        return self._number
