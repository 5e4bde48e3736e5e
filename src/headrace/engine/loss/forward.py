"""Calls the loss function in the plan's precision, and checks what it returns.

`loss(model, batch)` returns a tensor, or a dict with `loss` (a mean), optionally `weight` (how many
samples or tokens the mean is over), metrics and `outputs`. With a `carry` it is called as
`loss(model, batch, carried)` and returns a tuple of that and the state for the next batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from headrace.data import batch_leaves
from headrace.device import Device
from headrace.engine.loss.carried_state import CarriedState
from headrace.engine.loss.loss_output import LossOutput
from headrace.engine.loss.loss_watch import call_watched
from headrace.errors import StepError
from headrace.parallel import set_gradient_sync, unwrap
from headrace.source_lines import describe_function

LossFunction = Callable[..., Any]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Forward:
    """Computes a batch's loss. `user_loss` is the loss function as the user wrote it; `loss` is the
    same function or its compiled form. `distributed`: the model is wrapped in DDP or FSDP2.
    `carry` is the state that training carries from batch to batch."""

    def __init__(
        self,
        device: Device,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        *,
        user_loss: LossFunction,
        precision: str | None,
        distributed: bool,
        carry: CarriedState | None,
    ) -> None:
        self._device, self.model, self._optimizer = device, model, optimizer
        self.loss, self._user_loss = loss, user_loss
        self._name = f"the loss function {describe_function(user_loss)}"
        self._distributed, self.carry = distributed, carry
        self._autocast = autocast(device, precision)  # entered for each batch, never inside itself
        self._batches_to_watch = 0

    def watch(self, batches: int) -> None:
        """Check that the loss function, on the next `batches` batches, leaves `backward()`,
        `optimizer.step()` and scaling to the engine."""
        self._batches_to_watch = batches

    def evaluate(self, batch: Any, carry: CarriedState | None) -> LossOutput:
        """Compute the loss without gradients and without the other ranks. `carry` is the state that
        this evaluation carries from batch to batch."""
        with self._autocast:
            return self._output(self.loss, unwrap(self.model), batch, carry, needs_grad=False)

    def __call__(self, batch: Any, *, averages: bool = True) -> LossOutput:
        """Compute the loss. `averages`: its backward averages gradients over ranks, instead of only
        adding them up on this rank."""
        if self._distributed:
            set_gradient_sync(self.model, averages)
        with self._autocast:
            if self._batches_to_watch:
                self._batches_to_watch -= 1
                require_tensor(batch)
                loss = partial(
                    call_watched,
                    self.loss,
                    device=self._device,
                    optimizer=self._optimizer,
                    user_loss=self._user_loss,
                )
                return self._output(loss, self.model, batch, self.carry, needs_grad=True)
            return self._output(self.loss, self.model, batch, self.carry, needs_grad=True)

    def _output(
        self,
        loss: LossFunction,
        model: torch.nn.Module,
        batch: Any,
        carry: CarriedState | None,
        *,
        needs_grad: bool,
    ) -> LossOutput:
        if carry is None:
            returned, carried = loss(model, batch), None
        else:
            returned, carried = carry.call(loss, self._name, batch, model, batch)
        output = LossOutput.of(returned, self._device, needs_grad=needs_grad, by=self._name)
        return output if carried is None else replace(output, carried=carried)


def require_tensor(batch: Any) -> None:
    """Raise `StepError` if a loop's first batch has no tensor."""
    if next(batch_leaves(batch), None) is None:
        raise StepError(
            f"batch 0 (a {type(batch).__name__}) holds no tensor: expected tensors, in any nesting "
            "of tuples, dicts and dataclasses"
        )


def autocast(device: Device, precision: str | None) -> AbstractContextManager[object]:
    """`torch.autocast` for the precisions bf16 and fp16; for others, a context without effect."""
    dtype = None if precision is None else _AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.torch_device.type, dtype)
