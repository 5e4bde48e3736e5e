"""What is done with one batch: trained on, evaluated, or given to a step of the user's own.

A step launches work and returns `Launched`; it waits for nothing. `EagerStep` is one optimizer
step, kernel by kernel: forward, backward and, at a group's end, the update. Graphs, halving and
restoring are wrappers around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.data import Fetched
from headrace.device import Device
from headrace.engine.deferred import Scalar
from headrace.engine.forward import Forward, require_tensor
from headrace.engine.group import Group, Phase
from headrace.engine.lanes import Lanes
from headrace.engine.loss_parts import LossParts
from headrace.engine.stages import Finished, Launched
from headrace.engine.update import Update
from headrace.parallel import Parallelism, Ranks
from headrace.source_lines import described

StepFunction = Callable[[Any], torch.Tensor | Mapping[str, Scalar] | None]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a training step is made of, under one plan: these stay from pass to pass."""

    device: Device
    forward: Forward
    group: Group
    update: Update
    ranks: Ranks
    spread: Parallelism

    @property
    def model(self) -> torch.nn.Module:
        return self.forward.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.update.optimizer

    def own_tensors(self) -> list[torch.Tensor]:
        """What a step reads that is neither the model's nor the optimizer's, but ours."""
        weight = self.group.weight.value
        return [*([] if weight is None else [weight]), *self.update.own_tensors()]

    def begin(self) -> None:
        """Before a batch: what a failed one left of the group before is cleared away."""
        if self.group.phase is Phase.CLEAN:
            return
        self.update.forget_failed()
        self.group.clear_failed()

    def gather(self, parts: LossParts, share: float | None = None) -> None:
        """Add a batch's gradients to the group's: the device's part of it. `share` is how much of
        its batch a part of it is, where a batch is trained on in parts."""
        group, update = self.group, self.update
        target, weight = group.weighed(parts, share)
        weighs = group.weighs or share is not None
        if weighs and self.ranks.several:  # before backward, which it then hides behind
            group.weight.add(weight)
            if group.averaged:
                group.weight.start_total()
        if update.guard is not None:
            update.guard.see_loss(parts.loss)
        update.scaled(target).backward()
        if weighs and not self.ranks.several:
            group.weight.add(weight)

    def use(self) -> None:
        """Update with the group's gradients, and begin a new group."""
        self.update.write_rates()
        self.group.updating()
        self.update(self.group)
        self.group.used()

    def launched(
        self, fetched: Fetched, parts: LossParts, *, updated: bool, replayed: bool = False
    ) -> Launched:
        """What became of a batch, with what the update's guard says of it."""
        guard, values = self.update.guard, parts.values
        if guard is not None:
            values = {**values, **guard.told(updated=updated)}
        standing = self.group.standing
        return Launched(fetched, values, parts.weighted, updated, standing, replayed)


class EagerStep:
    """Trains on a batch, kernel by kernel, on the plan's lanes."""

    def __init__(self, parts: Parts, lanes: Lanes) -> None:
        self.parts, self.lanes = parts, lanes

    def __call__(self, fetched: Fetched) -> Launched:
        parts, lanes = self.parts, self.lanes
        group = parts.group
        averages = group.averages(ends_epoch=fetched.ends_epoch)
        with lanes.on(lanes.forward, "forward"):
            loss = parts.forward(fetched.batch, averages=averages)
            loss = loss.weightless() if fetched.weightless else loss.unaliased()
        lanes.forward_to_backward()
        with lanes.on(lanes.backward, "backward"):
            parts.begin()
            group.gathering()
            parts.gather(loss)
            group.gathered()
            if updated := group.is_full:
                parts.use()
        lanes.backward_to_forward()
        return parts.launched(fetched, loss, updated=updated)

    def finish(self) -> Finished | None:
        parts, lanes = self.parts, self.lanes
        if not parts.group.is_open:
            return None
        try:
            with lanes.on(lanes.backward):
                parts.use()
        except BaseException:  # the loop may have been left already: nobody else would recover
            parts.group.recover()
            raise
        lanes.backward_to_forward()
        guard = parts.update.guard
        values = {} if guard is None else guard.told(updated=True)
        return Finished(values, parts.group.standing)

    def recover(self, counted: tuple[int, int]) -> bool:
        group = self.parts.group
        return group.recover() and group.standing == counted


class EvaluationStep:
    """Computes a batch's loss and metrics."""

    def __init__(self, forward: Forward, lanes: Lanes) -> None:
        self._forward, self._lanes = forward, lanes

    def __call__(self, fetched: Fetched) -> Launched:
        if fetched.index == 0:
            require_tensor(fetched.batch)
        with self._lanes.on(self._lanes.forward, "evaluate"):
            loss = self._forward.evaluated(fetched.batch)
        if fetched.weightless:
            loss = loss.weightless()
        return Launched(fetched, loss.values, loss.weighted, updated=False)

    def finish(self) -> None:
        return None

    def recover(self, counted: tuple[int, int]) -> bool:
        return True


class OwnStep:
    """Gives a batch to a step of the user's own."""

    def __init__(self, step: StepFunction, device: Device, lanes: Lanes) -> None:
        self._step, self._device, self._lanes = step, device, lanes
        self._described = f"the step {described(step)}"

    def __call__(self, fetched: Fetched) -> Launched:
        with self._lanes.on(self._lanes.forward, "step"):
            returned = self._step(fetched.batch)
        if returned is None:
            return Launched(fetched, None, weighted=False, updated=True)
        loss = LossParts.of(returned, self._device, needs_grad=False, by=self._described)
        return Launched(fetched, loss.values, loss.weighted, updated=True)

    def finish(self) -> None:
        return None

    def recover(self, counted: tuple[int, int]) -> bool:
        return True
