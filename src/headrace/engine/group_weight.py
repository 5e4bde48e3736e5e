"""What an accumulation group weighs: its batches' weights, summed on the device, over all ranks."""

from __future__ import annotations

import torch

from headrace.device import Device
from headrace.engine.deferred import Scalar
from headrace.parallel import AllReduce, Ranks


class GroupWeight:
    """A number on the device, which is what the gradients of loss × weight are divided by."""

    def __init__(self, device: Device, ranks: Ranks) -> None:
        self._device, self._ranks = device, ranks
        self.value: torch.Tensor | None = None
        self._total: AllReduce | None = None

    def add(self, weight: Scalar) -> None:
        if self.value is None:
            # In double precision where there is one: sums of token counts stay exact.
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
        """Begin with nothing; with `forget`, also without a place for it."""
        if forget:
            self.value = None
        elif self.value is not None:
            self.value.zero_()

    # --- over ranks -------------------------------------------------------------------------------

    def start_total(self) -> None:
        """Sum it over all ranks, while the group's last batch goes backward."""
        if self._ranks.several and self.value is not None:
            self._total = self._ranks.all_reduce(self.value)

    def total(self) -> torch.Tensor:
        """What gradients are to be divided by: over ranks they are means, not sums."""
        assert self.value is not None
        total, self._total = self._total, None
        if total is None:
            return self.value
        total.wait(self._device.ledger, "ranks")
        return self.value / self._ranks.size

    def lose_total(self) -> None:
        """After an error."""
        self._total = None
