"""An optimizer's step as a graph, and how it is captured."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch

from headrace.capture.guards.obstacles import require_no_obstacle
from headrace.capture.state.capturable_optimizer import CapturableOptimizer
from headrace.capture.state.gradient_copies import GradientCopies
from headrace.capture.state.memory import StateBeforeCapture
from headrace.capture.state.state import StepState
from headrace.capture.watching.trials import Trials
from headrace.device import Graph
from headrace.errors import CaptureError

#: What a gradient scaler gives a fused optimizer before each step.
SCALER_INPUTS = ("grad_scale", "found_inf")


def capture_update(
    state: StepState,
    capturable: CapturableOptimizer,
    pool: object,
    copies: GradientCopies | None,
    key: Hashable,
    trials: Trials,
) -> CapturedUpdate:
    """Capture an optimizer's step, which reads its gradients where they are, or their `copies`.
    The `trials` get its trace. Raises `CaptureError` if that cannot be done."""
    step = cast(Callable[[], Any], state.function)
    require_no_obstacle(state)
    if not all(map(state.device.holds, state.parameters())):
        raise CaptureError(f"some of its parameters are not on {state.device}")
    inputs = _UpdateInputs(state, capturable, copies)
    code = capture_update.__code__
    with StateBeforeCapture(state) as before, inputs.in_place():
        graph, _ = state.device.capture(
            lambda: trials.record(key, code, step, inputs.tensors), pool
        )
        if before.optimizer_changed():
            graph.close()
            raise CaptureError("its step makes new state each time")
    capturable.plain_groups()
    return CapturedUpdate(key, graph, inputs, state.tensors())


class CapturedUpdate:
    """A step as a graph. `uses` are tensors that must live as long."""

    def __init__(
        self, key: Hashable, graph: Graph, inputs: _UpdateInputs, uses: list[torch.Tensor]
    ) -> None:
        self.key, self.inputs = key, inputs
        self._graph, self._uses = graph, uses

    def replay(self) -> None:
        self.inputs.write()
        self._graph.replay()

    def close(self) -> None:
        self._graph.close()


class _UpdateInputs:
    """What changes from step to step, in memory of its own that graphs read: learning rates, what a
    gradient scaler gives, and `copies` of the gradients."""

    def __init__(
        self, state: StepState, capturable: CapturableOptimizer, copies: GradientCopies | None
    ) -> None:
        self._state, self._rates, self._copies = state, capturable.rates, copies
        (self._optimizer,) = state.optimizers
        self._of_scaler = {
            name: getattr(self._optimizer, name).clone()
            for name in SCALER_INPUTS
            if getattr(self._optimizer, name, None) is not None
        }
        if copies is not None:
            copies.make(self._gradients())

    def _gradients(self) -> list[torch.Tensor | None]:
        return [one.grad for one in self._state.updated()]

    def tensors(self) -> list[torch.Tensor]:
        """All memory that a step uses: this, and what it finds where it was."""
        rates = [] if self._rates is None else self._rates.tensors()
        gradients = (one for one in self._gradients() if one is not None)
        return [*self._state.tensors(), *rates, *self._of_scaler.values(), *gradients]

    def write(self) -> None:
        """Bring it up to date."""
        if self._rates is not None:
            self._rates.write()
        for name, one in self._of_scaler.items():
            one.copy_(getattr(self._optimizer, name))
        if self._copies is not None:
            self._copies.write()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Write it. In the block the optimizer is capturable and has it."""
        self.write()
        with ExitStack() as stack:
            stack.enter_context(_capturable_groups(self._optimizer))
            if self._rates is not None:
                stack.enter_context(self._rates.in_param_groups())
            stack.enter_context(_attributes(self._optimizer, self._of_scaler))
            if self._copies is not None:
                stack.enter_context(self._copies.in_place(self._gradients()))
            yield


@contextmanager
def _attributes(
    optimizer: torch.optim.Optimizer, values: dict[str, torch.Tensor]
) -> Iterator[None]:
    """In the block the optimizer has these attributes."""
    theirs = {name: getattr(optimizer, name) for name in values}
    try:
        for name, one in values.items():
            setattr(optimizer, name, one)
        yield
    finally:
        for name, one in theirs.items():
            setattr(optimizer, name, one)


@contextmanager
def _capturable_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """In the block, all groups that know the setting are capturable."""
    before = [(group, group["capturable"]) for group in optimizer.param_groups
              if "capturable" in group]  # fmt: skip
    try:
        for group, _ in before:
            group["capturable"] = True
        yield
    finally:
        for group, value in before:
            group["capturable"] = value
