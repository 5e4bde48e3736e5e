"""What makes the step of each pass."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

import torch

from headrace.device import Device
from headrace.engine.graphs.function_ladder import FunctionLadder
from headrace.engine.graphs.ladder import Ladder
from headrace.engine.loss.carried_state import CarriedState
from headrace.engine.loss.carry import Carry
from headrace.engine.loss.compiled import CompileReport
from headrace.engine.stages import Step
from headrace.engine.step.parts import StepParts
from headrace.engine.streams.lanes import Lanes
from headrace.engine.update.ema import Ema
from headrace.engine.update.schedules import Schedule
from headrace.parallel import SINGLE, Ranks
from headrace.plan import Plan

if TYPE_CHECKING:
    from headrace.engine.build.model_builder import ModelStepBuilder


class StepBuilder(abc.ABC):
    """Makes the step of each pass, and keeps what the passes of an engine share."""

    def __init__(self, device: Device, carry: Any) -> None:
        spec = Carry.of(carry)
        self.device = device
        self.carry = None if spec is None else CarriedState(spec, device)
        self.ranks: Ranks = SINGLE
        self.schedule: Schedule | None = None
        self.ema: Ema | None = None
        self.graphs: Ladder | FunctionLadder | None = None

    @property
    @abc.abstractmethod
    def parts(self) -> StepParts | None: ...

    @property
    @abc.abstractmethod
    def model(self) -> torch.nn.Module: ...

    @property
    @abc.abstractmethod
    def compiled(self) -> CompileReport: ...

    @property
    @abc.abstractmethod
    def updates(self) -> int:
        """Updates so far, over all passes."""

    @abc.abstractmethod
    def apply_plan(self, plan: Plan) -> None:
        """Set up what the plan asks for. Warn about what is not possible here."""

    @abc.abstractmethod
    def with_model(self, method: str) -> ModelStepBuilder:
        """This builder, if it trains a model; else raise, for the engine's `method`."""

    @abc.abstractmethod
    def step(self, lanes: Lanes) -> Step: ...

    def begin_epoch(self, *, from_start: bool) -> None:
        """Prepare for a pass. `from_start`: it begins at its epoch's first batch."""
        if self.carry is not None:
            self.carry.begin_epoch(from_start=from_start)

    def batches_for(self, updates: int) -> int:
        """How many more batches the next `updates` updates take."""
        return updates

    def is_in_eval_mode(self) -> bool:
        """Whether no module of the model is in training mode."""
        return False

    def lanes(self, plan: Plan, *, annotate: bool) -> Lanes:
        return Lanes(self.device, plan, split=False, annotate=annotate)
