"""An accumulation group: the batches whose gradients one update uses.

By weight, the group sums the gradients of loss × weight and divides them once, on the device, by
its total weight (over all ranks under DDP or FSDP2). By count, each loss is divided by the group's
size, as in most hand-written loops.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

from headrace.device import Device
from headrace.engine.loss.loss_output import LossOutput
from headrace.engine.stages import Standing
from headrace.engine.update.group_weight import GroupWeight
from headrace.engine.update.kept_gradients import KeptGradients
from headrace.engine.values.arrived import Scalar
from headrace.errors import StepError
from headrace.parallel import Ranks, local_shards


class Phase(Enum):
    """What is being done with a group's gradients. A state may be taken only when they are clean.
    After an error the phase says what was interrupted; the next batch clears what it left."""

    CLEAN = "clean"  # complete, or none
    ACCUMULATING = "accumulating"  # a backward is adding gradients
    UPDATING = "updating"  # an update is using them


class Group:
    """The current group. It is full with `size` batches and has `count` so far; `updates` counts
    the groups before it."""

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
        #: Whether gradients are of loss × weight, and divided once per group.
        self.by_weight = not by_count and (size > 1 or ranks.several)
        self.count = self.updates = 0
        self.phase = Phase.CLEAN
        #: The total weight of the group's batches so far.
        self.weight = GroupWeight(device, ranks)
        #: Whether the last backward averaged the gradients over ranks.
        self.averaged = True
        #: Whether a batch of this group was split to fit on the device, and how many batches were
        #: split in all groups.
        self.has_split_batch, self.split_batches = False, 0
        #: Which gradients keep their memory from group to group, as graphs require.
        self.kept = KeptGradients(self.parameters)

    # --- how far the group is ---------------------------------------------------------------------

    @property
    def standing(self) -> Standing:
        return Standing(self.updates, self.count)

    @property
    def is_open(self) -> bool:
        """Whether there are gradients that no update has used yet."""
        return self.count > 0

    @property
    def is_full(self) -> bool:
        return self.count == self.size

    @property
    def divided_by(self) -> int | None:
        """What each loss is divided by when accumulating by count; None by weight."""
        return self.size if self._by_count else None

    def batches_for(self, updates: int) -> int:
        """How many more batches the next `updates` updates take."""
        return max(0, updates * self.size - self.count)

    def parameters(self) -> list[torch.Tensor]:
        """The optimizer's parameters."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters() if p.grad is not None]

    # --- from batch to batch ----------------------------------------------------------------------

    def backward_target(
        self, loss: LossOutput, share: float | None = None
    ) -> tuple[torch.Tensor, Scalar]:
        """The tensor on which to call `backward()`, and the batch's weight. `share`: if the batch
        was split, the fraction of its rows that this part has. It is the weight, unless the loss
        function returned one."""
        weight = share if share is not None and not loss.weighted else loss.weight
        if self.by_weight or share is not None:
            return loss.loss * weight, weight
        if not loss.counts:
            return loss.loss * 0, weight
        return (loss.loss if self.size == 1 else loss.loss / self.size), weight

    def decide_averaging(self, *, ends_epoch: bool) -> bool:
        """Decide whether the next backward averages gradients over ranks: only a group's last one
        does. `averaged` keeps the answer, because a group that ends early needs it later."""
        self.averaged = ends_epoch or self.count + 1 >= self.size
        return self.averaged

    def begin_backward(self) -> None:
        """A backward begins."""
        self.phase = Phase.ACCUMULATING

    def begin_update(self) -> None:
        """An update begins."""
        self.phase = Phase.UPDATING

    def end_backward(self) -> None:
        """A batch's gradients are complete."""
        self.count += 1
        self.phase = Phase.CLEAN

    def end_update(self) -> None:
        """An update has used the group's gradients: a new group begins."""
        self.count = 0
        self.updates += 1
        self.phase = Phase.CLEAN

    def end_step(self) -> None:
        """A graph has replayed a whole step: backward and update."""
        self.updates += 1
        self.phase = Phase.CLEAN

    def join_split_batch(self) -> None:
        """After the last part of a split batch: divide the batch's gradients by the total weight of
        its parts. The parameters must hold no other gradients. By weight, `divide` does this for
        the whole group."""
        self.has_split_batch = True
        self.split_batches += 1
        if self.by_weight:
            return
        _divide(local_shards(self.gradients()), self.weight.total() * self.size)
        self.weight.clear(forget=True)

    def divide(self) -> None:
        """Divide the gradients by the group's weight, if it has one."""
        if self._ranks.several and not self.averaged:
            self._average_open_group()
        if self.weight.value is not None:
            _divide(local_shards(self.gradients()), self.weight.total())

    def clear(self) -> None:
        """Clear all gradients."""
        self._optimizer.zero_grad(set_to_none=not self.kept.are_kept)
        self.weight.clear(forget=not self.by_weight)
        self.has_split_batch = False

    def clear_failed(self) -> None:
        """Clear what a failed batch or update has left."""
        self.clear()
        self.phase = Phase.CLEAN

    def recover(self) -> bool:
        """After an error: give up the group if its gradients are incomplete; else keep it for the
        next update. Returns whether no earlier batch was lost. (A backward that fails in an empty
        group loses none.)"""
        self.weight.drop_total()
        lost = self.phase is Phase.UPDATING or (self.phase is Phase.ACCUMULATING and self.is_open)
        if lost:
            self.count = 0
        return not lost

    def _average_open_group(self) -> None:
        """Average the gradients of a group that ended early: the loop was left inside it."""
        if self._sharded:
            raise StepError(
                f"the loop was left after {self.count} of a group's {self.size} batches: "
                "FSDP2 cannot average their gradients any more; leave the loop after an update"
            )
        self._ranks.average_gradients(self.gradients(), self._device.ledger)
        self.weight.start_total()

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The group's state, including the gradients of an open group."""
        if self.is_open and self._ranks.several:
            raise StepError(
                f"state_dict() was called after {self.count} of a group's {self.size} batches: "
                "with several ranks, call it between two updates (engine.is_between_updates)"
            )
        gradients = [self._accumulated(p) for p in self.parameters()] if self.is_open else None
        return {
            "updates": self.updates,
            "in_group": self.count,
            "weight": self.weight.value if self.is_open else None,
            "gradients": gradients,
            "divided_by": self.divided_by,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.phase = Phase.CLEAN
        self.updates, self.count = state["updates"], state["in_group"]
        self.weight.clear(forget=not self.by_weight)
        if state["weight"] is not None:
            self.weight.add(state["weight"].to(self._device.torch_device))
        parameters = self.parameters()
        gradients = state["gradients"] or [None] * len(parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            # A copy: the same stored state may be loaded into more than one engine.
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)

    def _accumulated(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """A parameter's gradient so far. None if no batch of the group reached it, also where
        zeros are kept in its place."""
        only_zeros = self.kept.are_kept and id(parameter) not in self.kept.reached
        return None if only_zeros else parameter.grad


def _divide(gradients: list[torch.Tensor], weight: torch.Tensor) -> None:
    if gradients:
        # The gradients of a group of weight 0 are 0, and must stay 0. First of all: the weight is
        # real here, and complex numbers have no order.
        weight = weight.clamp(min=torch.finfo(torch.float32).tiny)
        # At least float32: bfloat16 would round a count of tokens. A weight of the gradients' own
        # dtype takes one kernel for all of them.
        weight = weight.to(torch.promote_types(gradients[0].dtype, torch.float32))
        torch._foreach_div_(gradients, weight)
