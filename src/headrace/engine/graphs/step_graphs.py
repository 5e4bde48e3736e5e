"""Training steps as graphs: forward, loss, backward, clipping and update, captured for each shape.

`capture/` says when the engine's step is watched, captured and replayed. Here is what is special
about it: with accumulation, gradients keep their memory and the update is a graph of its own, and
the optimizer reads its learning rates on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.capture import GraphReport
from headrace.data import Fetched
from headrace.engine.graphs.step_work import StepWork, Training
from headrace.engine.stages import Launched
from headrace.engine.step.eager import EagerStep
from headrace.engine.step.parts import StepParts
from headrace.plan import Plan


class StepGraphs:
    """The graphs of one training step under one plan. They stay from pass to pass."""

    def __init__(self, parts: StepParts, plan: Plan) -> None:
        self._parts, self._work = parts, StepWork(parts, plan)
        self._graphs = self._work.graphs
        self._graphs.look_for_obstacles()

    def train(self, fetched: Fetched, eager: EagerStep) -> Launched:
        """Train on one batch, on the current stream."""
        self._work.begin(eager)
        return self._graphs(Training(fetched, eager))

    def train_eagerly(self, fetched: Fetched, eager: EagerStep) -> Launched:
        """Train on one batch without a graph, also if there is one."""
        return self._graphs.run(Training(fetched, eager))

    @property
    def why(self) -> str | None:
        """Why the step is not captured (any more)."""
        return self._graphs.why

    def give_up(self, why: str) -> None:
        """Capture nothing any more."""
        self._graphs.give_up(why, quietly=True)

    def state_dict(self) -> dict[str, Any]:
        """What later bits depend on: whether the optimizer was made capturable (`prepared`), and
        what code that asks whether it is captured was told."""
        return {
            "prepared": self._graphs.optimizers.are_capturable,
            "as_captured": self._graphs.trials.watch.as_captured,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Drop all graphs: the optimizer has another state by now."""
        self._graphs.drop()
        self._parts.group.kept.assume_reached(is_open=self._parts.group.is_open)
        # An optimizer that was capturable stays so.
        if state is not None and state["prepared"]:
            self._graphs.make_capturable()
        elif self._graphs.optimizers.are_capturable:
            self._graphs.optimizers.forget()
        if state is not None and state["as_captured"]:
            self._graphs.trials.watch.answer_as_captured()

    def report(self) -> GraphReport:
        found = self._graphs.report(more_bytes=self._work.update_cache.memory_bytes)
        return replace(found, seconds=found.seconds + self._work.update_cache.seconds)

    def close(self) -> None:
        """Drop all graphs. Shapes are watched and captured again when they are due."""
        self._graphs.drop()

    def drop_unreached_gradients(self) -> None:
        """Call before a last partial group is updated."""
        self._work.drop_unreached_gradients()
