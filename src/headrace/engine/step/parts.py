"""What a training step under one plan is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.capture import StepState
from headrace.data import Fetched
from headrace.device import Device
from headrace.engine.loss.carried_state import CarriedState
from headrace.engine.loss.compiled import uncompiled
from headrace.engine.loss.forward import Forward
from headrace.engine.loss.loss_output import LossOutput
from headrace.engine.stages import Launched
from headrace.engine.update.group import Group, Phase
from headrace.engine.update.update import Update
from headrace.parallel import Parallelism, Ranks


@dataclass(frozen=True, slots=True)
class StepParts:
    """What a training step under one plan is made of. All passes use the same parts."""

    device: Device
    forward: Forward
    group: Group
    update: Update
    ranks: Ranks
    parallelism: Parallelism

    @property
    def model(self) -> torch.nn.Module:
        return self.forward.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.update.optimizer

    @property
    def carry(self) -> CarriedState | None:
        return self.forward.carry

    @property
    def state(self) -> StepState:
        """The owners of the state that this step shares with its graphs."""
        scaler = self.update.scaler
        return StepState(
            self.device,
            uncompiled(self.forward.loss),
            (self.model,),
            (self.optimizer,),
            () if scaler is None else (scaler,),
            passes_model=True,
        )

    def own_tensors(self) -> list[torch.Tensor]:
        """The engine's own tensors that a step reads (not the model's or optimizer's)."""
        weight = self.group.weight.value
        found = [*([] if weight is None else [weight]), *self.update.own_tensors()]
        return found if self.carry is None else [*found, *self.carry.tensors()]

    def begin_batch(self) -> None:
        """Clear what a failed batch or update has left of its group."""
        if self.group.phase is Phase.CLEAN:
            return
        self.update.clear_failed()
        self.group.clear_failed()

    def backward(self, loss: LossOutput, share: float | None = None) -> None:
        """Add a batch's gradients to the group's. `share`: if the batch was split, the fraction of
        its rows that this part has."""
        group, update = self.group, self.update
        target, weight = group.backward_target(loss, share)
        by_weight = group.by_weight or share is not None
        if by_weight and self.ranks.several:  # first, so that backward overlaps the all-reduce
            group.weight.add(weight)
            if group.averaged:
                group.weight.start_total()
        if update.guard is not None:
            update.guard.check_loss(loss.loss)
        update.scale(target).backward()
        if by_weight and not self.ranks.several:
            group.weight.add(weight)

    def run_update(self) -> None:
        """Update the weights with the group's gradients, and begin a new group."""
        self.update.write_rates()
        self.group.begin_update()
        self.update(self.group)
        self.group.end_update()

    def keep_carried(self, loss: LossOutput) -> None:
        """Call at the end of a batch: the state that it carries is now that of the next batch."""
        if self.carry is not None and loss.counts:
            self.carry.keep(loss.carried)

    def make_launched(
        self, fetched: Fetched, loss: LossOutput, *, updated: bool, replayed: bool = False
    ) -> Launched:
        """The result of a batch: its values, and whether the guard has skipped its update."""
        guard, values = self.update.guard, loss.values
        if guard is not None:
            values = {**values, **guard.values(updated=updated)}
        standing = self.group.standing
        return Launched(fetched, values, loss.weighted, updated, standing, replayed, loss.outputs)
