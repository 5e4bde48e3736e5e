"""The optimizers of a captured function: plain, or capturable for the sake of its graphs."""

from __future__ import annotations

from typing import Any

from headrace.capture.graphs.work import Capturable
from headrace.capture.state.capturable_optimizer import CapturableOptimizer
from headrace.capture.state.state import StepState
from headrace.device import Device


class FunctionOptimizers:
    """Makes them capturable, with their learning rates on the device, and plain again."""

    def __init__(self, work: Capturable[Any, Any, Any], device: Device) -> None:
        self._work, self._device = work, device
        self._capturable: list[CapturableOptimizer] = []

    @property
    def are_capturable(self) -> bool:
        return bool(self._capturable)

    def were_reset(self) -> bool:
        """Whether one has got the state or the groups of a plain optimizer since."""
        return any(optimizer.was_reset for optimizer in self._capturable)

    def rounding(self) -> list[str | None]:
        """For each, how its results differ from those of the plain one."""
        return [optimizer.rounding for optimizer in self._capturable]

    def make_capturable(self, state: StepState | None) -> None:
        optimizers = () if state is None else state.optimizers
        self._use([CapturableOptimizer(self._device, one) for one in optimizers])

    def undo(self) -> None:
        """Make them what they were. Valid only if no update has been made since."""
        for optimizer in self._capturable:
            optimizer.undo()
        self.forget()

    def forget(self) -> None:
        """They have another state, of plain ones."""
        self._use([])

    def _use(self, capturable: list[CapturableOptimizer]) -> None:
        self._capturable = capturable
        self._work.use_optimizers(capturable)
