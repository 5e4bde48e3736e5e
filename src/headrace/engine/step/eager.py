"""The step that trains on a batch, kernel by kernel.

A step launches work and returns `Launched`; it waits for nothing. `EagerStep` launches each kernel
of forward, backward and, at the end of a group, the update. Graphs, halving and restoring are
wrappers around it.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from headrace.capture import StepTracer
from headrace.data import Fetched
from headrace.engine.loss.compiled import loss_mode
from headrace.engine.loss.loss_output import LossOutput
from headrace.engine.stages import Finished, Launched, Standing
from headrace.engine.step.parts import StepParts
from headrace.engine.streams.lanes import Lanes


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
            with parts.group.kept.noting_reached(), traced:
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
        with group.kept.noting_reached():
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
