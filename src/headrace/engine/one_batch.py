"""What is done with one batch of a loop: trained on, evaluated, or given to a step of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from headrace.engine.deferred import Scalar
from headrace.engine.graphed import GraphedStep
from headrace.engine.halving import HalvingStep
from headrace.engine.loop import Loop
from headrace.engine.loss_parts import LossParts
from headrace.engine.step import TrainingStep
from headrace.source_lines import described

StepFunction = Callable[[Any], torch.Tensor | Mapping[str, Scalar] | None]


class Training:
    """Trains on a batch: as a graph, in halves, or launched one by one on the plan's lanes.
    `before` is called first, if somebody may ask for the state before a batch that fails."""

    def __init__(
        self,
        step: TrainingStep,
        graphed: GraphedStep | None,
        halving: HalvingStep | None,
        before: Callable[[Loop], object],
    ) -> None:
        self._step, self._graphed, self._halving = step, graphed, halving
        self._before = before

    def __call__(self, run: Loop, index: int, batch: Any) -> None:
        step, lanes = self._step, run.lanes
        if step.buffers is not None:
            self._before(run)
            with lanes.on(lanes.forward):
                step.buffers.keep()
        if self._graphed is not None and not run.is_stand_in(index):
            with lanes.on(lanes.forward, "step"):
                run.replays += self._graphed.train(batch, partial(run.report, index))
            return
        if self._halving is not None:
            self._halving.train(batch, lanes, partial(run.report, index))
            return
        with lanes.on(lanes.forward, "forward"):
            parts = step.forward(batch)
            if run.is_stand_in(index):
                parts = parts.without_weight()
            if step.gate is None:
                run.report(index, parts)
        lanes.forward_to_backward()
        with lanes.on(lanes.backward, "backward"):
            step.backward(parts)
            if updated := step.group_is_full:
                step.update()
        lanes.backward_to_forward()
        if step.gate is not None:
            with lanes.on(lanes.forward):
                run.report(index, step.gate.marked(parts, updated=updated))


class Evaluation:
    """Computes a batch's loss and metrics."""

    def __init__(self, step: TrainingStep) -> None:
        self._step = step

    def __call__(self, run: Loop, index: int, batch: Any) -> None:
        with run.lanes.on(run.lanes.forward, "evaluate"):
            parts = self._step.forward(batch)
            run.report(index, parts.without_weight() if run.is_stand_in(index) else parts)


class Custom:
    """Gives a batch to a step of the user's own."""

    def __init__(self, step: StepFunction) -> None:
        self._step, self._described = step, f"the step {described(step)}"

    def __call__(self, run: Loop, index: int, batch: Any) -> None:
        with run.lanes.on(run.lanes.forward, "step"):
            returned = self._step(batch)
            if returned is not None:
                by = self._described
                run.report(index, LossParts.of(returned, run.device, needs_grad=False, by=by))
