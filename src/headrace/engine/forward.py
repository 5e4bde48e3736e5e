"""Calls the loss function in the plan's precision, and checks what it returns.

`loss(model, batch)` returns a tensor, or a dict with `loss` (a mean), optionally `weight` (how many
samples or tokens the mean is over) and metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from headrace.data import batch_leaves
from headrace.device import Device
from headrace.engine.deferred import Scalar
from headrace.engine.loss_output import LossOutput
from headrace.engine.loss_watch import call_watched
from headrace.errors import StepError
from headrace.parallel import set_gradient_sync, unwrap
from headrace.source_lines import describe_function

LossFunction = Callable[[Any, Any], torch.Tensor | Mapping[str, Scalar]]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Forward:
    """Computes a batch's loss. `user_loss` is the loss function as the user wrote it; `loss` is the
    same function or its compiled form. `distributed`: the model is wrapped in DDP or FSDP2."""

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
    ) -> None:
        self._device, self.model, self._optimizer = device, model, optimizer
        self.loss, self._user_loss, self._precision = loss, user_loss, precision
        self._name = f"the loss function {describe_function(user_loss)}"
        self._distributed = distributed
        self._batches_to_watch = 0

    def watch(self, batches: int) -> None:
        """Check that the loss function, on the next `batches` batches, leaves `backward()`,
        `optimizer.step()` and scaling to the engine."""
        self._batches_to_watch = batches

    def evaluate(self, batch: Any) -> LossOutput:
        """Compute the loss without gradients and without the other ranks."""
        with autocast(self._device, self._precision):
            returned = self.loss(unwrap(self.model), batch)
        return LossOutput.of(returned, self._device, needs_grad=False, by=self._name)

    def __call__(self, batch: Any, *, averages: bool = True) -> LossOutput:
        """Compute the loss. `averages`: its backward averages gradients over ranks, instead of only
        adding them up on this rank."""
        if self._distributed:
            set_gradient_sync(self.model, averages)
        with autocast(self._device, self._precision):
            if self._batches_to_watch:
                self._batches_to_watch -= 1
                require_tensor(batch)
                returned = call_watched(
                    self.loss,
                    self.model,
                    batch,
                    device=self._device,
                    optimizer=self._optimizer,
                    user_loss=self._user_loss,
                )
            else:
                returned = self.loss(self.model, batch)
        return LossOutput.of(returned, self._device, needs_grad=True, by=self._name)


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
