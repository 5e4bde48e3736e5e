"""Learning rates as device tensors, because a graph would repeat a Python number forever.

Schedulers still write Python numbers into the optimizer's parameter groups, so their arithmetic is
as exact as in any loop. Before each step, the host writes the numbers that have changed into the
tensors, on the stream that runs the step. The parameter groups hold the tensors only while the
optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headrace.device import Device


class LearningRates:
    """An optimizer's learning rates as device tensors, one per parameter group."""

    def __init__(self, device: Device, optimizer: torch.optim.Optimizer) -> None:
        self._device = device
        self._optimizer = optimizer
        self._tensors: list[torch.Tensor] = []
        self._written: list[float | None] = []

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups  # another list after load_state_dict

    def write(self) -> None:
        """Write the rates that have changed into the tensors, on the stream that runs the step."""
        del self._tensors[len(self._groups) :], self._written[len(self._groups) :]
        for group in self._groups[len(self._tensors) :]:
            self._tensors.append(self._tensor_for(group))
            self._written.append(None)
        for at, group in enumerate(self._groups):
            rate, tensor = group["lr"], self._tensors[at]
            if rate is tensor:
                self._written[at] = None
            elif isinstance(rate, torch.Tensor) and self._device.holds(rate):
                tensor.copy_(rate)
                self._written[at] = None
            elif (number := float(rate)) != self._written[at]:
                tensor.fill_(number)
                self._written[at] = number

    def tensors(self) -> list[torch.Tensor]:
        """The rates on the device."""
        return list(self._tensors)

    @contextmanager
    def in_param_groups(self) -> Iterator[None]:
        """Inside the block the parameter groups hold the tensors; after it, the numbers again."""
        numbers = [group["lr"] for group in self._groups]
        try:
            for group, tensor in zip(self._groups, self._tensors, strict=True):
                group["lr"] = tensor
            yield
        finally:
            for group, number in zip(self._groups, numbers, strict=True):
                group["lr"] = number

    def _tensor_for(self, group: dict[str, Any]) -> torch.Tensor:
        rate = group["lr"]
        if isinstance(rate, torch.Tensor) and self._device.holds(rate):
            return rate  # the user's own tensor, which its scheduler changes in place
        # The dtype in which the device's fused kernels compute: another one would round the rate.
        dtype = torch.float64 if self._device.torch_device.type == "cpu" else torch.float32
        return torch.zeros((), dtype=dtype, device=self._device.torch_device)
