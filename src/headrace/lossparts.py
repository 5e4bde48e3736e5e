"""What a loss function returned, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from headrace.deferred import Scalar
from headrace.device import Device
from headrace.errors import StepError


@dataclass(slots=True)
class LossParts:
    """The loss (a mean), what it is a mean over (1 where it was not said), and all values.

    `counts` is False for a batch that stands in for one that only other ranks have.
    """

    loss: torch.Tensor
    weight: Scalar
    weighted: bool
    values: dict[str, Scalar]
    counts: bool = True

    @classmethod
    def of(cls, returned: object, device: Device, *, needs_grad: bool) -> LossParts:
        if isinstance(returned, torch.Tensor):
            _check_loss(returned, device, needs_grad)
            return cls(returned, 1, False, {"loss": returned})
        if not isinstance(returned, Mapping) or "loss" not in returned:
            found = f"a dict with {sorted(returned)}" if isinstance(returned, Mapping) else returned
            raise StepError(
                f"the loss function returned {str(found)[:200]}: expected a 0-dim tensor, or a "
                "dict whose 'loss' is one"
            )
        values = dict(returned)
        _check_loss(values["loss"], device, needs_grad)
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise StepError(
                    f"{name!r} has shape {tuple(value.shape)}: expected a single number"
                )
            if not isinstance(value, torch.Tensor | int | float):
                raise StepError(f"{name!r} is a {type(value).__name__}: expected a number")
        return cls(values["loss"], values.get("weight", 1), "weight" in values, values)

    def without_weight(self) -> LossParts:
        """The same, counting for nothing."""
        return replace(self, weight=0, counts=False)


def _check_loss(loss: object, device: Device, needs_grad: bool) -> None:
    if not isinstance(loss, torch.Tensor):
        raise StepError(f"the loss is a {type(loss).__name__}: expected a 0-dim tensor")
    if loss.dim() != 0:
        raise StepError(
            f"the loss has shape {tuple(loss.shape)}: expected a single number "
            "(reduce it with .mean())"
        )
    if not device.holds(loss):
        raise StepError(f"the loss is on {loss.device}: expected it on {device}")
    if needs_grad and not loss.requires_grad:
        raise StepError(
            "the loss needs no grad, so backward() would do nothing: is every parameter "
            "frozen, or the loss detached?"
        )
