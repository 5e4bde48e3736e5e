"""`Engine`: trains a model under a plan. The plan changes the speed, not the losses."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from headrace.capture import GraphReport
from headrace.data import BatchCache, UsedIterators, explain_no_batch, unwrap_prefetcher
from headrace.device import Device, available_devices, open_device
from headrace.engine import memory_error, stored_state
from headrace.engine.build import (
    ModelStepBuilder,
    PassOptions,
    StepBuilder,
    UserStepBuilder,
    open_pass,
)
from headrace.engine.compiled import CompileReport
from headrace.engine.deferred import DeferredValues
from headrace.engine.ema import Ema
from headrace.engine.forward import LossFunction
from headrace.engine.loop import Observers, Pass
from headrace.engine.nonfinite import NonFinitePolicy, NonFiniteWatch
from headrace.engine.results import EpochResult
from headrace.engine.resume import PositionTracker, Start, set_loader_epoch
from headrace.engine.schedules import LearningRateFunction, Scheduler, SchedulerInterval
from headrace.engine.stages import Progress
from headrace.engine.step import StepFunction
from headrace.errors import StepError
from headrace.parallel import Ranks, device_of, eval_mode, unwrap
from headrace.plan import PLAN_VARIABLE, Plan, effective_plan
from headrace.schema import require_whole
from headrace.source_lines import users_line

log = logging.getLogger("headrace")
Steps = Generator[Progress, None, None]


class Engine:
    """Trains a model under a plan.

        engine = Engine(model, optimizer, loss_fn)
        for epoch in range(10):
            result = engine.epoch(loader)
            print(result.mean_loss, result.waits.table())

    Args:
        model: The model, already on its device. It may be wrapped in DDP or sharded with FSDP2
            (`fully_shard`). Then each rank's engine gets that rank's batches, and reports the
            losses and metrics of all ranks together (docs/scaling.md).
        optimizer: The model's optimizer, also one prepared by Accelerate.
        loss: A function `loss(model, batch)`. It returns a 0-dim tensor, or a dict with `loss`,
            optionally `weight` (how many samples or tokens the loss is a mean over), metrics, and
            `outputs`: tensors of any shape that stay on the device and are handed out with the
            batch's values (`DeferredValues.outputs`, `on_outputs`).
        plan: A `Plan`, a preset's name, a dict of fields, or the path of a YAML file. [default:
            "auto", which compares `pipeline` and `graph` on the first batches and keeps the faster]
        device: Where to train. [default: the model's device; a warning says if that is the CPU,
            and there is a GPU]
        scheduler: A learning-rate scheduler of PyTorch, transformers or timm, also one prepared by
            Accelerate.
        scheduler_every: Step the scheduler after each "step" (optimizer update) or each "epoch". A
            timm scheduler decides that itself (`t_in_epochs`).
        lr: A function of the update (0, 1, …) that returns its learning rate, or one for each
            parameter group, instead of a scheduler.
        clip_norm: Clip gradients exactly as `clip_grad_norm_(model.parameters(), clip_norm)` does.
        accumulate: Batches per optimizer update.
        accumulate_by: How the batches of an update count. "weight": the update uses the mean loss
            over all their samples (or tokens: the returned `weight`). "count": each loss is divided
            by `accumulate`, also in a last partial group, as in a loop of
            `(loss / accumulate).backward()`. docs/numbers.md shows both loops.
        precision: "fp32", "tf32", "bf16" or "fp16", instead of the plan's. If neither sets one, the
            model computes in float32 and PyTorch's TF32 settings stay as they are.
        ema_decay: Keep an exponential moving average of the weights in `engine.ema`.
        carry: State that is carried from batch to batch, such as a recurrent model's: tensors on
            the device, nested as you like, or a `Carry` with more options. The loss function is
            then called as `loss(model, batch, carried)` and returns `(loss, carried)`.
        deterministic: Use deterministic kernels; an operation that has none raises.
        nvtx: Mark forward and backward as ranges in the vendor's profiler (Nsight Systems).
        on_nonfinite: What to do about a NaN or infinite loss or gradient: "report" it, "stop",
            "skip" the update, or "tolerate:N" (skip N updates, then stop).
        on_oom: What to do with a batch that does not fit on the device: "raise" an error, or
            "halve" the batch and train on the halves.
        loader_timeout: Raise `LoaderError` after waiting this many seconds for a batch; 0 waits
            forever.
        on_step: Called after each batch with a `Progress`.
        on_update: Called with a `Progress` after an optimizer update, every `on_update_every`
            updates.
        on_values: Called as `on_values(step, values)`, once for each batch and in order, when its
            values have arrived on the host; also after a `break` or an error.
        on_outputs: Called as `on_outputs(step, outputs)`, right after `on_values`, for each batch
            that has `outputs`.
        on_epoch: Called after each epoch with its `EpochResult`.
        on_error: Called with the exception that ends a loop, if the state is still the one after
            the last batch trained on: save a checkpoint here. Not called with several ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        *,
        plan: Plan | str | Path | Mapping[str, Any] = "auto",
        device: Device | str | torch.device | None = None,
        scheduler: Scheduler | None = None,
        scheduler_every: SchedulerInterval = "step",
        lr: LearningRateFunction | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        accumulate_by: Literal["weight", "count"] = "weight",
        precision: str | None = None,
        ema_decay: float | None = None,
        carry: Any = None,
        deterministic: bool = False,
        nvtx: bool = False,
        on_nonfinite: str = "report",
        on_oom: Literal["raise", "halve"] = "raise",
        loader_timeout: float = 0,
        on_step: Callable[[Progress], object] | None = None,
        on_update: Callable[[Progress], object] | None = None,
        on_update_every: int = 1,
        on_values: Callable[[int, dict[str, float]], object] | None = None,
        on_outputs: Callable[[int, Any], object] | None = None,
        on_epoch: Callable[[EpochResult], object] | None = None,
        on_error: Callable[[BaseException], object] | None = None,
    ) -> None:
        device = open_device(device or _device_of(model))
        policy = NonFinitePolicy.of(on_nonfinite)
        builder = ModelStepBuilder(
            device,
            model,
            optimizer,
            loss,
            clip_norm=clip_norm,
            accumulate=accumulate,
            accumulate_by=accumulate_by,
            scheduler=scheduler,
            scheduler_every=scheduler_every,
            lr=lr,
            ema_decay=ema_decay,
            policy=policy,
            restores_buffers=on_error is not None,
            on_oom=on_oom,
            carry=carry,
        )
        self._set_up(
            builder,
            device,
            plan,
            precision=precision,
            deterministic=deterministic,
            nvtx=nvtx,
            policy=policy,
            loader_timeout=loader_timeout,
            on_error=on_error,
        )
        self.on_step, self.on_values, self.on_epoch = on_step, on_values, on_epoch
        self.on_update, self.on_outputs = on_update, on_outputs
        self.on_update_every = on_update_every

    @classmethod
    def from_step(
        cls,
        step: StepFunction,
        *,
        device: Device | str | torch.device = "auto",
        plan: Plan | str | Path | Mapping[str, Any] = "auto",
        carry: Any = None,
        deterministic: bool = False,
        nvtx: bool = False,
        on_step: Callable[[Progress], object] | None = None,
        on_update: Callable[[Progress], object] | None = None,
        on_update_every: int = 1,
        on_values: Callable[[int, dict[str, float]], object] | None = None,
        on_outputs: Callable[[int, Any], object] | None = None,
        on_epoch: Callable[[EpochResult], object] | None = None,
    ) -> Engine:
        """An engine that calls your own training step, for a GAN or two optimizers for example.

        `step(batch)` does the forward, the backward and the update, on one stream. It returns what
        to report, as a loss function does, or None. The engine adds what the plan says of
        prefetching, deferred values, run-ahead, host waits and graphs. With a `carry`, it is called
        as `step(batch, carried)` and returns a tuple of what to report and the state for the next
        batch. The other arguments are those of `Engine`; each batch counts as an update.
        """
        engine, device = cls.__new__(cls), open_device(device)
        builder = UserStepBuilder(device, step, carry)
        engine._set_up(builder, device, plan, deterministic=deterministic, nvtx=nvtx)
        engine.on_step, engine.on_values, engine.on_epoch = on_step, on_values, on_epoch
        engine.on_update, engine.on_outputs = on_update, on_outputs
        engine.on_update_every = on_update_every
        return engine

    def _set_up(
        self,
        builder: StepBuilder,
        device: Device,
        plan: Any,
        *,
        precision: str | None = None,
        deterministic: bool,
        nvtx: bool,
        policy: NonFinitePolicy = NonFinitePolicy("report"),  # noqa: B008 - frozen
        loader_timeout: float = 0,
        on_error: Callable[[BaseException], object] | None = None,
    ) -> None:
        self.device, self._builder = device, builder
        self._precision, self._deterministic, self._nvtx = precision, deterministic, nvtx
        self._warned: set[str] = set()
        self.plan = self._resolve(Plan.of(plan))
        self._next_plan: Plan | None = None
        #: Finished epochs, including those of a restored state.
        self.epochs = 0
        #: The result of the last training loop, also of one that an error or a `break` has ended.
        self.last_result: EpochResult | None = None
        self._on_error, self._loader_timeout = on_error, loader_timeout
        self._non_finite = NonFiniteWatch(policy, device)
        self._running: Pass | None = None
        self._open_steps: weakref.ref[Steps] | None = None
        self._tracker = PositionTracker(device)
        self._iterators = UsedIterators()
        self._cache: BatchCache | None = None
        self._apply_plan()

    def _apply_plan(self) -> None:
        """Set up what the plan asks for. Warn about what is not possible here."""
        plan = self.plan
        self._cache = BatchCache(plan.cache_batches) if plan.cache_batches else None
        self._builder.apply_plan(plan)
        report = self.compiled
        if report is not None and report.why is not None:
            self.device.warn_once(
                f"compile: {report.why}",
                "plan %s: the step is not compiled and runs as it is: %s",
                plan.name,
                report.why,
            )

    @property
    def model(self) -> torch.nn.Module:
        """The model that this engine trains."""
        if not isinstance(self._builder, ModelStepBuilder):
            raise AttributeError("an engine from Engine.from_step has no model")
        return self._builder.model

    @property
    def ema(self) -> Ema | None:
        """The averaged weights; None without `ema_decay`."""
        return self._builder.ema if isinstance(self._builder, ModelStepBuilder) else None

    @property
    def carried(self) -> Any:
        """The state that the next batch gets, as live tensors; None without a `carry`, or if it is
        the initial state. Set it to continue from another state, or to None to begin anew."""
        return None if self._builder.carry is None else self._builder.carry.state

    @carried.setter
    def carried(self, state: Any) -> None:
        if self._builder.carry is None:
            raise StepError("this engine carries no state: expected Engine(…, carry=…)")
        self._builder.carry.set(state)

    def _stateful_builder(self) -> ModelStepBuilder:
        if not isinstance(self._builder, ModelStepBuilder):
            raise StepError(
                "an engine from Engine.from_step has no state: save the state of your step yourself"
            )
        return self._builder

    # --- training and evaluation ------------------------------------------------------------------

    def epoch(
        self, loader: Iterable[Any], *, max_steps: int | None = None, first_batch: int | None = None
    ) -> EpochResult:
        """Train on every batch of the loader, and wait for the last loss.

        After `load_state_dict`, the first call continues the interrupted epoch: the engine skips
        the batches that it has already trained on (docs/faults.md). If the loader already starts at
        a later batch, give its number as `first_batch`.

        `max_steps` ends the epoch after that many optimizer updates, counted from this call. If the
        loader or the loss function raises, `last_result` has the batches trained on before that.
        """
        run = self._begin_pass(loader, max_steps, first_batch)
        with self._keeping_result(run, loader), closing(iter(run)) as steps:
            for _ in steps:
                pass
            self._require_batches(run, loader, max_steps)
        return self._finish(run)

    def steps(
        self, loader: Iterable[Any], *, max_steps: int | None = None, first_batch: int | None = None
    ) -> Steps:
        """Like `epoch`, but in your own loop: yields a `Progress` after each batch.

        Each batch's values appear once, in order, in `Progress.arrived`. The last `Progress` comes
        when all values have arrived. After a `break`, the remaining values go to `on_values` and
        `last_result`. `last_result` is set when the loop ends, also by a `break`.

        Between two batches you may use the model: the stream on which you began the loop waits for
        the engine's streams. With several ranks, call `leave` on all of them before a `break`.
        Starting another loop of this engine, or `load_state_dict`, ends this one like a `break`.
        """
        own_ref: list[weakref.ref[Steps]] = []
        steps = self._run_steps(own_ref, loader, max_steps, first_batch)
        own_ref.append(weakref.ref(steps))
        return steps

    def _run_steps(
        self,
        own_ref: list[weakref.ref[Steps]],
        loader: Iterable[Any],
        max_steps: int | None,
        first_batch: int | None,
    ) -> Steps:
        run = self._begin_pass(loader, max_steps, first_batch)
        self._open_steps = own_ref[0]
        try:
            with self._keeping_result(run, loader), closing(iter(run)) as steps:
                while self._advance(run, steps):
                    # Also around a `break`: the update of the last group may follow it.
                    with run.stages.lanes.yielding_to_caller():
                        yield run.progress
                self._require_batches(run, loader, max_steps)
        except GeneratorExit:
            self._finish(run)
            raise
        self._finish(run)

    def leave(self) -> None:
        """End a `steps()` loop between two batches. Call it on all ranks, then `break`. A single
        process may `break` without it."""
        if self._running is not None:
            self._running.leave()

    def settle(self, reason: str = "settle") -> tuple[DeferredValues, ...]:
        """Wait for the values of all batches so far, between two batches of a `steps()` loop.
        Returns those that have not been in `Progress.arrived` yet."""
        return () if self._running is None else self._running.settle(reason)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a new process needs to continue exactly here: model, optimizer,
        scheduler, scaler, averages, carried state, gradients of an open group, random states, the
        decision of `graphs="auto"`, the ledger, values not yet reported, and the position in the
        epoch (how many batches were trained on, and the loader's own state after them, if it has
        one). The number of updates is part of it, so `on_update` comes after the same updates as in
        a run without a break.

        Call it outside a loop, between two batches of `steps()`, in `on_step` or in `on_error`. The
        tensors are the live ones, not copies: copy them before training continues.
        """
        builder = self._stateful_builder()
        position = self._tracker.position(self.epochs, self._running)
        return stored_state.state_of(
            builder.parts,
            builder.schedule,
            builder.graphs,
            position,
            skipped_updates=self._non_finite.skipped,
        )

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """Restore a state of `state_dict()`. The next `epoch(loader)` continues after the last
        batch trained on. Returns how many batches of the current epoch have been trained on."""
        builder = self._stateful_builder()
        self._end_other_loop()
        state = stored_state.checked(state)
        stored_state.restore(state, builder.parts, builder.schedule, builder.graphs)
        with stored_state.mismatch_as_step_error():
            own = self._tracker.checked(stored_state.for_rank(state, self.ranks))
            self._non_finite.skipped, self.epochs = int(own["skipped_updates"]), own["epoch"]
            return self._tracker.restore(own)

    @torch.no_grad()
    def evaluate(
        self,
        loader: Iterable[Any],
        *,
        on_outputs: Callable[[int, Any], object] | None = None,
    ) -> EpochResult:
        """Compute loss and metrics over a loader: in eval mode, without gradients, under the plan.
        Carried state begins with the initial one. `on_outputs(step, outputs)` gets what the loss
        function returns under `outputs`, such as predictions for a metric."""
        if not isinstance(self._builder, ModelStepBuilder):
            raise StepError(
                "evaluate needs a model and a loss function: this engine is from Engine.from_step"
            )
        if self._running is not None:
            self._running.tally.keep_peak()
        with eval_mode(self.model), self.device.ledger.apart():
            lanes, step = self._builder.evaluation(self.plan, annotate=self._nvtx)
            watch = NonFiniteWatch(NonFinitePolicy("report"), self.device)
            observers = Observers(None, watch, on_outputs=on_outputs)
            options = self._pass_options(loader_timeout=0)
            run = open_pass(options, loader, lanes, step, observers, Start(), epoch=self.epochs)
            with closing(iter(run)) as steps:
                for _ in steps:
                    pass
            self._require_batches(run, loader, None)
            if run.has_trained:
                self._iterators.note(loader)
            return self._result_of(run)

    def use_plan(self, plan: Plan | str | Path | Mapping[str, Any]) -> None:
        """Use another plan, from the next epoch on."""
        self._next_plan = self._resolve(Plan.of(plan))
        if self._running is None:
            self._change_plan()

    def _change_plan(self) -> None:
        if self._next_plan is not None:
            self.close()
            self.plan, self._next_plan = self._next_plan, None
            self._apply_plan()

    def _resolve(self, plan: Plan) -> Plan:
        """The plan to run: `plan` with the engine's precision, if it has one, or the plan that
        `HEADRACE_PLAN` names."""
        if self._precision is not None and self._precision != plan.precision:
            plan = replace(plan, precision=self._precision)  # type: ignore[arg-type]
        used = effective_plan(plan)
        if used != plan and PLAN_VARIABLE not in self._warned:
            self._warned.add(PLAN_VARIABLE)
            log.warning(
                "%s is set: this engine runs under plan %s instead of %s",
                PLAN_VARIABLE,
                used.name,
                plan.name,
            )
        return used

    @property
    def updates(self) -> int:
        """Optimizer updates so far, including those of a restored state."""
        return self._builder.updates

    @property
    def ranks(self) -> Ranks:
        """The ranks that train this model together: one, unless it is wrapped in DDP or FSDP2."""
        return self._builder.ranks

    @property
    def is_between_updates(self) -> bool:
        """Whether no accumulation group is open. With several ranks, take a state only then."""
        parts = self._builder.parts
        return parts is None or not parts.group.is_open

    @property
    def graphs(self) -> GraphReport | None:
        """How steps run (`way`), and why not as the whole step in one graph; None if the plan has
        no graphs, or the device supports none."""
        graphs = self._builder.graphs
        return None if graphs is None else graphs.report()

    @property
    def compiled(self) -> CompileReport | None:
        """Whether the step runs as compiled code, or why not; None if the plan does not compile."""
        return self._builder.compiled if self.plan.compile else None

    def close(self) -> None:
        """Free the device memory that the plan occupies: graphs and cached batches. The engine can
        still be used."""
        if self._builder.graphs is not None:
            self._builder.graphs.close()
        if self._cache is not None:
            self._cache = BatchCache(self.plan.cache_batches)

    # --- around a pass ---------------------------------------------------------------------------

    def _begin_pass(self, loader: Iterable[Any], max_steps: int | None, first: int | None) -> Pass:
        self._end_other_loop()
        self._change_plan()
        self._warn_eval_mode()
        loader = unwrap_prefetcher(loader)
        set_loader_epoch(loader, self.epochs)
        try:
            loader, start = self._tracker.begin(loader, first)
            return self._open(loader, max_steps, start)
        except BaseException:
            self._tracker.cancel()
            raise

    def _open(self, loader: Iterable[Any], max_steps: int | None, start: Start) -> Pass:
        builder = self._builder
        require_whole("on_update_every", self.on_update_every, 1, StepError)
        builder.begin_epoch(from_start=start.first == 0)
        lanes = builder.lanes(self.plan, annotate=self._nvtx)
        observers = Observers(
            builder.schedule,
            self._non_finite,
            on_update=self.on_update,
            on_update_every=self.on_update_every,
            on_values=self.on_values,
            on_outputs=self.on_outputs,
            on_step=self.on_step,
            on_error=self._on_error,
        )
        return open_pass(
            self._pass_options(self._loader_timeout),
            loader,
            lanes,
            builder.step(lanes),
            observers,
            start,
            epoch=self.epochs,
            limit=None if max_steps is None else builder.batches_for(max_steps),
            parts=builder.parts,
        )

    def _pass_options(self, loader_timeout: float) -> PassOptions:
        return PassOptions(
            self.device,
            self.plan,
            self.ranks,
            self._cache,
            self._deterministic,
            loader_timeout,
        )

    def _warn_eval_mode(self) -> None:
        """Warn once if the model is in eval mode: the engine does not call `model.train()`."""
        if not isinstance(self._builder, ModelStepBuilder) or "eval" in self._warned:
            return
        if not any(module.training for module in unwrap(self.model).modules()):
            self._warned.add("eval")
            log.warning(
                "the model is in eval mode in the training loop at %s, so dropout is off and batch "
                "norm uses its running means: call model.train() first, unless you want this",
                users_line(),
            )

    def _require_batches(self, run: Pass, loader: Iterable[Any], max_steps: int | None) -> None:
        """Raise if a pass had no batch because an earlier pass has used up the iterator. Warn once
        if the loader is empty, unless the pass has continued an epoch at its end."""
        if run.has_trained or max_steps == 0:
            return
        self._iterators.require_batches(loader)
        if run.progress.batches == 0 and "no batch" not in self._warned:
            self._warned.add("no batch")
            why = explain_no_batch(loader)
            log.warning(
                "the loader passed at %s had no batch%s: there is no loss, and mean_loss is NaN",
                users_line(),
                f" ({why})" if why else "",
            )

    def _end_other_loop(self) -> None:
        """End a `steps()` loop that is still open. Python would otherwise end it whenever it
        collects the generator."""
        if self._running is None:
            return
        other = None if self._open_steps is None else self._open_steps()
        if other is not None and inspect.getgeneratorstate(other) == inspect.GEN_SUSPENDED:
            other.close()
        if self._running is not None:
            raise StepError("this engine is already in a training loop: end that one first")

    @contextmanager
    def _keeping_result(self, run: Pass, loader: Iterable[Any]) -> Iterator[None]:
        """Inside the block `run` is the running pass. However it ends, keep its result."""
        self._running, failed = run, True
        try:
            yield
            failed = False
        except torch.OutOfMemoryError as problem:
            graphs = self.graphs
            raise memory_error.out_of_memory_error(
                problem,
                device=self.device,
                plan=self.plan,
                parts=self._builder.parts,
                batch=run.tally.failed,
                largest=run.tally.largest,
                graph_bytes=0 if graphs is None else graphs.memory_bytes,
            ) from problem
        finally:
            self._running = None
            if run.has_trained:  # also after a `break`: an iterator's other batches may be gone
                self._iterators.note(loader)
            self._tracker.end(run, failed=failed)
            if run.ended:
                self.last_result = self._result_of(run)

    def _result_of(self, run: Pass) -> EpochResult:
        result = run.tally.result(run.progress, self.plan.name, run.stages.recorder.entries)
        return replace(result, compiled=self.compiled)

    def _finish(self, run: Pass) -> EpochResult:
        """Count the epoch that has just ended, step the scheduler and call `on_epoch`."""
        result = self.last_result
        assert result is not None
        self.epochs += 1
        self._change_plan()
        if self._builder.schedule is not None:
            mean_loss = run.stages.recorder.loss().mean
            self._builder.schedule.after_epoch(self.epochs, mean_loss)
        if self.on_epoch is not None:
            self.on_epoch(result)
        return result

    def _advance(self, run: Pass, steps: Iterator[Progress]) -> bool:
        """Train on the next batch, on the stream that was current when the loop began. Returns
        whether there was one."""
        with self.device.use(run.stages.lanes.caller):
            return next(steps, run) is not run


def _device_of(model: torch.nn.Module) -> torch.device:
    """The model's device. Warn if it is the CPU, although there is an accelerator."""
    device, best = device_of(model), available_devices()[0]
    if device.type == "cpu" and best != "cpu":
        _warn_of_cpu(best)
    return device


@cache
def _warn_of_cpu(best: str) -> None:
    """Warn once in this process."""
    log.warning(
        "the model is on the CPU, so the engine trains there, and this machine has %s: call "
        "model.to('%s') before you create the optimizer, or pass device='cpu' to the engine if you "
        "want the CPU",
        best,
        best.partition(":")[0],
    )
