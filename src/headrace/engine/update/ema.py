"""An exponential moving average of a model's weights, updated on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headrace.errors import StepError
from headrace.parallel import is_sharded, local_shards, reshard, shard_like


class Ema:
    """Averaged copies of a model's parameters. After each update, every average moves towards its
    weight: average ← average + (1 − decay) × (weight − average).

    Unlike PyTorch's `AveragedModel`, it reads no counter from the device, so it never waits.
    Buffers (such as running means) are not averaged. If the model is sharded, each rank averages
    its shards.
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise StepError(f"ema_decay = {decay!r}: expected a number from 0 to below 1")
        self.decay = decay
        self._model = model
        self.weights: list[torch.Tensor] = [p for p in model.parameters() if p.is_floating_point()]
        self._is_sharded = any(map(is_sharded, self.weights))
        self.averages = [weight.detach().clone() for weight in self._local_weights()]

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the weights. The engine calls it after each update."""
        torch._foreach_lerp_(self.averages, self._local_weights(), 1 - self.decay)

    def state(self) -> list[torch.Tensor]:
        """The averages, sharded as the weights are."""
        return [
            shard_like(weight, average) if is_sharded(weight) else average
            for weight, average in zip(self.weights, self.averages, strict=True)
        ]

    @contextmanager
    def applied(self) -> Iterator[torch.nn.Module]:
        """Inside the block the model has the averaged weights; after it, its own weights again."""
        own = [weight.detach().clone() for weight in self._local_weights()]
        self._set(self.averages)
        try:
            yield self._model
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, values: list[torch.Tensor]) -> None:
        reshard(self._model)
        torch._foreach_copy_(self._local_weights(), values)

    def _local_weights(self) -> list[torch.Tensor]:
        """This rank's parts of the weights. Looked up each time, because FSDP2 may move them when
        it first runs (it does in PyTorch 2.9)."""
        return local_shards(self.weights) if self._is_sharded else self.weights
