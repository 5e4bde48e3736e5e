"""Deferred values of several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.device import Device
from headrace.engine.values.arrived import DeferredValues, Scalar
from headrace.engine.values.deferred import DeferredScalars
from headrace.errors import StepError


class SummedScalars(DeferredScalars):
    """Deferred scalars of several ranks: each value is the mean over all of them, by weight."""

    def add(self, step: int, values: Scalar | Mapping[str, Scalar]) -> None:
        named = values if isinstance(values, Mapping) else {"loss": values}
        super().add(step, _weighted(named, self._device))

    def ready(self) -> list[DeferredValues]:  # `drain` returns these, too
        return [_means(summed) for summed in super().ready()]

    def state(self) -> list[dict[str, Any]]:
        if self.pending:
            raise StepError(
                "values of earlier batches are not summed over ranks yet: expected a call of "
                "engine.settle() on all ranks before engine.state_dict()"
            )
        return []


def _weighted(values: Mapping[str, Scalar], device: Device) -> dict[str, torch.Tensor]:
    """What ranks sum to get means by weight: each value times its weight, and the weight."""
    dtype = torch.float32 if device.torch_device.type == "mps" else torch.float64

    def number(value: Scalar) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.detach().to(dtype).reshape(())
        return torch.full((), float(value), dtype=dtype, device=device.torch_device)

    total = number(values.get("weight", 1))
    numbers = {name: number(value) for name, value in values.items() if name != "weight"}
    # The loss of a batch of weight 0 is often 0/0.
    shares = {name: torch.where(total > 0, one * total, 0.0) for name, one in numbers.items()}
    return shares | {"weight": total}


def _means(summed: DeferredValues) -> DeferredValues:
    """The means by weight, from the sums over ranks."""
    weight = summed.values["weight"]
    values = {
        name: value / weight if weight and name != "weight" else value
        for name, value in summed.values.items()
    }
    return DeferredValues(summed.step, values)
