"""An accumulation group: the gradients of some batches, which one update will use.

Gradients of loss × weight are summed over a group and divided once, on the device, by the group's
total weight: that of all ranks, if the model is DDP's or FSDP2's. By count, each loss is divided by
the group's size instead, as most people write it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

from headrace.device import Device
from headrace.engine.deferred import Scalar
from headrace.engine.group_weight import GroupWeight
from headrace.engine.loss_parts import LossParts
from headrace.errors import StepError
from headrace.parallel import Ranks, local_shards


class Phase(Enum):
    """Whether a state may be taken: only while a group is clean. After an error the phase says what
    was under way; the next batch clears it away."""

    CLEAN = "clean"
    GATHERING = "gathering"  # a backward is adding gradients
    UPDATING = "updating"  # an update is using them up


class Group:
    """The group at hand. `size` batches fill it; `count` are in it; `updates` groups were used."""

    def __init__(
        self,
        device: Device,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        *,
        size: int,
        by_count: bool,
        sharded: bool,
    ) -> None:
        self._device, self._optimizer, self._ranks = device, optimizer, ranks
        self.size, self._by_count, self._sharded = size, by_count, sharded
        #: Whether gradients are those of loss × weight, to be divided once a group.
        self.weighs = not by_count and (size > 1 or ranks.several)
        self.count = self.updates = 0
        self.phase = Phase.CLEAN
        #: What the group's batches weigh so far.
        self.weight = GroupWeight(device, ranks)
        #: Whether the gradients gathered last were averaged over ranks.
        self.averaged = True
        #: Whether a batch of the group was trained on in parts, and how many were in all.
        self.parted, self.batches_in_parts = False, 0
        #: Whether gradients keep their memory from group to group, as a graph needs it; and then
        #: the parameters (by `id`) that the group's batches gave a gradient.
        self.keeps_gradients = False
        self.reached: set[int] = set()

    # --- what is asked ----------------------------------------------------------------------------

    @property
    def standing(self) -> tuple[int, int]:
        """Updates, and batches in the open group."""
        return self.updates, self.count

    @property
    def is_open(self) -> bool:
        """Whether gradients were gathered that no update has used yet."""
        return self.count > 0

    @property
    def is_full(self) -> bool:
        return self.count == self.size

    @property
    def divided_by(self) -> int | None:
        """What a batch's loss is divided by; None: it is weighed instead."""
        return self.size if self._by_count else None

    def batches_for(self, updates: int) -> int:
        """How many batches so many updates take, from here on."""
        return max(0, updates * self.size - self.count)

    def parameters(self) -> list[torch.Tensor]:
        """What the optimizer updates."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters() if p.grad is not None]

    # --- from batch to batch ----------------------------------------------------------------------

    def weighed(self, parts: LossParts, share: float | None = None) -> tuple[torch.Tensor, Scalar]:
        """What backward begins at, and what the batch weighs. `share` is given where a batch is
        trained on in parts: how much of the batch this one is, its weight unless the loss gives
        one."""
        weight = share if share is not None and not parts.weighted else parts.weight
        if self.weighs or share is not None:
            return parts.loss * weight, weight
        if not parts.counts:
            return parts.loss * 0, weight
        return (parts.loss if self.size == 1 else parts.loss / self.size), weight

    def averages(self, *, ends_epoch: bool) -> bool:
        """Whether the next batch's backward is to average gradients over ranks: the group's last
        one does. Noted, since a group that ends earlier has to be averaged by then."""
        self.averaged = ends_epoch or self.count + 1 >= self.size
        return self.averaged

    def gathering(self) -> None:
        """A backward begins."""
        self.phase = Phase.GATHERING

    def updating(self) -> None:
        """An update begins."""
        self.phase = Phase.UPDATING

    def gathered(self) -> None:
        """A batch's gradients are whole."""
        self.count += 1
        self.phase = Phase.CLEAN

    def used(self) -> None:
        """An update has used the group's gradients."""
        self.count = 0
        self.updates += 1
        self.phase = Phase.CLEAN

    def gathered_and_used(self) -> None:
        """Both at once, as a replay of a whole step does."""
        self.updates += 1
        self.phase = Phase.CLEAN

    def join_parts(self) -> None:
        """After the parts of one batch, whose gradients are alone in place: divide them by what
        the parts weigh together, unless the group's batches are weighed as well."""
        self.parted = True
        self.batches_in_parts += 1
        if self.weighs:
            return
        _divide(local_shards(self.gradients()), self.weight.total() * self.size)
        self.weight.clear(forget=True)

    def divide(self) -> None:
        """By what the group weighs, if it is weighed at all."""
        if self._ranks.several and not self.averaged:
            self._average_open_group()
        if self.weight.value is not None:
            _divide(local_shards(self.gradients()), self.weight.total())

    def clear(self) -> None:
        """Let go of all gradients."""
        self._optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        self.weight.clear(forget=not self.weighs)
        self.parted = False

    def clear_failed(self) -> None:
        """Clear away what a failed batch or update has left."""
        self.clear()
        self.phase = Phase.CLEAN

    def recover(self) -> bool:
        """After an error: forget gradients that it left half made. Whole ones, of batches before
        the failed one, stay to be used. Returns whether nothing was lost: also if a backward
        failed, as long as there were no others' gradients."""
        self.weight.lose_total()
        lost = self.phase is Phase.UPDATING or (self.phase is Phase.GATHERING and self.is_open)
        if lost:
            self.count = 0
        return not lost

    def _average_open_group(self) -> None:
        """The loop was left inside a group, whose last batch was not known to be the last."""
        if self._sharded:
            raise StepError(
                f"the loop was left after {self.count} of a group's {self.size} batches: "
                "under FSDP2 their gradients are of no use then; leave it after an update"
            )
        self._ranks.average_gradients(self.gradients(), self._device.ledger)
        self.weight.start_total()

    # --- across runs ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the group stands, gradients included."""
        if self.is_open and self._ranks.several:
            raise StepError(
                f"a state was asked for after {self.count} of a group's {self.size} "
                "batches: with several ranks it is taken between two updates"
            )
        return {
            "updates": self.updates,
            "in_group": self.count,
            "weight": self.weight.value if self.is_open else None,
            "gradients": [self._gathered(p) for p in self.parameters()] if self.is_open else None,
            "divided_by": self.divided_by,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.phase = Phase.CLEAN
        self.updates, self.count = state["updates"], state["in_group"]
        self.weight.clear(forget=not self.weighs)
        if state["weight"] is not None:
            self.weight.add(state["weight"].to(self._device.torch_device))
        parameters = self.parameters()
        gradients = state["gradients"] or [None] * len(parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            # Its own memory: what was stored may be used for more than one engine.
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)

    def _gathered(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The group's gradient so far; None if no batch gave one, also where zeros are kept."""
        kept = self.keeps_gradients and id(parameter) not in self.reached
        return None if kept else parameter.grad


def _divide(gradients: list[torch.Tensor], weight: torch.Tensor) -> None:
    if gradients:
        # A group of weight 0 has gradients of 0: they stay that.
        weight = weight.to(gradients[0].dtype).clamp(min=torch.finfo(torch.float32).tiny)
        torch._foreach_div_(gradients, weight)
