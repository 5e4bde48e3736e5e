"""The total weight of an accumulation group, summed on the device and over all ranks."""

from __future__ import annotations

import torch

from headrace.device import Device
from headrace.engine.values.arrived import Scalar
from headrace.parallel import AllReduce, Ranks


class GroupWeight:
    """The divisor of a group's gradients (of loss × weight), as a tensor on the device."""

    def __init__(self, device: Device, ranks: Ranks) -> None:
        self._device, self._ranks = device, ranks
        self.value: torch.Tensor | None = None
        self._total: AllReduce | None = None

    def add(self, weight: Scalar) -> None:
        if self.value is None:
            # float64 keeps sums of token counts exact. MPS has none.
            kind = self._device.torch_device.type
            dtype = torch.float32 if kind == "mps" else torch.float64
            self.value = torch.zeros((), dtype=dtype, device=self._device.torch_device)
        if isinstance(weight, torch.Tensor):
            weight = weight.detach().reshape(())
        self.value.add_(weight)

    def set(self, weight: torch.Tensor | None) -> None:
        if self.value is None or weight is None:
            self.value = weight
        else:
            self.value.copy_(weight)

    def clear(self, *, forget: bool) -> None:
        """Set the weight to 0. With `forget`, also free its tensor."""
        if forget:
            self.value = None
        elif self.value is not None:
            self.value.zero_()

    # --- over ranks -------------------------------------------------------------------------------

    def start_total(self) -> None:
        """Start to sum the weight over all ranks, beside the backward of the group's last batch."""
        if self._ranks.several and self.value is not None:
            self._total = self._ranks.all_reduce(self.value)

    def total(self) -> torch.Tensor:
        """What to divide the gradients by: the mean weight over ranks, since the gradients are
        means over ranks too."""
        assert self.value is not None
        total, self._total = self._total, None
        if total is None:
            return self.value
        total.wait(self._device.ledger, "ranks")
        return self.value / self._ranks.size

    def drop_total(self) -> None:
        """Forget a sum that an error has interrupted."""
        self._total = None
