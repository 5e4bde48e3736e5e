"""What a workload returns: the parts of a training loop, in one of four forms.

return model, optimizer, loss, loader           # loss(model, batch) -> loss
return model, optimizer, loss, loader, carry    # loss(model, batch, carried) -> (loss, carried)
return step, loader                             # step(batch): forward, backward and update
return step, loader, carry                      # step(batch, carried) -> (result, carried)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from headrace.capture import StepState
from headrace.data import flatten_batch, rebuild_batch
from headrace.device import Device
from headrace.engine import Carry, Engine, LossFunction
from headrace.errors import BenchError
from headrace.plan import Plan


class ModelTraining(NamedTuple):
    """A model, its optimizer and loss function, and a loader that each epoch iterates anew. With a
    `carry`, the loss function carries state from batch to batch; that is the first state."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: LossFunction
    loader: Iterable[Any]
    carry: Any = None

    def on(self, device: Device) -> ModelTraining:
        """The same on a device, in training mode."""
        self.model.to(device.torch_device)
        self.model.train()
        if isinstance(self.loss, torch.nn.Module):
            self.loss.to(device.torch_device)
        return self._replace(carry=_carry_on(device, self.carry))

    def engine(self, device: Device, plan: Plan, *, deterministic: bool) -> Engine:
        return Engine(
            self.model,
            self.optimizer,
            self.loss,
            plan=plan,
            device=device,
            carry=self.carry,
            deterministic=deterministic,
        )


class StepTraining(NamedTuple):
    """A step of the user's own: forward, backward and update of any number of models."""

    step: Callable[..., Any]
    loader: Iterable[Any]
    carry: Any = None

    def on(self, device: Device) -> StepTraining:
        """The same, with the modules that the step uses on a device. Their mode stays."""
        for module in self.state(device).modules:
            module.to(device.torch_device)
        return self._replace(carry=_carry_on(device, self.carry))

    def engine(self, device: Device, plan: Plan, *, deterministic: bool) -> Engine:
        self.require_precision(plan.precision)
        return Engine.from_step(
            self.step, plan=plan, device=device, carry=self.carry, deterministic=deterministic
        )

    def require_precision(self, precision: str | None) -> None:
        """Raise unless a step can run in this precision, which the plan or `--precision` sets."""
        if precision in ("bf16", "fp16"):
            raise BenchError(
                f"precision = {precision!r}, but the workload returns a step of its own, in which "
                "Headrace cannot set it: expected fp32 or tf32, or none. Write torch.autocast "
                "into the step"
            )

    def state(self, device: Device) -> StepState:
        """The modules and optimizers that the step uses."""
        return StepState.find(device, self.step)


Made = ModelTraining | StepTraining


def _carry_on(device: Device, carry: Any) -> Any:
    """The first state, on a device. A function that makes it from a batch stays as it is."""
    if isinstance(carry, Carry):
        return replace(carry, initial=_carry_on(device, carry.initial))
    if carry is None or callable(carry):
        return carry
    return rebuild_batch(carry, [leaf.to(device.torch_device) for leaf in flatten_batch(carry)])
