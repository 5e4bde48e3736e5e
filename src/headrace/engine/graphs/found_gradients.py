"""The gradients that a call finds, and what becomes of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from headrace.capture import Storage, storages


class FoundGradients:
    """The gradients that a call finds, and what becomes of them, by the parameter's position."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._entry = {
            at: (p, p.grad, p.grad._version)
            for at, p in enumerate(parameters)
            if p.grad is not None
        }
        self.tensors = [gradient for _, gradient, _ in self._entry.values()]
        self._seen_by_optimizer: set[int] = set()

    def seen_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Call before an optimizer's step."""
        seen = {id(p.grad) for group in optimizer.param_groups for p in group["params"]}
        self._seen_by_optimizer |= {
            at for at, (_, gradient, _) in self._entry.items() if id(gradient) in seen
        }

    def fates(self, touched: set[Storage]) -> GradientFates:
        """Call after the call. `touched` is all memory that its operations had as arguments."""
        used = {
            at
            for at, (_, gradient, version) in self._entry.items()
            if at in self._seen_by_optimizer
            or gradient._version != version
            or storages([gradient]) & touched
        }
        stays = {at for at, (p, gradient, _) in self._entry.items() if p.grad is gradient}
        return GradientFates(frozenset(used), frozenset(stays - used))


@dataclass(frozen=True, slots=True)
class GradientFates:
    """What a call does with the gradients that it finds: it has `used` some, and has left others as
    they were (`kept`). The rest it has dropped unread, as `zero_grad()` does."""

    used: frozenset[int]
    kept: frozenset[int]
