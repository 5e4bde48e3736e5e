"""The engine: one loop, run under any plan, with the same losses under all of them."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from headrace.data import BatchCache, UsedIterators, unprefetched
from headrace.device import Device, open_device
from headrace.engine import graph_rules, stored_state
from headrace.engine.compiled import CompiledLoss, CompileReport
from headrace.engine.deferred import DeferredValues
from headrace.engine.ema import Ema
from headrace.engine.graphed import GraphedStep, GraphReport
from headrace.engine.halving import HalvingStep, require_halvable
from headrace.engine.kept_buffers import KeptBuffers
from headrace.engine.loop import Loop, StepInfo
from headrace.engine.nonfinite import NonFinitePolicy, NonFiniteWatch
from headrace.engine.one_batch import Custom, Evaluation, StepFunction, Training
from headrace.engine.results import EpochResult, Start
from headrace.engine.resume import Place, tell_epoch
from headrace.engine.schedules import Every, Scheduler
from headrace.engine.step import LossFunction, TrainingStep
from headrace.errors import StepError
from headrace.parallel import SINGLE, Ranks, bare, evaluating, where
from headrace.plan import PLAN_VARIABLE, Plan, in_force
from headrace.source_lines import users_line

log = logging.getLogger("headrace")
Steps = Generator[StepInfo, None, None]


class Engine:
    """Runs a training loop under a plan.

        engine = Engine(model, optimizer, loss_fn, plan="pipeline")
        for epoch in range(10):
            result = engine.epoch(loader)
            print(result.mean_loss, result.waits.table())

    `loss(model, batch)` returns a 0-dim tensor, or a dict with `loss`, optionally `weight`, and
    metrics. `device` is where the model lies, unless given. `scheduler` is stepped after each
    update, or each epoch with `scheduler_every="epoch"`; timm's decide that by `t_in_epochs`.
    Optimizers and schedulers may have been prepared by Accelerate. `precision` overrides the
    plan's; where neither names one, the model computes in float32 with PyTorch's TF32 switches as
    they are. `on_step(info)` is called after each batch with a `StepInfo`, `on_epoch(result)` after
    each epoch with an `EpochResult`. `on_values(step, values)` is called once for each batch, in
    order, as soon as its values are on the host: also after a `break` or an error.

    `clip_norm` is `clip_grad_norm_(model.parameters(), clip_norm)` to the last bit. As there,
    gradients of parameters that the optimizer does not have count, too, and are not cleared
    (`clipping.py`). `accumulate` batches make an update. With `accumulate_by="weight"` it is that
    of the mean over all of the group's samples (or tokens: the returned `weight`); with "count"
    each loss is divided by `accumulate`, a last partial group's too, as in a loop of
    `(loss / accumulate).backward()` (docs/numbers.md has both loops).

    The model may be DDP's or FSDP2's (`fully_shard`): then each rank's engine is given that rank's
    batches, and losses and metrics are those of all ranks together (docs/scaling.md).

    What happens to runs: `on_nonfinite` is "report", "stop", "skip" or "tolerate:N" (see
    `nonfinite.py`); `on_oom="halve"` trains in halves on a batch that does not fit;
    `loader_timeout` is in seconds, 0 for ever; `on_error` is called with the exception that ends
    a loop, while the state is still that after the last batch trained on.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        *,
        plan: Plan | str | Path | Mapping[str, Any] = "pipeline",
        device: Device | str | torch.device | None = None,
        scheduler: Scheduler | None = None,
        scheduler_every: Every = "step",
        clip_norm: float | None = None,
        accumulate: int = 1,
        accumulate_by: Literal["weight", "count"] = "weight",
        precision: str | None = None,
        ema_decay: float | None = None,
        deterministic: bool = False,
        nvtx: bool = False,
        on_nonfinite: str = "report",
        on_oom: Literal["raise", "halve"] = "raise",
        loader_timeout: float = 0,
        on_step: Callable[[StepInfo], object] | None = None,
        on_values: Callable[[int, dict[str, float]], object] | None = None,
        on_epoch: Callable[[EpochResult], object] | None = None,
        on_error: Callable[[BaseException], object] | None = None,
    ) -> None:
        self._set_up(plan, device or where(model), precision, deterministic, nvtx)
        self.model = model
        self.ema = None if ema_decay is None else Ema(model, ema_decay)
        self.on_step, self.on_values, self.on_epoch = on_step, on_values, on_epoch
        self._on_error, self._loader_timeout = on_error, loader_timeout
        policy = NonFinitePolicy.of(on_nonfinite)
        self._non_finite = NonFiniteWatch(policy, self.device)
        self._step: TrainingStep | None = TrainingStep(
            self.device,
            model,
            optimizer,
            loss,
            precision=self.plan.precision,
            clip_norm=clip_norm,
            accumulate=accumulate,
            accumulate_by=accumulate_by,
            scheduler=scheduler,
            scheduler_every=scheduler_every,
            ema=self.ema,
            non_finite=policy,
        )
        if on_error is not None and not self.ranks.several:
            self._step.buffers = KeptBuffers(model)
        if on_oom not in ("raise", "halve"):
            raise StepError(f"on_oom = {on_oom!r}: expected 'raise' or 'halve'")
        self._halving: HalvingStep | None = HalvingStep(self._step) if on_oom == "halve" else None
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
        on_values: Callable[[int, dict[str, float]], object] | None = None,
        on_epoch: Callable[[EpochResult], object] | None = None,
    ) -> Engine:
        """An engine around a step of your own (two optimizers, a GAN): `step(batch)` does all of
        it, on one stream, and returns what is to be reported, as a loss function does, or None.
        Prefetch, deferral, run-ahead and host waits are the plan's."""
        engine = cls.__new__(cls)
        engine._set_up(plan, device, None, deterministic, nvtx)
        engine._step, engine._custom = None, step
        engine.on_step, engine.on_values, engine.on_epoch = on_step, on_values, on_epoch
        engine._follow_plan()
        return engine

    def _set_up(
        self, plan: Any, device: Any, precision: str | None, deterministic: bool, nvtx: bool
    ) -> None:
        self._precision = precision
        self._told_of_other_plan = False
        self.plan = self._own(Plan.of(plan))
        self._next_plan: Plan | None = None
        self.device = open_device(device)
        self.epochs = 0
        self.last_result: EpochResult | None = None
        self._custom: StepFunction | None = None
        self._deterministic = deterministic
        self._nvtx = nvtx
        self._graphed: GraphedStep | None = None
        self._running: Loop | None = None
        self._stepped: weakref.ref[Steps] | None = None
        self._place = Place(self.device)
        self._cache: BatchCache | None = None
        self._halving = self._on_error = self.ema = None
        self._non_finite = NonFiniteWatch(NonFinitePolicy("report"), self.device)
        self._loader_timeout = 0.0
        self._iterators = UsedIterators()
        self._said_eval = False

    def _follow_plan(self) -> None:
        """Set up what the plan asks for, or say why it is not there."""
        plan, step = self.plan, self._step
        self._cache = BatchCache(plan.cache_batches) if plan.cache_batches else None
        if self._halving is not None:
            require_halvable(step, plan)
        if step is not None:
            step.set_precision(plan.precision)
            compiles = plan.compile and self.device.compiles
            step.loss = CompiledLoss(self._loss, self.device) if compiles else self._loss
            if plan.graphs == "off" or not self.device.captures:
                graph_rules.release(step)
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
        report = self.compiled
        if report is not None and report.why is not None:
            self.device.say_once(
                f"compile: {report.why}",
                "plan %s: the step is not compiled and runs as it is: %s",
                plan.name,
                report.why,
            )

    # --- what is called --------------------------------------------------------------------------

    def epoch(
        self, loader: Iterable[Any], *, max_steps: int | None = None, first_batch: int | None = None
    ) -> EpochResult:
        """Train on every batch of the loader (or for `max_steps` updates), to the last loss.

        After `load_state_dict` the first call goes on in the midst of an epoch: the loader is
        brought to the batch after the last that was trained on (`resume.py` says how), unless
        `first_batch` says that it begins there. If the loader or the loss raises, what was
        trained on before is in `last_result`. `max_steps` counts from here on, also then.
        """
        run = self._training_run(loader, max_steps, first_batch)
        with self._reported(run, loader), closing(run.run()) as steps:
            for _ in steps:
                pass
            self._require_batches(run, loader, max_steps)
        return self._finish(run)

    def steps(
        self, loader: Iterable[Any], *, max_steps: int | None = None, first_batch: int | None = None
    ) -> Steps:
        """The same as `epoch`, but the loop is the caller's: a `StepInfo` after each batch.

        Every value is handed out once, in order: the last info is held back until all have
        arrived. After a `break`, those still under way go to `on_values` and `last_result`.

        At each yield the caller's stream is ordered after the engine's. The result is in
        `last_result` once the loop has ended, or has been left: a batch that was trained on is
        never lost. With several ranks call `leave` on all of them before the loop is left. Another
        training loop of this engine, or `load_state_dict`, ends this one, as leaving it would.
        """
        itself: list[weakref.ref[Steps]] = []
        steps = self._stepping(itself, loader, max_steps, first_batch)
        itself.append(weakref.ref(steps))
        return steps

    def _stepping(
        self,
        itself: list[weakref.ref[Steps]],
        loader: Iterable[Any],
        max_steps: int | None,
        first_batch: int | None,
    ) -> Steps:
        run = self._training_run(loader, max_steps, first_batch)
        self._stepped = itself[0]
        try:
            with self._reported(run, loader), closing(run.run()) as steps:
                while self._advanced(run, steps):
                    with run.lanes.given_back():  # also if it leaves: an update may be to come
                        yield run.info()
                self._require_batches(run, loader, max_steps)
        except GeneratorExit:
            self._finish(run)
            raise
        self._finish(run)

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
        scaler, averages, gradients of an open group, random states, what `graphs="auto"` decided,
        the ledger, values not yet reported, and the place in the epoch: the number of batches that
        were trained on, and the loader's own state after them, if it keeps one. To be taken
        between two `steps()`, in `on_step` or `on_error`, or outside a loop.

        Tensors are the live ones: copy them before going on.
        """
        if self._step is None:
            raise StepError("an engine made from a step keeps no state: the step's is your own")
        position = self._place.position(self.epochs, self._running)
        left_out = self._non_finite.skipped
        return stored_state.state_of(self._step, self.ema, self._graphed, position, left_out)

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """Go back to a stored state. Returns how many batches of epoch `epochs` it had trained on;
        the next `epoch(loader)` goes on after them."""
        if self._step is None:
            raise StepError("an engine made from a step keeps no state: the step's is your own")
        self._end_other_loop()
        state = stored_state.upgraded(state)
        stored_state.restore(state, self._step, self.ema, self._graphed)
        with stored_state.fitting():
            own = self._place.checked(stored_state.own_part(state, self.ranks))
            self._non_finite.skipped, self.epochs = int(own["left_out"]), own["epoch"]
            return self._place.restore(own)

    @torch.no_grad()
    def evaluate(self, loader: Iterable[Any]) -> EpochResult:
        """The loss and metrics over a loader, without gradients, under the same plan."""
        if self._step is None:
            raise StepError("evaluate needs a model and a loss: this engine was made from a step")
        if self._running is not None:
            self._running.keep_peak()
        with evaluating(self.model), self.device.ledger.apart():
            run = self._loop(loader, Evaluation(self._step))
            with closing(run.run()) as steps:
                for _ in steps:
                    pass
            self._require_batches(run, loader, None)
            if run.has_trained:
                self._iterators.note(loader)
            return self._result_of(run)

    def use_plan(self, plan: Plan | str | Path | Mapping[str, Any]) -> None:
        """Go on under another plan, from the next epoch on."""
        self._next_plan = self._own(Plan.of(plan))
        if self._running is None:
            self._change_plan()

    def _change_plan(self) -> None:
        if self._next_plan is not None:
            self.close()
            self._graphed = None
            self.plan, self._next_plan = self._next_plan, None
            self._follow_plan()

    def _own(self, plan: Plan) -> Plan:
        """The plan with the engine's own precision, if it was given one; or the plan that the
        environment puts in its place."""
        if self._precision is not None and self._precision != plan.precision:
            plan = replace(plan, precision=self._precision)  # type: ignore[arg-type]
        used = in_force(plan)
        if used != plan and not self._told_of_other_plan:
            self._told_of_other_plan = True
            log.warning(
                "%s is set: this engine runs under plan %s instead of %s",
                PLAN_VARIABLE,
                used.name,
                plan.name,
            )
        return used

    @property
    def updates(self) -> int:
        """Optimizer steps since the engine was made, those of a restored state included."""
        return 0 if self._step is None else self._step.updates

    @property
    def ranks(self) -> Ranks:
        """The processes that the model is spread over; those of a plain model are one."""
        return SINGLE if self._step is None else self._step.ranks

    @property
    def is_between_updates(self) -> bool:
        """Whether no accumulation group is open: with several ranks, when a state may be taken."""
        return self._step is None or not self._step.group_is_open

    @property
    def graphs(self) -> GraphReport | None:
        """What became of the plan's graphs; None if it has none, or the device cannot."""
        return None if self._graphed is None else self._graphed.report()

    @property
    def compiled(self) -> CompileReport | None:
        """Whether the step runs as compiled code, and why not; None if the plan does not ask for
        that."""
        if not self.plan.compile:
            return None
        if self._step is None:
            return CompileReport(compiled=False, why="it is your own (Engine.from_step)")
        loss = self._step.loss
        if isinstance(loss, CompiledLoss):
            return loss.report()
        return CompileReport(compiled=False, why=f"Headrace compiles nothing for {self.device}")

    def close(self) -> None:
        """Let go of the device memory that the plan holds: graphs and cached batches. The engine
        may be used on."""
        if self._graphed is not None:
            self._graphed.close()
        if self._cache is not None:
            self._cache = BatchCache(self.plan.cache_batches)

    # --- around the loop -------------------------------------------------------------------------

    def _training_run(
        self, loader: Iterable[Any], max_steps: int | None, first: int | None
    ) -> Loop:
        self._end_other_loop()
        self._change_plan()
        self._look_at_mode()
        loader = unprefetched(loader)
        tell_epoch(loader, self.epochs)
        try:
            loader, start = self._place.begin(loader, first)
            return self._begun(loader, max_steps, start)
        except BaseException:
            self._place.not_begun()
            raise

    def _begun(self, loader: Iterable[Any], max_steps: int | None, start: Start) -> Loop:
        options: dict[str, Any] = {
            "start": start,
            "on_step": self.on_step,
            "on_values": self.on_values,
            "on_error": self._on_error,
            "non_finite": self._non_finite,
            "loader_timeout": self._loader_timeout,
        }
        step = self._step
        if step is None:
            assert self._custom is not None
            options |= {"most": max_steps, "needs_tensors": False}
            return self._loop(loader, Custom(self._custom), **options)
        for part in (step, self._graphed, step.buffers):
            if part is not None:
                part.begin_epoch()
        most = None if max_steps is None else step.batches_for(max_steps)
        train = Training(step, self._graphed, self._halving, self._place.note_batch)
        return self._loop(loader, train, most=most, step=step, **options)

    def _look_at_mode(self) -> None:
        """Say once that a model in eval mode is trained as it is: without dropout, say."""
        if self._step is None or self._said_eval:
            return
        if not any(module.training for module in bare(self.model).modules()):
            self._said_eval = True
            log.warning(
                "the model is in eval mode in the training loop at %s, so dropout is off and batch "
                "norm uses its running means: call model.train() before it, unless that is meant",
                users_line(),
            )

    def _require_batches(self, run: Loop, loader: Iterable[Any], most: int | None) -> None:
        """After a pass: an iterator without a batch may have been used up by an earlier one."""
        if not run.has_trained and most != 0:
            self._iterators.require_batches(loader)

    def _end_other_loop(self) -> None:
        """Leave a loop that is still open: dropped, it would end at any later moment."""
        if self._running is None:
            return
        other = None if self._stepped is None else self._stepped()
        if other is not None and inspect.getgeneratorstate(other) == inspect.GEN_SUSPENDED:
            other.close()
        if self._running is not None:
            raise StepError("a training loop of this engine is under way: expected it to end first")

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
            nvtx=self._nvtx,
            ranks=self.ranks,
            **options,
        )

    @contextmanager
    def _reported(self, run: Loop, loader: Iterable[Any]) -> Iterator[None]:
        """Whatever ends the loop, its result is kept."""
        self._running, failed = run, True
        try:
            yield
            failed = False
        except torch.OutOfMemoryError as problem:
            raise run.out_of_memory(problem, self.graphs) from problem
        finally:
            self._running = None
            if run.has_trained:  # also if it was left: the loader's other batches may be all gone
                self._iterators.note(loader)
            self._place.end(run, failed=failed)
            if run.ended:
                self.last_result = self._result_of(run)

    def _result_of(self, run: Loop) -> EpochResult:
        return replace(run.result(), compiled=self.compiled)

    def _finish(self, run: Loop) -> EpochResult:
        """Count the epoch that was just reported as done."""
        result = self.last_result
        assert result is not None
        self.epochs += 1
        self._change_plan()
        if self._step is not None:
            self._step.end_epoch(self.epochs, run.loss.mean)
        if self.on_epoch is not None:
            self.on_epoch(result)
        return result

    def _advanced(self, run: Loop, steps: Iterator[None]) -> bool:
        """One batch more, on the stream the loop began on, whatever is current by now."""
        with self.device.use(run.lanes.caller):
            return next(steps, run) is not run
