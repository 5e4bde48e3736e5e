"""From options and a plan to the stages of a pass: the one module that looks at options.

An engine trains a model (`ModelTraining`) or calls a step of the user's own (`OwnTraining`). Either
is told which plan to follow, and makes its step for a pass; `open_pass` puts feed, step, window and
recorder together.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch

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
from headrace.engine import graph_rules
from headrace.engine.accelerated import plain_optimizer
from headrace.engine.clipping import Clipping
from headrace.engine.compiled import CompiledLoss, CompileReport
from headrace.engine.deferred import DeferredScalars, SummedScalars
from headrace.engine.ema import Ema
from headrace.engine.forward import Forward, LossFunction
from headrace.engine.graphed import GraphedStep, StepGraphs, say_uncaptured
from headrace.engine.group import Group
from headrace.engine.halving import HalvingStep, require_halvable
from headrace.engine.host_sync import HostSync
from headrace.engine.lanes import Lanes
from headrace.engine.loop import Observers, Pass, Stages, Window
from headrace.engine.loss_function import require_loss_function
from headrace.engine.nonfinite import NonFinitePolicy, UpdateGuard
from headrace.engine.recorder import HoldingRecorder, Recorder
from headrace.engine.restoring import KeptBuffers, RestoringStep
from headrace.engine.resume import Start
from headrace.engine.run_ahead import RunAhead
from headrace.engine.schedules import Every, Schedule, Scheduler, schedule_of
from headrace.engine.stages import Progress, Step
from headrace.engine.step import EagerStep, EvaluationStep, OwnStep, Parts, StepFunction
from headrace.engine.update import Update, scales_on_device
from headrace.errors import StepError
from headrace.parallel import SINGLE, Ranks, parallelism_of, ranks_of
from headrace.plan import Plan


class Training(Protocol):
    """What an engine trains."""

    ranks: Ranks
    schedule: Schedule | None

    @property
    def parts(self) -> Parts | None: ...

    @property
    def graphs(self) -> StepGraphs | None: ...

    @property
    def compiled(self) -> CompileReport: ...

    def follow(self, plan: Plan) -> None:
        """Set up what the plan asks for, or say why it is not there."""
        ...

    def begin_epoch(self) -> None: ...

    def batches_for(self, updates: int) -> int:
        """How many batches so many updates take, from here on."""
        ...

    def lanes(self, plan: Plan, *, annotate: bool) -> Lanes: ...

    def step(self, lanes: Lanes) -> Step: ...


class ModelTraining:
    """A model, its optimizer and its loss function."""

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
        scheduler_every: Every,
        ema_decay: float | None,
        policy: NonFinitePolicy,
        restores: bool,
        on_oom: Literal["raise", "halve"],
    ) -> None:
        _check_numbers(accumulate, accumulate_by, clip_norm, on_oom)
        optimizer = plain_optimizer(optimizer, accumulate)
        _check_kinds(device, model, optimizer, has_scheduler=scheduler is not None)
        require_loss_function(loss)
        self.device, self.model, self.ranks = device, model, ranks_of(model)
        self._optimizer, self._loss, self._policy = optimizer, loss, policy
        self._halves = on_oom == "halve"
        self.schedule = schedule_of(scheduler, scheduler_every, optimizer, accumulate)
        self.ema = None if ema_decay is None else Ema(model, ema_decay)
        self._clipping = (
            None if clip_norm is None else Clipping(device, model, optimizer, clip_norm)
        )
        self._buffers = KeptBuffers(model) if restores and not self.ranks.several else None
        self._group = Group(
            device,
            optimizer,
            self.ranks,
            size=accumulate,
            by_count=accumulate_by == "count",
            sharded=parallelism_of(model) == "fsdp",
        )
        self._parts: Parts | None = None
        self.graphs: StepGraphs | None = None

    @property
    def parts(self) -> Parts:
        assert self._parts is not None, "follow a plan first"
        return self._parts

    def follow(self, plan: Plan) -> None:
        device = self.device
        if self._halves:
            require_halvable(self.model, plan)
        self._parts = self._parts_under(plan)
        self.graphs = None
        if plan.graphs != "off" and device.captures:
            self.graphs = StepGraphs(self._parts, plan)
            return
        graph_rules.release(self._parts)
        if plan.graphs != "off":
            say_uncaptured(device, plan.name, f"{device} captures no graphs")

    def _parts_under(self, plan: Plan) -> Parts:
        device, optimizer, spread = self.device, self._optimizer, parallelism_of(self.model)
        if plan.precision == "fp16" and spread == "fsdp":
            raise StepError(
                "fp16 under FSDP2: each rank would see infinite gradients of its own shard alone; "
                "use bf16, or DDP"
            )
        before = None if self._parts is None else self._parts.update
        scaler = guard = None
        if plan.precision == "fp16":
            scaler = before.scaler if before is not None else None
            scaler = scaler or torch.amp.GradScaler(device.torch_device.type)
        elif self._policy.most is not None:
            guard = before.guard if before is not None else None
            on_device = scales_on_device(optimizer)
            guard = guard or UpdateGuard(device, self._policy.most, on_device)
        compiles = plan.compile and device.compiles
        forward = Forward(
            device,
            self.model,
            optimizer,
            CompiledLoss(self._loss, device) if compiles else self._loss,
            written=self._loss,
            precision=plan.precision,
            spread=spread != "plain",
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
        return Parts(device, forward, self._group, update, self.ranks, spread)

    @property
    def compiled(self) -> CompileReport:
        loss = self.parts.forward.loss
        if isinstance(loss, CompiledLoss):
            return loss.report()
        return CompileReport(compiled=False, why=f"Headrace compiles nothing for {self.device}")

    def begin_epoch(self) -> None:
        """The loss function, or the model's parameters, may be others than before. The first
        batches are watched: a second one may find gradients of a first."""
        self.parts.forward.watch(min(2, self._group.size))
        for part in (self._clipping, self.graphs, self._buffers):
            if part is not None:
                part.begin_epoch()

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

    def evaluation(self, plan: Plan, *, annotate: bool) -> tuple[Lanes, Step]:
        lanes = Lanes(self.device, plan, split=False, annotate=annotate)
        return lanes, EvaluationStep(self.parts.forward, lanes)


class OwnTraining:
    """A step of the user's own, which does all of it: its state is the user's, too."""

    parts = graphs = None

    def __init__(self, device: Device, step: StepFunction) -> None:
        self._device, self._step = device, step
        self.ranks: Ranks = SINGLE
        self.schedule: Schedule | None = None

    def follow(self, plan: Plan) -> None:
        if plan.graphs != "off":
            say_uncaptured(self._device, plan.name, "it is your own")

    @property
    def compiled(self) -> CompileReport:
        return CompileReport(compiled=False, why="it is your own (Engine.from_step)")

    def begin_epoch(self) -> None:
        """Nothing is kept from epoch to epoch."""

    def batches_for(self, updates: int) -> int:
        return updates

    def lanes(self, plan: Plan, *, annotate: bool) -> Lanes:
        return Lanes(self._device, plan, split=False, annotate=annotate)

    def step(self, lanes: Lanes) -> Step:
        return OwnStep(self._step, self._device, lanes)


@dataclass(frozen=True, slots=True)
class PassOptions:
    """What every pass of an engine is made with."""

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
    parts: Parts | None = None,
) -> Pass:
    """A pass over a loader, from `start` on. `parts` are what a training step is made of; without
    them nothing is learned."""
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
    standing = (0, 0) if parts is None else parts.group.standing
    progress = Progress(epoch, start.first, 0, start.cursor, standing)
    settings = partial(_computing, device, plan, deterministic=options.deterministic)
    stages = Stages(device, feed, batches, step, window, recorder, lanes, ranks, settings, limit)
    return Pass(stages, observers, progress)


@contextmanager
def _computing(device: Device, plan: Plan, *, deterministic: bool) -> Iterator[None]:
    """Inside the block PyTorch computes as the plan and the engine say."""
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
        source = Aligned(loader, ranks, device.ledger, most=limit, ended=ended)
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
        draws=start.draws,
    )
    return Feed(prefetcher, first=start.first, start=start.cursor, limit=limit)


def _recorder(options: PassOptions, lanes: Lanes, start: Start, parts: Parts | None) -> Recorder:
    device, plan, ranks = options.device, options.plan, options.ranks
    scalars: Any = DeferredScalars(device, plan.deferred_every, stream=lanes.losses, ranks=ranks)
    if ranks.several:
        scalars = SummedScalars(scalars, device)
    pending = start.pending
    if parts is None or parts.update.guard is None:
        return Recorder(scalars, lanes, restored=pending, loss=start.loss)
    held = None
    if parts.group.is_open and pending and pending[-1].step == start.first - 1:
        pending, held = pending[:-1], pending[-1]
    return HoldingRecorder(scalars, lanes, restored=pending, loss=start.loss, held=held)


def _check_numbers(
    accumulate: object, accumulate_by: object, clip_norm: float | None, on_oom: object
) -> None:
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise StepError(f"accumulate = {accumulate!r}: expected a whole number, 1 or more")
    if accumulate_by not in ("weight", "count"):
        raise StepError(f"accumulate_by = {accumulate_by!r}: expected 'weight' or 'count'")
    if clip_norm is not None and not clip_norm > 0:
        raise StepError(f"clip_norm = {clip_norm!r}: expected a number above 0")
    if on_oom not in ("raise", "halve"):
        raise StepError(f"on_oom = {on_oom!r}: expected 'raise' or 'halve'")


def _check_kinds(
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
            f"{type(optimizer).__name__} calls the loss itself, through a closure: that cannot be "
            "planned. Use another optimizer, or Engine.from_step with a step of your own"
        )
    for parameter in model.parameters():
        if not device.holds(parameter):
            raise StepError(
                f"the model is on {parameter.device}, the engine runs on {device}: call "
                f"model.to('{device.torch_device}') before the optimizer is made"
            )
