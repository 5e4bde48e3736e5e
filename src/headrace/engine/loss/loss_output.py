"""What a loss function has returned, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.capture import map_tensors
from headrace.device import Device
from headrace.engine.values.arrived import Scalar
from headrace.errors import StepError


@dataclass(slots=True)
class LossOutput:
    """What a loss function has returned for a batch.

    `loss` is a mean. `weight` is how many samples or tokens it is a mean over; 1 if the function
    returned none, and then `weighted` is False. `values` has the numbers it returned, `outputs` the
    tensors that stay on the device. `carried` is the state for the next batch, if there is a
    `carry`. `counts` is False for a zero-weight batch, which this rank repeats because only other
    ranks have more.
    """

    loss: torch.Tensor
    weight: Scalar
    weighted: bool
    values: dict[str, Scalar]
    counts: bool = True
    outputs: Any = None
    carried: Any = None

    @classmethod
    def of(
        cls, returned: object, device: Device, *, needs_grad: bool, by: str = "the loss function"
    ) -> LossOutput:
        """Check what a function returned. Raises `StepError` if it has no valid loss. `by` names
        the function in messages."""
        if isinstance(returned, torch.Tensor):
            _check_loss(returned, device, needs_grad, by)
            return cls(returned, 1, False, {"loss": returned})
        # Check for a dict first: nearly all are one, and the check for Mapping is slower.
        if not isinstance(returned, (dict, Mapping)) or "loss" not in returned:
            raise StepError(f"{by} returned {_why_no_loss(returned)}")
        values: dict[str, Any] = dict(returned)
        outputs = values.pop("outputs", None)
        _check_loss(values["loss"], device, needs_grad, by)
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise StepError(
                    f"{by} returned {name!r}, which has shape {tuple(value.shape)}: expected a "
                    "single number, as for every metric. Return its mean, or return it under "
                    "'outputs', which stay on the device"
                )
            if not isinstance(value, _NUMBERS):
                raise StepError(
                    f"{by} returned {name!r}, which is a {type(value).__name__}: expected a number"
                )
        loss, weight, weighted = values["loss"], values.get("weight", 1), "weight" in values
        if outputs is not None:
            outputs = map_tensors(torch.Tensor.detach, outputs)
        return cls(loss, weight, weighted, values, outputs=outputs)

    def numbers(self) -> dict[str, float]:
        """The values that are Python numbers instead of tensors."""
        return {
            name: float(value)
            for name, value in self.values.items()
            if not isinstance(value, torch.Tensor)
        }

    def zero_weight(self) -> LossOutput:
        """A copy that does not count: its weight is 0."""
        values = {**self.values, "weight": 0}
        return replace(self, weight=0, counts=False, values=values, outputs=None, carried=None)

    def unaliased(self) -> LossOutput:
        """A copy whose values and outputs share no memory with the model: they are read after the
        update, and may be views of a weight. Values that autograd has computed are new memory."""
        copies = {
            name: value.detach().clone()
            for name, value in self.values.items()
            if isinstance(value, torch.Tensor) and (value.is_leaf or value._is_view())
        }
        if not copies and self.outputs is None:
            return self
        outputs = None if self.outputs is None else map_tensors(torch.clone, self.outputs)
        return replace(self, values={**self.values, **copies}, outputs=outputs)

    def detached_copy(self) -> LossOutput:
        """A copy outside the autograd graph. Only its `carried` is not copied."""
        values = {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in self.values.items()
        }
        outputs = map_tensors(torch.clone, self.outputs)
        return replace(self, loss=self.loss.detach(), values=values, outputs=outputs)


# A tuple, made once: a union is made anew, and asked more slowly, for every value of a batch.
_NUMBERS = (torch.Tensor, int, float)
_EXPECTED = "expected a 0-dim tensor, or a dict whose 'loss' is one"


def _why_no_loss(returned: object) -> str:
    """What was returned instead of a loss, what was expected, and what to write."""
    if isinstance(returned, bool | int | float):
        return (
            f"the number {returned!r}: {_EXPECTED}. Return the loss without .item(): the engine "
            "needs the tensor for backward(), and reads its value later, without a wait"
        )
    if isinstance(returned, tuple | list):
        kinds = ", ".join(type(one).__name__ for one in returned[:4])
        return (
            f"a {type(returned).__name__} of {len(returned)} ({kinds}): {_EXPECTED}. To return "
            'more than a loss, return a dict such as {"loss": loss, "accuracy": accuracy}, whose '
            "other values are single numbers; to carry a state to the next batch, give the engine "
            "`carry`"
        )
    if isinstance(returned, Mapping):
        names = ", ".join(str(name) for name in returned) or "nothing"
        return (
            f"a dict without 'loss' (it has {names}): {_EXPECTED}. Name the loss 'loss'; the other "
            "values are reported as metrics"
        )
    if returned is None:
        return f"None: {_EXPECTED}. Is its return statement missing?"
    return f"{str(returned)[:200]} (a {type(returned).__name__}): {_EXPECTED}"


def _check_loss(loss: object, device: Device, needs_grad: bool, by: str) -> None:
    if not isinstance(loss, torch.Tensor):
        number = " (return it without .item())" if isinstance(loss, int | float) else ""
        raise StepError(
            f"{by} returned a loss that is a {type(loss).__name__}: expected a 0-dim tensor{number}"
        )
    if loss.dim() != 0:
        raise StepError(
            f"{by} returned a loss that has shape {tuple(loss.shape)}: expected a single number "
            "(reduce it with .mean())"
        )
    if not device.holds(loss):
        raise StepError(f"{by} returned a loss that is on {loss.device}: expected it on {device}")
    if needs_grad and not loss.requires_grad:
        raise StepError(
            f"{by} returned a loss that does not require grad, so backward() cannot work: is every "
            "parameter frozen, or the loss detached (.detach(), .item(), torch.no_grad())?"
        )
