"""Builds the stages of a pass from the plan and the engine's options.

Only this module decides, by the options, which stages a pass has. A step builder makes the step:
`ModelStepBuilder` one that trains a model, `UserStepBuilder` one that calls the user's own.
`open_pass` puts feed, step, run-ahead window and recorder together.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch

from headrace.capture import scales_on_device, warn_not_captured
from headrace.data import (
    Aligned,
    BatchCache,
    Batches,
    BlockingCopies,
    Feed,
    Prefetcher,
    first_of,
)
from headrace.device import Device, deterministic_kernels
from headrace.engine.graphs.function_ladder import FunctionLadder
from headrace.engine.graphs.graph_state import release_graph_state
from headrace.engine.graphs.ladder import GraphedStep, Ladder
from headrace.engine.loop.loop import Observers, Pass, Stages, Window
from headrace.engine.loop.recorder import HoldingRecorder, Recorder
from headrace.engine.loss.carry import CarriedState, Carry
from headrace.engine.loss.compiled import CompiledLoss, CompileReport, compile_obstacle
from headrace.engine.loss.forward import Forward, LossFunction
from headrace.engine.loss.loss_function import require_loss_function
from headrace.engine.stages import Progress, Standing, Step
from headrace.engine.state.resume import Start
from headrace.engine.step.halving import HalvingStep, require_halvable
from headrace.engine.step.restoring import RestoringStep, SavedBuffers
from headrace.engine.step.step import (
    EagerStep,
    EvaluationStep,
    StepFunction,
    StepParts,
    UpdateCount,
    UserStep,
)
from headrace.engine.streams.host_sync import HostSync
from headrace.engine.streams.lanes import Lanes
from headrace.engine.streams.run_ahead import RunAhead
from headrace.engine.update.accelerate_wrappers import unwrap_optimizer
from headrace.engine.update.clipping import Clipping
from headrace.engine.update.ema import Ema
from headrace.engine.update.group import Group
from headrace.engine.update.nonfinite import NonFinitePolicy, UpdateGuard
from headrace.engine.update.schedules import (
    LearningRateFunction,
    Schedule,
    Scheduler,
    SchedulerInterval,
    schedule_of,
)
from headrace.engine.update.update import Update
from headrace.engine.values.deferred import DeferredScalars, SummedScalars
from headrace.errors import StepError
from headrace.parallel import SINGLE, Ranks, close_before_group, parallelism_of, ranks_of, unwrap
from headrace.plan import Plan
from headrace.schema import require_whole


class StepBuilder(Protocol):
    """Makes the step of each pass, and keeps what the passes of an engine share."""

    ranks: Ranks
    schedule: Schedule | None

    @property
    def parts(self) -> StepParts | None: ...

    @property
    def graphs(self) -> Ladder | FunctionLadder | None: ...

    @property
    def compiled(self) -> CompileReport: ...

    def apply_plan(self, plan: Plan) -> None:
        """Set up what the plan asks for. Warn about what is not possible here."""
        ...

    @property
    def updates(self) -> int:
        """Updates so far, over all passes."""
        ...

    @property
    def carry(self) -> CarriedState | None: ...

    def begin_epoch(self, *, from_start: bool) -> None:
        """Prepare for a pass. `from_start`: it begins at its epoch's first batch."""
        ...

    def batches_for(self, updates: int) -> int:
        """How many more batches the next `updates` updates take."""
        ...

    @property
    def model(self) -> torch.nn.Module: ...

    @property
    def ema(self) -> Ema | None: ...

    def is_in_eval_mode(self) -> bool:
        """Whether no module of the model is in training mode."""
        ...

    def with_model(self, method: str) -> ModelStepBuilder:
        """This builder, if it trains a model; else raise, for the engine's `method`."""
        ...

    def lanes(self, plan: Plan, *, annotate: bool) -> Lanes: ...

    def step(self, lanes: Lanes) -> Step: ...


class ModelStepBuilder:
    """Makes steps that train a model with an optimizer and a loss function."""

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
        _check_numbers(accumulate, accumulate_by, clip_norm, on_oom)
        optimizer = unwrap_optimizer(optimizer, accumulate)
        _check_types(device, model, optimizer, has_scheduler=scheduler is not None)
        spec = Carry.of(carry)
        self.carry = None if spec is None else CarriedState(spec, device)
        require_loss_function(loss, carries=self.carry is not None)
        if self.carry is not None and policy.max_skipped is not None:
            raise StepError(
                "on_nonfinite skips updates, and there is a `carry`: the state after a batch that "
                "is not finite would spoil all later ones; expected 'report' or 'stop'"
            )
        self.device, self.model, self.ranks = device, model, ranks_of(model)
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
            _warn_of_half_precision(device, optimizer)
        self._parts: StepParts | None = None
        self.graphs: Ladder | None = None

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
                _warn_of_expandable_segments(device)
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
        if self.carry is not None:
            self.carry.begin_epoch(from_start=from_start)

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


class UserStepBuilder:
    """Makes steps that call the user's own step function, which also keeps its own state."""

    parts = None
    ema = None

    def __init__(self, device: Device, step: StepFunction, carry: Any = None) -> None:
        self._device, self._step = device, step
        spec = Carry.of(carry)
        self.carry = None if spec is None else CarriedState(spec, device)
        self._count = UpdateCount()
        self.ranks: Ranks = SINGLE
        self.schedule: Schedule | None = None
        self.graphs: FunctionLadder | None = None

    def apply_plan(self, plan: Plan) -> None:
        self.graphs = None
        if self.carry is not None:
            self.carry.keep_in_place(False)
        if plan.graphs == "on" or (plan.graphs == "auto" and self._device.captures):
            self.graphs = FunctionLadder(self._step, self._device, plan, self.carry)

    @property
    def compiled(self) -> CompileReport:
        return CompileReport(compiled=False, why="it is your own step (Engine.from_step)")

    @property
    def model(self) -> torch.nn.Module:
        raise AttributeError("an engine from Engine.from_step has no model")

    def is_in_eval_mode(self) -> bool:
        return False

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

    def begin_epoch(self, *, from_start: bool) -> None:
        """Reset the carried state, if it is due. A user's step is not checked."""
        if self.carry is not None:
            self.carry.begin_epoch(from_start=from_start)

    def batches_for(self, updates: int) -> int:
        return updates

    def lanes(self, plan: Plan, *, annotate: bool) -> Lanes:
        return Lanes(self._device, plan, split=False, annotate=annotate)

    def step(self, lanes: Lanes) -> Step:
        return UserStep(self._step, self._device, lanes, self._count, self.carry, self.graphs)


@dataclass(frozen=True, slots=True)
class PassOptions:
    """The options that all passes of an engine have in common."""

    device: Device
    plan: Plan
    ranks: Ranks
    cache: BatchCache | None
    deterministic: bool
    loader_timeout: float


def open_pass(
    options: PassOptions,
    loader: Iterable[Any],
    lanes: Lanes,
    step: Step,
    observers: Observers,
    start: Start,
    *,
    epoch: int,
    limit: int | None = None,
    parts: StepParts | None = None,
) -> Pass:
    """Build a pass over a loader, beginning at `start`, of at most `limit` batches. `parts` are the
    training step's; None for a pass that evaluates, or calls the user's step."""
    device, plan, ranks = options.device, options.plan, options.ranks
    feed = _feed(options, loader, lanes, start, limit)
    batches: Batches = feed
    if plan.prefetch_depth == 0:
        batches = BlockingCopies(feed, device, lanes.transfers)
    ahead = RunAhead(device, plan.run_ahead_steps, plan.run_ahead_bytes)
    window: Window = ahead
    if plan.sync != "none":
        window = HostSync(ahead, device, plan, lanes.backward)
    recorder = _recorder(options, lanes, start, parts)
    standing = Standing() if parts is None else parts.group.standing
    progress = Progress(epoch, start.first, 0, start.cursor, standing)
    settings = partial(_torch_settings, device, plan, deterministic=options.deterministic)
    stages = Stages(device, feed, batches, step, window, recorder, lanes, ranks, settings, limit)
    return Pass(stages, observers, progress)


@contextmanager
def _torch_settings(device: Device, plan: Plan, *, deterministic: bool) -> Iterator[None]:
    """Inside the block PyTorch uses the plan's precision and the engine's choice of kernels."""
    with device.numerics(plan.precision), deterministic_kernels(deterministic):
        yield


def _feed(
    options: PassOptions,
    loader: Iterable[Any],
    lanes: Lanes,
    start: Start,
    limit: int | None,
) -> Feed:
    device, plan, ranks = options.device, options.plan, options.ranks
    source = loader if limit is None else first_of(loader, limit)
    if ranks.several:
        ended = start.cursor.ended
        source = Aligned(loader, ranks, device.ledger, limit=limit, ended=ended)
    prefetcher = Prefetcher(
        source,
        device,
        plan.prefetch_depth,
        pin=plan.pin,
        transfers=lanes.transfers,
        owner=lanes.forward,
        runs_on_owner=lanes.forward is lanes.caller,
        cache=options.cache,
        loader_timeout=options.loader_timeout,
        loader_rng=start.loader_rng,
    )
    return Feed(prefetcher, first=start.first, start=start.cursor, limit=limit)


def _recorder(
    options: PassOptions, lanes: Lanes, start: Start, parts: StepParts | None
) -> Recorder:
    device, plan, ranks = options.device, options.plan, options.ranks
    kind = SummedScalars if ranks.several else DeferredScalars
    scalars = kind(device, plan.deferred_every, stream=lanes.losses, ranks=ranks)
    pending = start.pending
    if parts is None or parts.update.guard is None:
        return Recorder(scalars, lanes, restored=pending, loss=start.loss)
    # The value of an open group's last batch is not complete before the group's update.
    held = None
    if parts.group.is_open and pending and pending[-1].step == start.first - 1:
        pending, held = pending[:-1], pending[-1]
    return HoldingRecorder(scalars, lanes, restored=pending, loss=start.loss, held=held)


def _warn_of_expandable_segments(device: Device) -> None:
    """NCCL registers the memory of a captured collective, and segments that grow move under it."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if re.search(r"expandable_segments\s*:\s*true", os.environ.get(name, ""), re.IGNORECASE):
            device.warn_once(
                "expandable segments",
                "%s has expandable_segments:True, and the plan captures NCCL's collectives: a "
                "replay may crash or hang; unset it, or use a plan with graphs = off",
                name,
            )


def _warn_of_half_precision(device: Device, optimizer: torch.optim.Optimizer) -> None:
    """Gradients of loss × weight may be larger than float16 can hold, where those of the loss are
    not. bfloat16 has the range of float32."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.dtype == torch.float16 for p in parameters):
        device.warn_once(
            "accumulation in float16",
            "parameters are float16, and accumulate multiplies each loss by its batch's weight: "
            "gradients over 65,504 become infinite. Use float32 parameters with precision='fp16', "
            "or accumulate_by='count'",
        )


def _check_numbers(
    accumulate: object, accumulate_by: object, clip_norm: float | None, on_oom: object
) -> None:
    require_whole("accumulate", accumulate, 1, StepError)
    if accumulate_by not in ("weight", "count"):
        raise StepError(f"accumulate_by = {accumulate_by!r}: expected 'weight' or 'count'")
    if clip_norm is not None and not clip_norm > 0:
        raise StepError(f"clip_norm = {clip_norm!r}: expected a number above 0")
    if on_oom not in ("raise", "halve"):
        raise StepError(f"on_oom = {on_oom!r}: expected 'raise' or 'halve'")


def _check_types(
    device: Device,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    has_scheduler: bool,
) -> None:
    if not isinstance(model, torch.nn.Module):
        raise StepError(f"model is a {type(model).__name__}: expected a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        without = "a scheduler without an optimizer: " if has_scheduler else ""
        raise StepError(
            f"{without}optimizer is a {type(optimizer).__name__}: expected one "
            "torch.optim.Optimizer (for several, or updates of your own, use Engine.from_step)"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise StepError(
            f"{type(optimizer).__name__} needs a closure to compute the loss several times per "
            "step, which no plan supports. Use another optimizer, or Engine.from_step with a step "
            "of your own"
        )
    for parameter in model.parameters():
        if not device.holds(parameter):
            raise StepError(
                f"the model is on {parameter.device}, but the engine runs on {device}: call "
                f"model.to('{device.torch_device}') before you create the optimizer"
            )
