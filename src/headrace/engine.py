"""The engine: one loop, run under any plan, with the same losses under all of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

from headrace import capturable, engine_state
from headrace.batchcache import BatchCache
from headrace.capturing import GraphedStep, GraphReport
from headrace.compiling import CompiledLoss
from headrace.deferred import DeferredValues, Scalar
from headrace.device import Device, open_device
from headrace.ema import Ema
from headrace.errors import StepError
from headrace.loop import Loop, StepInfo
from headrace.plan import Plan
from headrace.ranks import SINGLE, Ranks
from headrace.results import EpochResult
from headrace.step import LossFunction, LossParts, TrainingStep
from headrace.wrapped import Spread, reshard

_NOT_ANNOTATED = nullcontext()
StepFunction = Callable[[Any], torch.Tensor | Mapping[str, Scalar] | None]


class Engine:
    """Runs a training loop under a plan.

        engine = Engine(model, optimizer, loss_fn, plan="pipeline")
        for epoch in range(10):
            result = engine.epoch(loader)
            print(result.mean_loss, result.waits.table())

    `loss(model, batch)` returns a 0-dim tensor, or a dict with `loss`, optionally `weight`, and
    metrics. `device` is where the model lies, unless given. `scheduler` is stepped after each
    update, or each epoch with `scheduler_every="epoch"`. `precision` overrides the plan's.
    `on_step` and `on_epoch` are called with a `StepInfo` and an `EpochResult`.

    The model may be DDP's or FSDP2's (`fully_shard`): then each rank's engine is given that rank's
    batches, and losses and metrics are those of all ranks together (docs/scaling.md).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        *,
        plan: Plan | str | Path | Mapping[str, Any] = "pipeline",
        device: Device | str | torch.device | None = None,
        scheduler: LRScheduler | None = None,
        scheduler_every: Literal["step", "epoch"] = "step",
        clip_norm: float | None = None,
        accumulate: int = 1,
        precision: str | None = None,
        ema_decay: float | None = None,
        deterministic: bool = False,
        nvtx: bool = False,
        on_step: Callable[[StepInfo], object] | None = None,
        on_epoch: Callable[[EpochResult], object] | None = None,
    ) -> None:
        self._set_up(plan, device or _where(model), precision, deterministic, nvtx)
        self.model = model
        self.ema = None if ema_decay is None else Ema(model, ema_decay)
        self.on_step, self.on_epoch = on_step, on_epoch
        self._step: TrainingStep | None = TrainingStep(
            self.device,
            model,
            optimizer,
            loss,
            precision=self.plan.precision,
            clip_norm=clip_norm,
            accumulate=accumulate,
            scheduler=scheduler,
            scheduler_every=scheduler_every,
            ema=self.ema,
        )
        self._loss = loss
        self._follow_plan()

    @classmethod
    def from_step(
        cls,
        step: StepFunction,
        *,
        device: Device | str | torch.device = "auto",
        plan: Plan | str | Path | Mapping[str, Any] = "pipeline",
        deterministic: bool = False,
        nvtx: bool = False,
        on_step: Callable[[StepInfo], object] | None = None,
        on_epoch: Callable[[EpochResult], object] | None = None,
    ) -> Engine:
        """An engine around a step of your own (two optimizers, a GAN): `step(batch)` does all of
        it, on one stream, and returns what is to be reported, as a loss function does, or None.
        Prefetch, deferral, run-ahead and host waits are the plan's."""
        engine = cls.__new__(cls)
        engine._set_up(plan, device, None, deterministic, nvtx)
        engine._step, engine._custom = None, step
        engine.on_step, engine.on_epoch = on_step, on_epoch
        engine._follow_plan()
        return engine

    def _set_up(
        self, plan: Any, device: Any, precision: str | None, deterministic: bool, nvtx: bool
    ) -> None:
        self._precision = precision
        self.plan = self._own(Plan.of(plan))
        self.device = open_device(device)
        self.epochs = 0
        self.last_result: EpochResult | None = None
        self._custom: StepFunction | None = None
        self._deterministic = deterministic
        self._nvtx = nvtx
        self._graphed: GraphedStep | None = None
        self._running: Loop | None = None
        self._random_states: dict[str, Any] | None = None
        self._cache: BatchCache | None = None

    def _follow_plan(self) -> None:
        """Set up what the plan asks for, or say why it is not there."""
        plan, step = self.plan, self._step
        self._cache = BatchCache(plan.cache_batches) if plan.cache_batches else None
        if step is not None:
            step.set_precision(plan.precision)
            compiled = plan.compile and self.device.compiles
            step.loss = CompiledLoss(self._loss, self.device) if compiled else self._loss
            if plan.graphs == "off" or not self.device.captures:
                capturable.release(step)
            else:
                self._graphed = GraphedStep(step, plan)
        if plan.graphs != "off" and self._graphed is None:
            whose = f"{self.device} captures no graphs" if step is not None else "it is your own"
            self.device.say_once(
                f"graphs: {whose}",
                "plan %s: the step's kernels are launched one by one, not as a graph: %s",
                plan.name,
                whose,
            )

    # --- what is called --------------------------------------------------------------------------

    def epoch(
        self, loader: Iterable[Any], *, max_steps: int | None = None, first_batch: int = 0
    ) -> EpochResult:
        """Train on every batch of the loader (or for `max_steps` updates), to the last loss.

        `first_batch` is the number of the loader's first batch: after a restart, those of the
        epoch that were trained on before and that it leaves out. If the loader or the loss raises,
        what was trained on before is in `last_result`.
        """
        run = self._training_run(loader, max_steps, first_batch)
        with self._reported(run), closing(run.run()) as steps:
            for _ in steps:
                pass
        return self._finish()

    def steps(
        self, loader: Iterable[Any], *, max_steps: int | None = None, first_batch: int = 0
    ) -> Generator[StepInfo, None, None]:
        """The same as `epoch`, but the loop is the caller's: a `StepInfo` after each batch.

        At each yield the caller's stream is ordered after the engine's. The result is in
        `last_result` once the loop has ended, or has been left: a batch that was trained on is
        never lost. With several ranks call `leave` on all of them before the loop is left.
        """
        run = self._training_run(loader, max_steps, first_batch)
        try:
            with self._reported(run), closing(run.run()) as steps:
                while self._advanced(run, steps):
                    run.lanes.give_back()
                    try:
                        yield run.info()
                    finally:  # also where the caller leaves: a last update is still to come
                        run.lanes.take_over()
        except GeneratorExit:
            self._finish()
            raise
        self._finish()

    def leave(self) -> None:
        """Between two `steps()`, on all ranks: finish what was begun, so that the loop may be left.
        A process alone may just leave it."""
        if self._running is not None:
            self._running.leave()

    def settle(self, reason: str = "settle") -> tuple[DeferredValues, ...]:
        """Between two `steps()`: wait for all values so far, and return those that came back."""
        return () if self._running is None else self._running.settle(reason)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on as if nothing had happened: model, optimizer, scheduler,
        scaler, averages, gradients of an open group, random states, and the number of batches of
        this epoch that were trained on. To be taken between two `steps()`, or outside a loop.

        Tensors are the live ones: copy them before going on.
        """
        if self._step is None:
            raise StepError("an engine made from a step keeps no state: the step's is your own")
        batch = 0 if self._running is None else self._running.trained
        return engine_state.state_of(self._step, self.ema, epoch=self.epochs, batch=batch)

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """Go back to a stored state. Returns how many batches of epoch `epochs` it had trained on:
        give the loader's rest to `epoch(rest, first_batch=…)`."""
        if self._step is None:
            raise StepError("an engine made from a step keeps no state: the step's is your own")
        engine_state.restore(state, self._step, self.ema)
        if self._graphed is not None:
            self._graphed.restored()
        self.epochs = state["epoch"]
        # Set once the loader has begun, which may draw from the generators too.
        self._random_states = engine_state.own_random_states(state["random"], self.ranks)
        batch: int = state["batch"]
        return batch

    @torch.no_grad()
    def evaluate(self, loader: Iterable[Any]) -> EpochResult:
        """The loss and metrics over a loader, without gradients, under the same plan."""
        if self._step is None:
            raise StepError("evaluate needs a model and a loss: this engine was made from a step")
        training = self.model.training
        self.model.eval()
        try:
            run = self._loop(loader, self._evaluate_batch)
            with closing(run.run()) as steps:
                for _ in steps:
                    pass
        finally:
            self.model.train(training)
            reshard(self.model)
        return run.result()

    def use_plan(self, plan: Plan | str | Path | Mapping[str, Any]) -> None:
        """Go on under another plan, from the next epoch on."""
        self.close()
        self._graphed = None
        self.plan = self._own(Plan.of(plan))
        self._follow_plan()

    def _own(self, plan: Plan) -> Plan:
        """The plan with the engine's own precision, if it was given one."""
        if self._precision is None or self._precision == plan.precision:
            return plan
        return replace(plan, precision=self._precision)  # type: ignore[arg-type]

    @property
    def updates(self) -> int:
        """Optimizer steps since the engine was made, those of a restored state included."""
        return 0 if self._step is None else self._step.updates

    @property
    def ranks(self) -> Ranks:
        """The processes that the model is spread over; those of a plain model are one."""
        return SINGLE if self._step is None else self._step.ranks

    @property
    def spread(self) -> Spread:
        """How the model is spread over them."""
        return "plain" if self._step is None else self._step.spread

    @property
    def is_between_updates(self) -> bool:
        """Whether no accumulation group is open: with several ranks, when a state may be taken."""
        return self._step is None or not self._step.group_is_open

    @property
    def graphs(self) -> GraphReport | None:
        """What became of the plan's graphs; None if it has none, or the device cannot."""
        return None if self._graphed is None else self._graphed.report()

    def close(self) -> None:
        """Let go of the device memory that the plan holds: graphs and cached batches. The engine
        may be used on."""
        if self._graphed is not None:
            self._graphed.close()
        if self._cache is not None:
            self._cache = BatchCache(self.plan.cache_batches)

    # --- one batch -------------------------------------------------------------------------------

    def _train_batch(self, run: Loop, index: int, batch: Any) -> None:
        step, lanes = self._step, run.lanes
        assert step is not None
        if self._random_states is not None:
            engine_state.set_random_states(self.device, self._random_states)
            self._random_states = None
        if self._graphed is not None and not run.is_stand_in(index):
            with self._annotated("step"):
                run.replays += self._graphed.train(batch, partial(run.report, index))
            return
        with lanes.on(lanes.forward), self._annotated("forward"):
            parts = step.forward(batch)
            if run.is_stand_in(index):
                parts = parts.without_weight()
            run.report(index, parts)
        lanes.forward_to_backward()
        with lanes.on(lanes.backward), self._annotated("backward"):
            step.backward(parts)
            if step.group_is_full:
                step.update()
        lanes.backward_to_forward()

    def _evaluate_batch(self, run: Loop, index: int, batch: Any) -> None:
        assert self._step is not None
        with run.lanes.on(run.lanes.forward), self._annotated("evaluate"):
            parts = self._step.forward(batch)
            run.report(index, parts.without_weight() if run.is_stand_in(index) else parts)

    def _custom_batch(self, run: Loop, index: int, batch: Any) -> None:
        assert self._custom is not None
        with run.lanes.on(run.lanes.forward), self._annotated("step"):
            returned = self._custom(batch)
            if returned is not None:
                run.report(index, LossParts.of(returned, self.device, needs_grad=False))

    # --- around the loop -------------------------------------------------------------------------

    def _training_run(self, loader: Iterable[Any], max_steps: int | None, first: int) -> Loop:
        _tell_epoch(loader, self.epochs)
        if self._step is None:
            return self._loop(
                loader,
                self._custom_batch,
                most=max_steps,
                needs_tensors=False,
                first=first,
                on_step=self.on_step,
            )
        if self._graphed is not None:
            self._graphed.begin_epoch()
        most = None if max_steps is None else max_steps * self._step.accumulate
        return self._loop(
            loader, self._train_batch, most=most, first=first, step=self._step, on_step=self.on_step
        )

    def _loop(
        self, loader: Iterable[Any], run_batch: Callable[[Loop, int, Any], None], **options: Any
    ) -> Loop:
        return Loop(
            loader,
            run_batch,
            device=self.device,
            plan=self.plan,
            epoch=self.epochs,
            cache=self._cache,
            deterministic=self._deterministic,
            ranks=self.ranks,
            **options,
        )

    @contextmanager
    def _reported(self, run: Loop) -> Iterator[None]:
        """Whatever ends the loop, its result is kept."""
        self._running = run
        try:
            yield
        finally:
            self._running = None
            if run.ended:
                self.last_result = run.result()

    def _finish(self) -> EpochResult:
        """Count the epoch that was just reported as done."""
        result = self.last_result
        assert result is not None
        self.epochs += 1
        if self._step is not None:
            self._step.end_epoch(result.mean_loss)
        if self.on_epoch is not None:
            self.on_epoch(result)
        return result

    def _advanced(self, run: Loop, steps: Iterator[None]) -> bool:
        """One batch more, on the stream the loop began on, whatever is current by now."""
        with self.device.use(run.lanes.caller):
            return next(steps, run) is not run

    def _annotated(self, name: str) -> AbstractContextManager[object]:
        return self.device.annotate(name) if self._nvtx else _NOT_ANNOTATED


def _where(model: torch.nn.Module) -> Device | torch.device:
    if not isinstance(model, torch.nn.Module):
        raise StepError(f"model is a {type(model).__name__}: expected a torch.nn.Module")
    for parameter in model.parameters():
        return parameter.device
    return torch.device("cpu")


def _tell_epoch(loader: Iterable[Any], epoch: int) -> None:
    """Samplers that shuffle by epoch must be told which one it is."""
    for owner in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if callable(getattr(owner, "set_epoch", None)):
            owner.set_epoch(epoch)  # type: ignore[union-attr]
