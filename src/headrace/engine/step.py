"""The steps: train on a batch, evaluate it, or give it to the user's own step.

A step launches work and returns `Launched`; it waits for nothing. `EagerStep` launches each kernel
of forward, backward and, at the end of a group, the update. Graphs, halving and restoring are
wrappers around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headrace.capture import StepState
from headrace.data import Fetched
from headrace.device import Device
from headrace.engine.carry import CarriedState
from headrace.engine.compiled import uncompiled
from headrace.engine.forward import Forward, require_tensor
from headrace.engine.group import Group, Phase
from headrace.engine.lanes import Lanes
from headrace.engine.loss_output import LossOutput
from headrace.engine.stages import Finished, Launched, Standing
from headrace.engine.update import Update
from headrace.parallel import Parallelism, Ranks
from headrace.source_lines import describe_function


class CountsReplays(Protocol):
    """A step function that replays graphs of itself."""

    replays: int

    def __call__(self, batch: Any) -> Any: ...


StepFunction = Callable[..., Any]


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


class EagerStep:
    """Trains on a batch, launching each kernel, on the streams of the plan."""

    def __init__(self, parts: StepParts, lanes: Lanes) -> None:
        self.parts, self.lanes = parts, lanes

    def __call__(self, fetched: Fetched) -> Launched:
        parts, lanes = self.parts, self.lanes
        group = parts.group
        averages = group.decide_averaging(ends_epoch=fetched.ends_epoch)
        with lanes.on(lanes.forward, "forward"):
            loss = parts.forward(fetched.batch, averages=averages)
            loss = loss.weightless() if fetched.weightless else loss.unaliased()
        lanes.forward_to_backward()
        with lanes.on(lanes.backward, "backward"):
            parts.begin_batch()
            group.begin_backward()
            parts.backward(loss)
            group.end_backward()
            if updated := group.is_full:
                parts.run_update()
        lanes.backward_to_forward()
        if parts.forward.carry is not None:
            with lanes.on(lanes.forward):
                parts.keep_carried(loss)
        return parts.make_launched(fetched, loss, updated=updated)

    def finish(self) -> Finished | None:
        parts, lanes = self.parts, self.lanes
        if not parts.group.is_open:
            return None
        try:
            with lanes.on(lanes.backward):
                parts.run_update()
        except BaseException:  # after a `break` nobody else recovers the group
            parts.group.recover()
            raise
        lanes.backward_to_forward()
        guard = parts.update.guard
        values = {} if guard is None else guard.values(updated=True)
        return Finished(values, parts.group.standing)

    def recover(self, counted: Standing) -> bool:
        group = self.parts.group
        return group.recover() and group.standing == counted


class EvaluationStep:
    """Computes a batch's loss and metrics, without training. State is carried from the initial one
    on, apart from that of training."""

    def __init__(self, forward: Forward, lanes: Lanes) -> None:
        self._forward, self._lanes = forward, lanes
        self._carry = None if forward.carry is None else forward.carry.fresh()

    def __call__(self, fetched: Fetched) -> Launched:
        if fetched.number == 0:
            require_tensor(fetched.batch)
        with self._lanes.on(self._lanes.forward, "evaluate"):
            loss = self._forward.evaluate(fetched.batch, self._carry).unaliased()
        if fetched.weightless:
            loss = loss.weightless()
        elif self._carry is not None:
            self._carry.keep(loss.carried)
        return Launched(fetched, loss.values, loss.weighted, updated=False, outputs=loss.outputs)

    def finish(self) -> None:
        return None

    def recover(self, counted: Standing) -> bool:
        return True


class UpdateCount:
    """Counts the updates of a user's own step, over all passes: one a batch."""

    def __init__(self) -> None:
        self.updates = 0


class UserStep:
    """Calls the user's own step function with a batch, or replays its graphs, which keep the
    `carry` themselves."""

    def __init__(
        self,
        step: StepFunction,
        device: Device,
        lanes: Lanes,
        count: UpdateCount,
        carry: CarriedState | None,
        graphs: CountsReplays | None = None,
    ) -> None:
        self._step, self._device, self._lanes, self._count = step, device, lanes, count
        self._carry, self._graphs = carry, graphs
        self._name = f"the step {describe_function(step)}"

    def __call__(self, fetched: Fetched) -> Launched:
        replays = 0 if self._graphs is None else self._graphs.replays
        with self._lanes.on(self._lanes.forward, "step"):
            returned = self._call(fetched.batch)
        replayed = self._graphs is not None and self._graphs.replays > replays
        self._count.updates += 1
        standing = Standing(self._count.updates)
        if returned is None:
            return Launched(fetched, None, False, True, standing=standing, replayed=replayed)
        loss = LossOutput.of(returned, self._device, needs_grad=False, by=self._name)
        if loss.outputs is not None and not replayed:  # a replay returns copies
            with self._lanes.on(self._lanes.forward):
                loss = loss.unaliased()
        return Launched(
            fetched,
            loss.values,
            loss.weighted,
            updated=True,
            standing=standing,
            replayed=replayed,
            outputs=loss.outputs,
        )

    def _call(self, batch: Any) -> Any:
        if self._graphs is not None:
            return self._graphs(batch)
        if self._carry is None:
            return self._step(batch)
        returned, carried = self._carry.call(self._step, self._name, batch, batch)
        self._carry.keep(carried)
        return returned

    def finish(self) -> None:
        return None

    def recover(self, counted: Standing) -> bool:
        return True
