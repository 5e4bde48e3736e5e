"""The update at the end of a group: divide, clip, step and average, without a host wait."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from headrace.capture import LearningRates, scales_on_device
from headrace.device import Device
from headrace.engine.update.clipping import Clipping
from headrace.engine.update.ema import Ema
from headrace.engine.update.group import Group
from headrace.engine.update.nonfinite import UpdateGuard
from headrace.parallel import Ranks, local_shards


class Update:
    """Updates the weights with a group's gradients. The `guard` skips updates that are not finite;
    with fp16 the `scaler` does."""

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
        #: The learning rates as device tensors, for graphs; None: they are Python numbers.
        self.rates: LearningRates | None = None

    def write_rates(self) -> None:
        """Bring `rates` up to date. Call it before an update, on the stream that runs it."""
        if self.rates is not None:
            self.rates.write()

    def use_rates(self, rates: LearningRates | None) -> None:
        """Read the learning rates from the device; None: from the parameter groups."""
        self.rates = rates

    def scale(self, target: torch.Tensor) -> torch.Tensor:
        """The loss times the scaler's factor, if there is a scaler."""
        return target if self.scaler is None else self.scaler.scale(target)

    def __call__(self, group: Group) -> None:
        group.divide()
        norm = None
        if self.clipping is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            norm = self.clipping.clip(divided=group.by_weight or group.has_split_batch)
        if self.guard is not None:
            self.guard.check_gradients(local_shards(group.gradients()), norm, self._ranks)
        if self.rates is None:
            self._step()
        else:
            with self.rates.in_param_groups():
                self._step()
        group.clear()
        if self.ema is not None:
            self.ema.update()

    def _step(self) -> None:
        if self.guard is not None:
            with self.guard.applied_to(self.optimizer) as steps:
                if steps:
                    self.optimizer.step()
        elif self.scaler is None:
            self.optimizer.step()
        else:
            # Unless the optimizer is fused, `scaler.step` reads on the host whether a gradient is
            # infinite: a wait.
            fused = self.scales_on_device
            with nullcontext() if fused else self._device.ledger.waiting("fp16_found_inf"):
                self.scaler.step(self.optimizer)
            self.scaler.update()

    @property
    def scales_on_device(self) -> bool:
        return scales_on_device(self.optimizer)

    def clear_failed(self) -> None:
        """Clear what a failed batch or update has left."""
        if self.guard is not None:
            self.guard.forget()
        if self.scaler is not None:  # it may have unscaled gradients that were never used
            self.scaler._per_optimizer_states.clear()

    def own_tensors(self) -> list[torch.Tensor]:
        """The engine's own tensors that an update reads (not the model's or optimizer's)."""
        found: list[torch.Tensor] = [] if self.guard is None else self.guard.tensors()
        scale: Any = None if self.scaler is None else self.scaler._scale
        return found if scale is None else [*found, scale]
