"""Clips gradients exactly as `clip_grad_norm_(model.parameters(), max_norm)` does.

The order of a sum changes its last bits. So the norm is summed over `model.parameters()` in their
order, then over parameters that only the optimizer has.

Outside parameters are those of the model that require gradients but are not in the optimizer. In a
loop of `clip_grad_norm_(model.parameters(), max_norm)`, `optimizer.step()` and
`optimizer.zero_grad()`, their gradients count in the norm and are scaled, but never cleared. They
add up from step to step, and the norm grows. The engine does the same, and warns once. But if
gradients are divided by the weight of their group (accumulation by weight, or several ranks), it
raises an error, because each update would divide the sum again.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping

import torch

from headrace.capture import same_entries
from headrace.device import Device
from headrace.errors import StepError
from headrace.parallel import is_sharded, local_shard, unwrap


class Clipping:
    """Clips the gradients of a model and its optimizer at `max_norm`."""

    def __init__(
        self,
        device: Device,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
    ) -> None:
        self._device, self._model, self._optimizer = device, model, optimizer
        self.max_norm = max_norm
        self._named: dict[str, torch.Tensor] = {}
        # Whether the model has the same parameters as at the last look; None: look again.
        self._has_same_entries: Callable[[], bool] | None = None
        self._own: list[torch.Tensor] | None = None  # the optimizer's parameters
        self._all: list[torch.Tensor] = []
        self._outside: dict[str, torch.Tensor] = {}

    def begin_epoch(self) -> None:
        """Look the model's parameters up again if it has new ones."""
        if self._has_same_entries is not None and not self._has_same_entries():
            self._has_same_entries = None
        self._own = None

    def clip(self, *, divided: bool) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`, and return the norm before.
        `divided`: they have been divided by the weight of their group."""
        parameters = self._parameters()
        if self._outside:
            self._check_outside(divided)
        # PyTorch sums the norm of sharded gradients over ranks.
        return local_shard(torch.nn.utils.clip_grad_norm_(parameters, self.max_norm))

    def gradients_outside(self) -> dict[str, torch.Tensor]:
        """The gradients of outside parameters, by name."""
        self._parameters()
        return {name: p.grad for name, p in self._outside.items() if p.grad is not None}

    def set_gradients_outside(self, gradients: Mapping[str, torch.Tensor]) -> None:
        self.begin_epoch()
        self._parameters()
        for name, parameter in self._outside.items():
            stored = gradients.get(name)
            parameter.grad = None if stored is None else stored.to(parameter.device, copy=True)

    def _parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients count, in the order of the sum. They are looked up again
        only if the optimizer has others than before or, from epoch to epoch, the model has."""
        groups = (group["params"] for group in self._optimizer.param_groups)
        own, before = list(itertools.chain.from_iterable(groups)), self._own
        if self._has_same_entries is None:
            self._has_same_entries = same_entries(self._model)
            self._named, before = dict(unwrap(self._model).named_parameters()), None
        if before is None or len(own) != len(before) or not all(map(operator.is_, own, before)):
            named = self._named
            ids, own_ids = set(map(id, named.values())), set(map(id, own))
            self._own, self._all, self._outside = own, [*named.values()], {}
            if not own_ids <= ids:
                self._all += [p for p in own if id(p) not in ids]
            if not ids <= own_ids:
                others = ((name, p) for name, p in named.items() if id(p) not in own_ids)
                self._outside = {name: p for name, p in others if p.requires_grad}
        return self._all

    def _check_outside(self, divided: bool) -> None:
        """Warn about gradients of outside parameters, or raise where they cannot be clipped."""
        found = [name for name, p in self._outside.items() if p.grad is not None]
        if not found:
            return
        some = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
        what = (
            f"{len(found)} of the model's parameters ({some}) get gradients but are not in the "
            "optimizer"
        )
        fix = "freeze them with requires_grad_(False), or give them to the optimizer"
        if divided or any(is_sharded(self._outside[name]) for name in found):
            raise StepError(
                f"{what}: clip_norm would count their gradients, and nothing clears them after a "
                "step, so the engine cannot divide them by the weight of an update's batches: "
                f"{fix}" + ("; or use accumulate_by='count'" if divided else "")
            )
        self._device.warn_once(
            f"outside the optimizer: {some}",
            "%s: clip_norm counts them, as clip_grad_norm_(model.parameters()) does, and "
            "optimizer.zero_grad() does not clear them, so the norm grows from step to step: %s",
            what,
            fix,
        )
