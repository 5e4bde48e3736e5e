"""Makes steps that train a model with an optimizer and a loss function."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch

from headrace.capture import scales_on_device, warn_not_captured
from headrace.device import Device
from headrace.engine.build.checks import (
    check_numbers,
    check_types,
    warn_of_expandable_segments,
    warn_of_half_precision,
)
from headrace.engine.build.step_builder import StepBuilder
from headrace.engine.graphs.graph_state import release_graph_state
from headrace.engine.graphs.ladder import GraphedStep, Ladder
from headrace.engine.loss.compiled import CompiledLoss, CompileReport, compile_obstacle
from headrace.engine.loss.forward import Forward, LossFunction
from headrace.engine.loss.loss_function import require_loss_function
from headrace.engine.stages import Step
from headrace.engine.step.eager import EagerStep
from headrace.engine.step.evaluation import EvaluationStep
from headrace.engine.step.halving import HalvingStep, require_halvable
from headrace.engine.step.parts import StepParts
from headrace.engine.step.restoring import RestoringStep, SavedBuffers
from headrace.engine.streams.lanes import Lanes
from headrace.engine.update.accelerate_wrappers import unwrap_optimizer
from headrace.engine.update.clipping import Clipping
from headrace.engine.update.ema import Ema
from headrace.engine.update.group import Group
from headrace.engine.update.nonfinite import NonFinitePolicy, UpdateGuard
from headrace.engine.update.scheduler_kinds import schedule_of
from headrace.engine.update.schedules import LearningRateFunction, Scheduler, SchedulerInterval
from headrace.engine.update.update import Update
from headrace.errors import StepError
from headrace.parallel import close_before_group, parallelism_of, ranks_of, unwrap
from headrace.plan import Plan


class ModelStepBuilder(StepBuilder):
    """Makes steps that train a model with an optimizer and a loss function."""

    graphs: Ladder | None

    def __init__(
        self,
        device: Device,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        *,
        clip_norm: float | None,
        accumulate: int,
        accumulate_by: Literal["weight", "count"],
        scheduler: Scheduler | None,
        scheduler_every: SchedulerInterval,
        lr: LearningRateFunction | None,
        ema_decay: float | None,
        policy: NonFinitePolicy,
        restores_buffers: bool,
        on_oom: Literal["raise", "halve"],
        carry: Any,
    ) -> None:
        check_numbers(accumulate, accumulate_by, clip_norm, on_oom)
        optimizer = unwrap_optimizer(optimizer, accumulate)
        check_types(device, model, optimizer, has_scheduler=scheduler is not None)
        super().__init__(device, carry)
        require_loss_function(loss, carries=self.carry is not None)
        if self.carry is not None and policy.max_skipped is not None:
            raise StepError(
                "on_nonfinite skips updates, and there is a `carry`: the state after a batch that "
                "is not finite would spoil all later ones; expected 'report' or 'stop'"
            )
        self._model = model
        self.ranks = ranks_of(model)
        self._optimizer, self._loss, self._policy = optimizer, loss, policy
        self._halves = on_oom == "halve"
        self.schedule = schedule_of(scheduler, scheduler_every, optimizer, accumulate, lr)
        self.ema = None if ema_decay is None else Ema(model, ema_decay)
        self._clipping = (
            None if clip_norm is None else Clipping(device, model, optimizer, clip_norm)
        )
        self._buffers = SavedBuffers(model) if restores_buffers and not self.ranks.several else None
        self._group = Group(
            device,
            optimizer,
            self.ranks,
            size=accumulate,
            by_count=accumulate_by == "count",
            sharded=parallelism_of(model) == "fsdp",
        )
        if accumulate > 1 and accumulate_by == "weight":
            warn_of_half_precision(device, optimizer)
        self._parts: StepParts | None = None

    @property
    def model(self) -> torch.nn.Module:
        return self._model

    @property
    def parts(self) -> StepParts:
        assert self._parts is not None, "call apply_plan first"
        return self._parts

    def apply_plan(self, plan: Plan) -> None:
        device = self.device
        if plan.graphs == "auto" and (self._halves or self.ranks.several):
            # A graph's memory is fixed at capture; and ranks would decide each for itself.
            plan = replace(plan, graphs="off")
        if self._halves:
            require_halvable(self.model, plan, carries=self.carry is not None)
        if self.carry is not None:
            self.carry.keep_in_place(plan.graphs != "off" and device.captures)
        self._parts = self._build_parts(plan)
        self.graphs = None
        if plan.graphs != "off" and device.captures:
            self.graphs = Ladder(self._parts, plan)
            if self.ranks.uses_nccl:
                close_before_group(self.graphs)
                warn_of_expandable_segments(device)
            return
        release_graph_state(self._parts)
        if plan.graphs == "on":
            warn_not_captured(device, plan.name, f"{device} captures no graphs")

    def _build_parts(self, plan: Plan) -> StepParts:
        device, optimizer, spread = self.device, self._optimizer, parallelism_of(self.model)
        if plan.precision == "fp16" and spread == "fsdp":
            raise StepError(
                "fp16 under FSDP2: each rank would check only its own shard for infinite "
                "gradients; use bf16, or DDP"
            )
        previous = None if self._parts is None else self._parts.update
        scaler = guard = None
        if plan.precision == "fp16":
            scaler = previous.scaler if previous is not None else None
            scaler = scaler or torch.amp.GradScaler(device.torch_device.type)
        elif self._policy.max_skipped is not None:
            guard = previous.guard if previous is not None else None
            on_device = scales_on_device(optimizer)
            guard = guard or UpdateGuard(device, self._policy.max_skipped, on_device)
        loss = self._loss
        if plan.compile and device.compiles:
            loss = CompiledLoss(loss, device, compile_obstacle(device, loss, self.model))
        forward = Forward(
            device,
            self.model,
            optimizer,
            loss,
            user_loss=self._loss,
            precision=plan.precision,
            distributed=spread != "plain",
            carry=self.carry,
        )
        update = Update(
            device,
            optimizer,
            self.ranks,
            self._clipping,
            scaler=scaler,
            guard=guard,
            ema=self.ema,
        )
        return StepParts(device, forward, self._group, update, self.ranks, spread)

    @property
    def compiled(self) -> CompileReport:
        loss = self.parts.forward.loss
        if isinstance(loss, CompiledLoss):
            return loss.report()
        return CompileReport(compiled=False, why=f"Headrace does not compile for {self.device}")

    @property
    def updates(self) -> int:
        return self._group.updates

    def begin_epoch(self, *, from_start: bool) -> None:
        """Check again what the user may have changed since the last epoch, in the loss function or
        the model. No Python code runs for each parameter or module: a pass may be short. With
        accumulation watch two batches, because only the second one can change gradients of the
        first. (Graphs look for changes before each batch.)"""
        self.parts.forward.watch(min(2, self._group.size))
        for part in (self._clipping, self._buffers):
            if part is not None:
                part.begin_epoch()
        super().begin_epoch(from_start=from_start)

    def batches_for(self, updates: int) -> int:
        return self._group.batches_for(updates)

    def lanes(self, plan: Plan, *, annotate: bool) -> Lanes:
        return Lanes(self.device, plan, split=plan.split_backward, annotate=annotate)

    def step(self, lanes: Lanes) -> Step:
        eager = EagerStep(self.parts, lanes)
        step: Step = eager
        if self.graphs is not None:
            step = GraphedStep(eager, self.graphs)
        elif self._halves:
            step = HalvingStep(eager)
        if self._buffers is not None:
            step = RestoringStep(step, self._buffers, self.device, lanes)
        return step

    def is_in_eval_mode(self) -> bool:
        return not any(module.training for module in unwrap(self.model).modules())

    def with_model(self, method: str) -> ModelStepBuilder:
        return self

    def evaluation(self, plan: Plan, *, annotate: bool) -> tuple[Lanes, Step]:
        lanes = Lanes(self.device, plan, split=False, annotate=annotate)
        return lanes, EvaluationStep(self.parts.forward, lanes)
