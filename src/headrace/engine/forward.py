"""A model's loss on a batch: the loss function, called in the plan's precision and checked.

`loss(model, batch)` returns a tensor, or a dict with `loss` (a mean), optionally `weight` (what the
mean is over: tokens, say), and metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from headrace.data import batch_leaves
from headrace.device import Device
from headrace.engine.deferred import Scalar
from headrace.engine.loss_parts import LossParts
from headrace.engine.loss_watch import call_watched
from headrace.errors import StepError
from headrace.parallel import set_gradient_sync, unwrap
from headrace.source_lines import described

LossFunction = Callable[[Any, Any], torch.Tensor | Mapping[str, Scalar]]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Forward:
    """Computes a batch's loss. `written` is the loss function as the user wrote it; `loss` is the
    same, or that compiled."""

    def __init__(
        self,
        device: Device,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        *,
        written: LossFunction,
        precision: str | None,
        spread: bool,
    ) -> None:
        self._device, self.model, self._optimizer = device, model, optimizer
        self.loss, self._written, self._precision = loss, written, precision
        self._described = f"the loss function {described(written)}"
        self._spread = spread
        self._to_watch = 0

    def watch(self, batches: int) -> None:
        """Check the next calls of the loss function: it must leave `backward()`, `optimizer.step()`
        and scaling to the engine."""
        self._to_watch = batches

    def evaluated(self, batch: Any) -> LossParts:
        """The loss without gradients; no other rank is needed."""
        with autocast(self._device, self._precision):
            returned = self.loss(unwrap(self.model), batch)
        return LossParts.of(returned, self._device, needs_grad=False, by=self._described)

    def __call__(self, batch: Any, *, averages: bool = True) -> LossParts:
        """The loss, for a backward that `averages` gradients over ranks or adds them up here."""
        if self._spread:
            set_gradient_sync(self.model, averages)
        with autocast(self._device, self._precision):
            if self._to_watch:
                self._to_watch -= 1
                require_tensor(batch)
                returned = call_watched(
                    self.loss,
                    self.model,
                    batch,
                    device=self._device,
                    optimizer=self._optimizer,
                    written=self._written,
                )
            else:
                returned = self.loss(self.model, batch)
        return LossParts.of(returned, self._device, needs_grad=True, by=self._described)


def require_tensor(batch: Any) -> None:
    """Of a loop's first batch."""
    if next(batch_leaves(batch), None) is None:
        raise StepError(
            f"batch 0 (a {type(batch).__name__}) holds no tensor: expected tensors, in whatever "
            "nesting of tuples, dicts and dataclasses"
        )


def autocast(device: Device, precision: str | None) -> AbstractContextManager[object]:
    """Inside the block a model computes in bf16 or fp16, if that is the precision."""
    dtype = None if precision is None else _AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.torch_device.type, dtype)
