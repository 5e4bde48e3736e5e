"""An exponential moving average of a model's weights, updated on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headrace.errors import StepError
from headrace.parallel import is_sharded, local_shards, reshard, shard_like


class Ema:
    """Averaged copies of a model's parameters, each moved a little towards its weight a step:
    average ← average + (1 − decay) × (weight − average).

    PyTorch's own `AveragedModel` reads a counter back from the device at each update; this does
    not. Buffers (running means and such) are taken as they are when the averages are used. Of a
    sharded model each rank averages its shards.
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise StepError(f"ema_decay = {decay!r}: expected a number from 0 to below 1")
        self.decay = decay
        self._model = model
        self.weights: list[torch.Tensor] = [p for p in model.parameters() if p.is_floating_point()]
        self._is_sharded = any(map(is_sharded, self.weights))
        self.averages = [weight.detach().clone() for weight in self._locals()]

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the weights. To be called after each optimizer step."""
        torch._foreach_lerp_(self.averages, self._locals(), 1 - self.decay)

    def state(self) -> list[torch.Tensor]:
        """The averages, sharded as the weights are."""
        return [
            shard_like(weight, average) if is_sharded(weight) else average
            for weight, average in zip(self.weights, self.averages, strict=True)
        ]

    @contextmanager
    def applied(self) -> Iterator[torch.nn.Module]:
        """Inside the block the model has the averaged weights; after it, its own again."""
        own = [weight.detach().clone() for weight in self._locals()]
        self._set(self.averages)
        try:
            yield self._model
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, values: list[torch.Tensor]) -> None:
        reshard(self._model)
        torch._foreach_copy_(self._locals(), values)

    def _locals(self) -> list[torch.Tensor]:
        """This rank's parts of the weights, where they lie now: FSDP2 may move them once, when it
        first runs (it does in PyTorch 2.9)."""
        return local_shards(self.weights) if self._is_sharded else self.weights
