"""The steps: train on a batch, evaluate it, or give it to the user's own step.

A step launches work and returns `Launched`; it waits for nothing. `EagerStep` launches each kernel
of forward, backward and, at the end of a group, the update. Graphs, halving and restoring are
wrappers around it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from headrace.capture import StepState, StepTracer
from headrace.data import Fetched
from headrace.device import Device
from headrace.engine.loss.carry import CarriedState
from headrace.engine.loss.compiled import loss_mode, uncompiled
from headrace.engine.loss.forward import Forward, require_tensor
from headrace.engine.loss.loss_output import LossOutput
from headrace.engine.stages import Finished, Launched, Standing
from headrace.engine.streams.lanes import Lanes
from headrace.engine.update.group import Group, Phase
from headrace.engine.update.update import Update
from headrace.parallel import Parallelism, Ranks
from headrace.source_lines import describe_function


class CountsReplays(Protocol):
    """A step function that replays graphs of itself."""

    @property
    def replays(self) -> int: ...

    def __call__(self, batch: Any) -> Any: ...

    def begin_pass(self) -> None: ...

    def end_pass(self) -> None: ...


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


class EagerStep:
    """The only place where a batch's forward, backward and update are written. It trains on a
    batch, launching each kernel, on the streams of the plan; graphs record what it says, too."""

    def __init__(self, parts: StepParts, lanes: Lanes) -> None:
        self.parts, self.lanes = parts, lanes

    def __call__(self, fetched: Fetched) -> Launched:
        return self.end_batch(fetched, self.add_batch(fetched))

    def add_batch(self, fetched: Fetched, tracer: StepTracer | None = None) -> LossOutput:
        """Forward and backward of a batch that is not split. `tracer` records both."""
        group = self.parts.group
        averages = group.decide_averaging(ends_epoch=fetched.ends_epoch)
        loss = self.add_gradients(
            fetched.batch, averages=averages, zero_weight=fetched.zero_weight, tracer=tracer
        )
        group.end_backward()
        return loss

    def add_gradients(
        self,
        batch: Any,
        *,
        averages: bool = True,
        zero_weight: bool = False,
        share: float | None = None,
        begins: bool = True,
        tracer: StepTracer | None = None,
    ) -> LossOutput:
        """Forward and backward of a batch, or of a part of one with `share` of its rows. `begins`:
        clear what a failed batch has left."""
        parts, lanes, traced = self.parts, self.lanes, tracer or nullcontext()
        with lanes.on(lanes.forward, "forward"):
            with traced:
                loss = parts.forward(batch, averages=averages)
            if tracer is not None:
                tracer.forward_ends(loss.numbers())
            loss = loss.zero_weight() if zero_weight else loss.unaliased()
        lanes.forward_to_backward()
        with lanes.on(lanes.backward, "backward"):
            if begins:
                parts.begin_batch()
                parts.group.begin_backward()
            with parts.group.noting_reached(), traced:
                parts.backward(loss, share)
        return loss

    def end_batch(self, fetched: Fetched, loss: LossOutput) -> Launched:
        """Update after the last batch of a group, and hand the batch's values on."""
        parts, lanes = self.parts, self.lanes
        with lanes.on(lanes.backward):
            if updated := parts.group.is_full:
                parts.run_update()
        lanes.backward_to_forward()
        if parts.forward.carry is not None:
            with lanes.on(lanes.forward):
                parts.keep_carried(loss)
        return parts.make_launched(fetched, loss, updated=updated)

    def record(self, batch: Any) -> LossOutput:
        """What a graph of a batch repeats: forward and backward, and the update if there is one for
        each batch. Replays count for the group outside of it."""
        parts, group = self.parts, self.parts.group
        with loss_mode(parts.forward.loss, "compiled"):
            loss = parts.forward(batch)
        # A copy: a metric may be a view of a weight, which the update changes.
        result = loss.detached_copy()
        with group.noting_reached():
            parts.backward(loss)
        if group.size == 1:
            parts.update(group)
        if parts.carry is None:
            return result
        return replace(result, carried=parts.carry.write(loss.carried, capturing=True))

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
        if fetched.zero_weight:
            loss = loss.zero_weight()
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

    def count(self) -> None:
        self.updates += 1


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
        if graphs is not None:
            graphs.begin_pass()

    def __call__(self, fetched: Fetched) -> Launched:
        replays = 0 if self._graphs is None else self._graphs.replays
        with self._lanes.on(self._lanes.forward, "step"):
            returned = self._call(fetched.batch)
        replayed = self._graphs is not None and self._graphs.replays > replays
        self._count.count()
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
        if self._graphs is not None:
            self._graphs.end_pass()

    def recover(self, counted: Standing) -> bool:
        return True
