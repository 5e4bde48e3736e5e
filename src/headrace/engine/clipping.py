"""Clipping gradients as `clip_grad_norm_(model.parameters(), most)` does, to the last bit.

The norm is a sum, so its order shows in the last bits: it is over `model.parameters()`, in their
order, then over parameters that only the optimizer has.

A model may have parameters that require gradients and that the optimizer was not given. In a loop
of `clip_grad_norm_(model.parameters(), most)`, `optimizer.step()` and `optimizer.zero_grad()` their
gradients are part of the norm, are scaled with the others, and are never cleared: they add up from
step to step, and the norm grows. The same happens here, and is said once. Where gradients are
divided by what a group weighs (accumulation by weight, several ranks) such a sum would be divided
again and again: there it is an error.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headrace.device import Device
from headrace.errors import StepError
from headrace.parallel import is_sharded, local_shard, unwrap


class Clipping:
    def __init__(
        self,
        device: Device,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
    ) -> None:
        self._device, self._model, self._optimizer = device, model, optimizer
        self.max_norm = max_norm
        self._models: dict[int, torch.Tensor] | None = None
        self._outside: dict[str, torch.Tensor] = {}

    def begin_epoch(self) -> None:
        """The model may have been given other parameters since."""
        self._models = None

    def clip(self, *, divided: bool) -> torch.Tensor:
        """Scale all gradients so that their norm is `max_norm` at most; the norm before. `divided`:
        they were divided by what their group weighs."""
        models = self._look()
        own = [p for group in self._optimizer.param_groups for p in group["params"]]
        if self._outside:
            self._require_clear(divided, {id(p) for p in own})
        parameters = [*models.values(), *(p for p in own if id(p) not in models)]
        # Of shards too this is the norm of the whole: PyTorch sums it over ranks.
        return local_shard(torch.nn.utils.clip_grad_norm_(parameters, self.max_norm))

    def gradients_outside(self) -> dict[str, torch.Tensor]:
        """By name, what has added up of parameters that the optimizer does not have."""
        self._look()
        return {name: p.grad for name, p in self._outside.items() if p.grad is not None}

    def set_gradients_outside(self, gradients: Mapping[str, torch.Tensor]) -> None:
        self.begin_epoch()
        self._look()
        for name, parameter in self._outside.items():
            stored = gradients.get(name)
            parameter.grad = None if stored is None else stored.to(parameter.device, copy=True)

    def _look(self) -> dict[int, torch.Tensor]:
        """The model's parameters: once an epoch, since a large model takes long to ask."""
        if self._models is None:
            named = dict(unwrap(self._model).named_parameters())
            self._models = {id(p): p for p in self._model.parameters()}
            own = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
            self._outside = {n: p for n, p in named.items() if p.requires_grad and id(p) not in own}
        return self._models

    def _require_clear(self, divided: bool, own: set[int]) -> None:
        """Say what comes of gradients outside the optimizer, or that nothing can."""
        self._outside = {name: p for name, p in self._outside.items() if id(p) not in own}
        found = [name for name, p in self._outside.items() if p.grad is not None]
        if not found:
            return
        some = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
        what = (
            f"{len(found)} of the model's parameters ({some}) get gradients and are not in the "
            "optimizer"
        )
        fix = "freeze them with requires_grad_(False), or give them to the optimizer"
        if divided or any(is_sharded(self._outside[name]) for name in found):
            raise StepError(
                f"{what}: clip_norm would count their gradients, and nothing clears them from step "
                "to step, so they cannot be divided by what the batches of an update weigh: "
                f"{fix}" + ("; or use accumulate_by='count'" if divided else "")
            )
        self._device.say_once(
            f"outside the optimizer: {some}",
            "%s: clip_norm counts them, as clip_grad_norm_(model.parameters()) does, and "
            "optimizer.zero_grad() does not clear them, so the norm grows from step to step: %s",
            what,
            fix,
        )
