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
from headrace.engine import memory_error, stored_state
from headrace.engine.build import (
    ModelTraining,
    OwnTraining,
    PassOptions,
    Training,
    open_pass,
)
from headrace.engine.compiled import CompileReport
from headrace.engine.deferred import DeferredValues
from headrace.engine.ema import Ema
from headrace.engine.forward import LossFunction
from headrace.engine.graphed import GraphReport
from headrace.engine.loop import Observers, Pass
from headrace.engine.nonfinite import NonFinitePolicy, NonFiniteWatch
from headrace.engine.results import EpochResult
from headrace.engine.resume import Place, Start, tell_epoch
from headrace.engine.schedules import Every, Scheduler
from headrace.engine.stages import Progress
from headrace.engine.step import StepFunction
from headrace.errors import StepError
from headrace.parallel import Ranks, device_of, eval_mode, unwrap
from headrace.plan import PLAN_VARIABLE, Plan, in_force
from headrace.source_lines import users_line

log = logging.getLogger("headrace")
Steps = Generator[Progress, None, None]


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
    they are. `on_step(info)` is called after each batch with a `Progress`, `on_epoch(result)` after
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
        on_step: Callable[[Progress], object] | None = None,
        on_values: Callable[[int, dict[str, float]], object] | None = None,
        on_epoch: Callable[[EpochResult], object] | None = None,
        on_error: Callable[[BaseException], object] | None = None,
    ) -> None:
        device = open_device(device or device_of(model))
        policy = NonFinitePolicy.of(on_nonfinite)
        training = ModelTraining(
            device,
            model,
            optimizer,
            loss,
            clip_norm=clip_norm,
            accumulate=accumulate,
            accumulate_by=accumulate_by,
            scheduler=scheduler,
            scheduler_every=scheduler_every,
            ema_decay=ema_decay,
            policy=policy,
            restores=on_error is not None,
            on_oom=on_oom,
        )
        self._set_up(
            training,
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

    @classmethod
    def from_step(
        cls,
        step: StepFunction,
        *,
        device: Device | str | torch.device = "auto",
        plan: Plan | str | Path | Mapping[str, Any] = "pipeline",
        deterministic: bool = False,
        nvtx: bool = False,
        on_step: Callable[[Progress], object] | None = None,
        on_values: Callable[[int, dict[str, float]], object] | None = None,
        on_epoch: Callable[[EpochResult], object] | None = None,
    ) -> Engine:
        """An engine around a step of your own (two optimizers, a GAN): `step(batch)` does all of
        it, on one stream, and returns what is to be reported, as a loss function does, or None.
        Prefetch, deferral, run-ahead and host waits are the plan's."""
        engine, device = cls.__new__(cls), open_device(device)
        training = OwnTraining(device, step)
        engine._set_up(training, device, plan, deterministic=deterministic, nvtx=nvtx)
        engine.on_step, engine.on_values, engine.on_epoch = on_step, on_values, on_epoch
        return engine

    def _set_up(
        self,
        training: Training,
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
        self.device, self._training = device, training
        self._precision, self._deterministic, self._nvtx = precision, deterministic, nvtx
        self._said: set[str] = set()
        self.plan = self._own(Plan.of(plan))
        self._next_plan: Plan | None = None
        self.epochs = 0
        self.last_result: EpochResult | None = None
        self._on_error, self._loader_timeout = on_error, loader_timeout
        self._non_finite = NonFiniteWatch(policy, device)
        self._running: Pass | None = None
        self._stepped: weakref.ref[Steps] | None = None
        self._place = Place(device)
        self._iterators = UsedIterators()
        self._cache: BatchCache | None = None
        self._follow_plan()

    def _follow_plan(self) -> None:
        """Set up what the plan asks for, or say why it is not there."""
        plan = self.plan
        self._cache = BatchCache(plan.cache_batches) if plan.cache_batches else None
        self._training.follow(plan)
        report = self.compiled
        if report is not None and report.why is not None:
            self.device.say_once(
                f"compile: {report.why}",
                "plan %s: the step is not compiled and runs as it is: %s",
                plan.name,
                report.why,
            )

    @property
    def model(self) -> torch.nn.Module:
        """The model that is trained."""
        if not isinstance(self._training, ModelTraining):
            raise AttributeError("an engine made from a step has no model")
        return self._training.model

    @property
    def ema(self) -> Ema | None:
        """The averaged weights, if they are kept."""
        return self._training.ema if isinstance(self._training, ModelTraining) else None

    def _with_a_state(self) -> ModelTraining:
        if not isinstance(self._training, ModelTraining):
            raise StepError("an engine made from a step keeps no state: the step's is your own")
        return self._training

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
        with self._reported(run, loader), closing(iter(run)) as steps:
            for _ in steps:
                pass
            self._require_batches(run, loader, max_steps)
        return self._finish(run)

    def steps(
        self, loader: Iterable[Any], *, max_steps: int | None = None, first_batch: int | None = None
    ) -> Steps:
        """The same as `epoch`, but the loop is the caller's: a `Progress` after each batch.

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
            with self._reported(run, loader), closing(iter(run)) as steps:
                while self._advanced(run, steps):
                    # Also if it leaves: an update may be to come.
                    with run.stages.lanes.given_back():
                        yield run.progress
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
        training = self._with_a_state()
        position = self._place.position(self.epochs, self._running)
        return stored_state.state_of(
            training.parts,
            training.schedule,
            training.graphs,
            position,
            left_out=self._non_finite.skipped,
        )

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """Go back to a stored state. Returns how many batches of epoch `epochs` it had trained on;
        the next `epoch(loader)` goes on after them."""
        training = self._with_a_state()
        self._end_other_loop()
        state = stored_state.upgraded(state)
        stored_state.restore(state, training.parts, training.schedule, training.graphs)
        with stored_state.fitting():
            own = self._place.checked(stored_state.own_part(state, self.ranks))
            self._non_finite.skipped, self.epochs = int(own["left_out"]), own["epoch"]
            return self._place.restore(own)

    @torch.no_grad()
    def evaluate(self, loader: Iterable[Any]) -> EpochResult:
        """The loss and metrics over a loader, without gradients, under the same plan."""
        if not isinstance(self._training, ModelTraining):
            raise StepError("evaluate needs a model and a loss: this engine was made from a step")
        if self._running is not None:
            self._running.tally.keep_peak()
        with eval_mode(self.model), self.device.ledger.apart():
            lanes, step = self._training.evaluation(self.plan, annotate=self._nvtx)
            silent = Observers(None, NonFiniteWatch(NonFinitePolicy("report"), self.device))
            options = self._pass_options(loader_timeout=0)
            run = open_pass(options, loader, lanes, step, silent, Start(), epoch=self.epochs)
            with closing(iter(run)) as steps:
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
            self.plan, self._next_plan = self._next_plan, None
            self._follow_plan()

    def _own(self, plan: Plan) -> Plan:
        """The plan with the engine's own precision, if it was given one; or the plan that the
        environment puts in its place."""
        if self._precision is not None and self._precision != plan.precision:
            plan = replace(plan, precision=self._precision)  # type: ignore[arg-type]
        used = in_force(plan)
        if used != plan and PLAN_VARIABLE not in self._said:
            self._said.add(PLAN_VARIABLE)
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
        parts = self._training.parts
        return 0 if parts is None else parts.group.updates

    @property
    def ranks(self) -> Ranks:
        """The processes that the model is spread over; those of a plain model are one."""
        return self._training.ranks

    @property
    def is_between_updates(self) -> bool:
        """Whether no accumulation group is open: with several ranks, when a state may be taken."""
        parts = self._training.parts
        return parts is None or not parts.group.is_open

    @property
    def graphs(self) -> GraphReport | None:
        """What became of the plan's graphs; None if it has none, or the device cannot."""
        graphs = self._training.graphs
        return None if graphs is None else graphs.report()

    @property
    def compiled(self) -> CompileReport | None:
        """Whether the step runs as compiled code, and why not; None if the plan does not ask for
        that."""
        return self._training.compiled if self.plan.compile else None

    def close(self) -> None:
        """Let go of the device memory that the plan holds: graphs and cached batches. The engine
        may be used on."""
        if self._training.graphs is not None:
            self._training.graphs.close()
        if self._cache is not None:
            self._cache = BatchCache(self.plan.cache_batches)

    # --- around the loop -------------------------------------------------------------------------

    def _training_run(
        self, loader: Iterable[Any], max_steps: int | None, first: int | None
    ) -> Pass:
        self._end_other_loop()
        self._change_plan()
        self._look_at_mode()
        loader = unprefetched(loader)
        tell_epoch(loader, self.epochs)
        try:
            loader, start = self._place.begin(loader, first)
            return self._open(loader, max_steps, start)
        except BaseException:
            self._place.not_begun()
            raise

    def _open(self, loader: Iterable[Any], max_steps: int | None, start: Start) -> Pass:
        training = self._training
        training.begin_epoch()
        lanes = training.lanes(self.plan, annotate=self._nvtx)
        observers = Observers(
            training.schedule, self._non_finite, self.on_values, self.on_step, self._on_error
        )
        return open_pass(
            self._pass_options(self._loader_timeout),
            loader,
            lanes,
            training.step(lanes),
            observers,
            start,
            epoch=self.epochs,
            limit=None if max_steps is None else training.batches_for(max_steps),
            parts=training.parts,
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

    def _look_at_mode(self) -> None:
        """Say once that a model in eval mode is trained as it is: without dropout, say."""
        if not isinstance(self._training, ModelTraining) or "eval" in self._said:
            return
        if not any(module.training for module in unwrap(self.model).modules()):
            self._said.add("eval")
            log.warning(
                "the model is in eval mode in the training loop at %s, so dropout is off and batch "
                "norm uses its running means: call model.train() before it, unless that is meant",
                users_line(),
            )

    def _require_batches(self, run: Pass, loader: Iterable[Any], most: int | None) -> None:
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

    @contextmanager
    def _reported(self, run: Pass, loader: Iterable[Any]) -> Iterator[None]:
        """Whatever ends the loop, its result is kept."""
        self._running, failed = run, True
        try:
            yield
            failed = False
        except torch.OutOfMemoryError as problem:
            graphs = self.graphs
            raise memory_error.explained(
                problem,
                device=self.device,
                plan=self.plan,
                parts=self._training.parts,
                batch=run.tally.failed,
                largest=run.tally.largest,
                graph_bytes=0 if graphs is None else graphs.memory_bytes,
            ) from problem
        finally:
            self._running = None
            if run.has_trained:  # also if it was left: the loader's other batches may be all gone
                self._iterators.note(loader)
            self._place.end(run, failed=failed)
            if run.ended:
                self.last_result = self._result_of(run)

    def _result_of(self, run: Pass) -> EpochResult:
        result = run.tally.result(run.progress, self.plan.name, run.stages.recorder.entries)
        return replace(result, compiled=self.compiled)

    def _finish(self, run: Pass) -> EpochResult:
        """Count the epoch that was just reported as done."""
        result = self.last_result
        assert result is not None
        self.epochs += 1
        self._change_plan()
        if self._training.schedule is not None:
            mean_loss = run.stages.recorder.loss().mean
            self._training.schedule.tell_epoch(self.epochs, mean_loss)
        if self.on_epoch is not None:
            self.on_epoch(result)
        return result

    def _advanced(self, run: Pass, steps: Iterator[Progress]) -> bool:
        """One batch more, on the stream the loop began on, whatever is current by now."""
        with self.device.use(run.stages.lanes.caller):
            return next(steps, run) is not run
