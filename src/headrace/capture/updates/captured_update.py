"""An optimizer's step as a graph, and how it is captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch

from headrace.capture.guards.obstacles import require_no_obstacle
from headrace.capture.state.capturable_optimizer import CapturableOptimizer
from headrace.capture.state.gradient_copies import GradientCopies
from headrace.capture.state.memory import StateBeforeCapture
from headrace.capture.state.state import StepState
from headrace.capture.state.update_memory import optimized
from headrace.device import Graph
from headrace.errors import CaptureError

#: What a gradient scaler gives a fused optimizer before each step.
SCALER_INPUTS = ("grad_scale", "found_inf")


def capture_update(
    state: StepState,
    capturable: CapturableOptimizer,
    pool: object,
    copies: GradientCopies | None,
) -> CapturedUpdate:
    """Capture an optimizer's step, which reads its gradients where they are, or their `copies`.
    Raises `CaptureError` if that cannot be done."""
    (optimizer,), step = state.optimizers, cast(Callable[[], Any], state.function)
    require_no_obstacle(state)
    if not all(map(state.device.holds, state.parameters())):
        raise CaptureError(f"some of its parameters are not on {state.device}")
    inputs = _ScalerInputs(optimizer)
    if capturable.rates is not None:
        capturable.rates.write()
    with ExitStack() as stack:
        before = stack.enter_context(StateBeforeCapture(state))
        stack.enter_context(_capturable_groups(optimizer))
        if capturable.rates is not None:
            stack.enter_context(capturable.rates.in_param_groups())
        stack.enter_context(inputs.in_place())
        if copies is not None:
            gradients = [one.grad for one in optimized(optimizer)]
            copies.make(gradients)
            stack.enter_context(copies.in_place(gradients))
        graph, _ = state.device.capture(step, pool)
        if before.optimizer_changed():
            graph.close()
            raise CaptureError("its step makes new state each time")
    capturable.plain_groups()
    return CapturedUpdate(graph, capturable, inputs, copies, state.tensors())


class CapturedUpdate:
    """A step as a graph, with the memory that it reads besides parameters and state."""

    def __init__(
        self,
        graph: Graph,
        capturable: CapturableOptimizer,
        inputs: _ScalerInputs,
        copies: GradientCopies | None,
        uses: list[torch.Tensor],
    ) -> None:
        self._graph = graph
        self._inputs = inputs
        self._copies = copies
        self._uses = uses
        self._rates = capturable.rates

    def replay(self, optimizer: torch.optim.Optimizer) -> None:
        if self._rates is not None:
            self._rates.write()
        self._inputs.write(optimizer)
        if self._copies is not None:
            self._copies.write()
        self._graph.replay()

    def close(self) -> None:
        self._graph.close()


class _ScalerInputs:
    """What a gradient scaler gives a fused optimizer before each step: new tensors every time."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._own = {
            name: getattr(optimizer, name).clone()
            for name in SCALER_INPUTS
            if getattr(optimizer, name, None) is not None
        }

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """In the block the optimizer has these tensors."""
        theirs = {name: getattr(self._optimizer, name) for name in self._own}
        try:
            for name, one in self._own.items():
                setattr(self._optimizer, name, one)
            yield
        finally:
            for name, one in theirs.items():
                setattr(self._optimizer, name, one)

    def write(self, optimizer: Any) -> None:
        for name, one in self._own.items():
            one.copy_(getattr(optimizer, name))


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
