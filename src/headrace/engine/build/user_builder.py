"""Makes steps that call the user's own step function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headrace.device import Device
from headrace.engine.build.step_builder import StepBuilder
from headrace.engine.graphs.function_ladder import FunctionLadder
from headrace.engine.loss.compiled import CompileReport
from headrace.engine.stages import Step
from headrace.engine.step.user_step import StepFunction, UpdateCount, UserStep
from headrace.engine.streams.lanes import Lanes
from headrace.errors import StepError
from headrace.plan import Plan

if TYPE_CHECKING:
    from headrace.engine.build.model_builder import ModelStepBuilder


class UserStepBuilder(StepBuilder):
    """Makes steps that call the user's own step function, which also keeps its own state."""

    parts = None
    graphs: FunctionLadder | None

    def __init__(self, device: Device, step: StepFunction, carry: Any = None) -> None:
        super().__init__(device, carry)
        self._step = step
        self._count = UpdateCount()

    def apply_plan(self, plan: Plan) -> None:
        self.graphs = None
        if self.carry is not None:
            self.carry.keep_in_place(False)
        if plan.graphs == "on" or (plan.graphs == "auto" and self.device.captures):
            self.graphs = FunctionLadder(self._step, self.device, plan, self.carry)

    @property
    def compiled(self) -> CompileReport:
        return CompileReport(compiled=False, why="it is your own step (Engine.from_step)")

    @property
    def model(self) -> torch.nn.Module:
        raise AttributeError("an engine from Engine.from_step has no model")

    def with_model(self, method: str) -> ModelStepBuilder:
        if method == "evaluate":
            raise StepError(
                "evaluate needs a model and a loss function: this engine is from Engine.from_step"
            )
        raise StepError(
            "an engine from Engine.from_step has no state: save the state of your step yourself"
        )

    @property
    def updates(self) -> int:
        return self._count.updates

    def step(self, lanes: Lanes) -> Step:
        return UserStep(self._step, self.device, lanes, self._count, self.carry, self.graphs)
