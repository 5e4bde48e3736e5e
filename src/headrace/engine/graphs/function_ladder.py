"""How a step of the user's own runs: as one graph, or eagerly."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from headrace.capture import GraphReport, Turns
from headrace.device import Device
from headrace.engine.graphs.graphed_function import GraphedFunction
from headrace.engine.loss.carried_state import CarriedState
from headrace.engine.step.user_step import StepFunction
from headrace.plan import Plan

log = logging.getLogger("headrace")


class FunctionLadder:
    """The graphs of a step of the user's own: the whole step, else eager. What a function uses is
    not known before it is called, so there are no parts."""

    def __init__(
        self, step: StepFunction, device: Device, plan: Plan, carry: CarriedState | None
    ) -> None:
        self._plan = plan
        self._whole: GraphedFunction[Any, Any] = GraphedFunction(
            step,
            device,
            modules=None,
            optimizers=None,
            carry=carry,
            max_graphs=plan.graph_shapes,
            watch_after=plan.graph_after,
            recheck=plan.recheck,
            plan_name=plan.name,
            cautious=plan.graphs == "auto",
        )
        self._turns: Turns | None = None
        if plan.graphs == "auto":
            self._turns = Turns(device, shapes=plan.graph_shapes)

    @property
    def replays(self) -> int:
        """Batches that were replayed."""
        return self._whole.replays

    def __call__(self, batch: Any) -> Any:
        """Train on one batch, on the current stream."""
        turns = self._turns
        if turns is None:
            return self._whole(batch)
        before = self.replays
        returned = self._whole(batch) if turns.begin() else self._whole.call_eagerly(batch)
        if turns.end(replayed=self.replays > before):
            log.info("plan %s: %s", self._plan.name, turns.decision)
            if not turns.pays:
                self._whole.give_up(str(turns.decision))
        return returned

    def begin_pass(self) -> None:
        if self._turns is not None:
            self._turns.begin_pass()

    def end_pass(self) -> None:
        if self._turns is not None:
            self._turns.pause()

    def report(self) -> GraphReport:
        decision = None if self._turns is None else self._turns.decision
        return replace(self._whole.report(), decision=decision)

    def close(self) -> None:
        """Drop all graphs. What can be captured is captured again when it is due."""
        self._whole.close()
