"""The update at a group's end: divide, clip, scale, step, average. No host wait among them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from headrace.device import Device
from headrace.engine.clipping import Clipping
from headrace.engine.ema import Ema
from headrace.engine.group import Group
from headrace.engine.learning_rates import LearningRates
from headrace.engine.nonfinite import UpdateGuard
from headrace.parallel import Ranks, local_shards


class Update:
    """Uses a group's gradients, all on the device. `guard` keeps updates that are not finite from
    being made; with fp16 the `scaler` does."""

    def __init__(
        self,
        device: Device,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        clipping: Clipping | None,
        *,
        scaler: torch.amp.GradScaler | None,
        guard: UpdateGuard | None,
        ema: Ema | None,
    ) -> None:
        self._device, self.optimizer, self._ranks = device, optimizer, ranks
        self.clipping, self.scaler, self.guard, self.ema = clipping, scaler, guard, ema
        #: Where the optimizer's rates are read from on the device; None: they are Python numbers.
        self.rates: LearningRates | None = None

    def write_rates(self) -> None:
        """Before an update, on the stream that runs it."""
        if self.rates is not None:
            self.rates.write()

    def scaled(self, target: torch.Tensor) -> torch.Tensor:
        """What backward begins at."""
        return target if self.scaler is None else self.scaler.scale(target)

    def __call__(self, group: Group) -> None:
        group.divide()
        norm = None
        if self.clipping is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            norm = self.clipping.clip(divided=group.weighs or group.parted)
        if self.guard is not None:
            self.guard.see_gradients(local_shards(group.gradients()), norm, self._ranks)
        if self.rates is None:
            self._step()
        else:
            with self.rates.in_groups():
                self._step()
        group.clear()
        if self.ema is not None:
            self.ema.update()

    def _step(self) -> None:
        if self.guard is not None:
            with self.guard.before(self.optimizer) as is_open:
                if is_open:
                    self.optimizer.step()
        elif self.scaler is None:
            self.optimizer.step()
        else:
            # Only fused optimizers keep "was there an infinity" on the device; others read it.
            fused = self.scales_on_device
            with nullcontext() if fused else self._device.ledger.waiting("fp16_found_inf"):
                self.scaler.step(self.optimizer)
            self.scaler.update()

    @property
    def scales_on_device(self) -> bool:
        return scales_on_device(self.optimizer)

    def forget_failed(self) -> None:
        """What a batch that failed has left behind."""
        if self.guard is not None:
            self.guard.forget()
        if self.scaler is not None:  # it may have unscaled what was never used
            self.scaler._per_optimizer_states.clear()

    def own_tensors(self) -> list[torch.Tensor]:
        """What an update reads that is neither the model's nor the optimizer's."""
        found: list[torch.Tensor] = [] if self.guard is None else self.guard.tensors()
        scale: Any = None if self.scaler is None else self.scaler._scale
        return found if scale is None else [*found, scale]


def scales_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer reads the loss scale, and "leave this update out", on the device, as
    fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
