"""The training behind an engine: opens and runs passes, and keeps plan, position and counters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import torch

from headrace.data import unwrap_prefetcher
from headrace.engine.build.passes import open_pass
from headrace.engine.build.step_builder import StepBuilder
from headrace.engine.loader_checks import LoaderChecks
from headrace.engine.loop.loop import Pass
from headrace.engine.loop.open_loop import OpenLoop, Steps
from headrace.engine.loop.parts import Hooks, Observers, OnOutputs
from headrace.engine.loop.results import EpochResult
from headrace.engine.options import EngineOptions
from headrace.engine.plan_in_use import PlanInUse
from headrace.engine.stages import Progress
from headrace.engine.state import stored_state
from headrace.engine.state.loader_position import set_loader_epoch
from headrace.engine.state.own_share import for_rank
from headrace.engine.state.resume import PositionTracker, Start
from headrace.engine.step import memory_error
from headrace.engine.update.nonfinite import NonFinitePolicy, NonFiniteWatch
from headrace.errors import StepError
from headrace.parallel import eval_mode
from headrace.plan import Plan
from headrace.schema import require_whole


class PlannedTraining:
    """What an engine trains with `builder`, under `plan`."""

    def __init__(
        self, options: EngineOptions, hooks: Hooks, builder: StepBuilder, plan: Plan
    ) -> None:
        self.options = options
        self.hooks = hooks
        self.builder = builder
        self.planned = PlanInUse(options, builder, plan)
        self.loop = OpenLoop()
        self.epochs = 0
        self.last_result: EpochResult | None = None
        self._non_finite = NonFiniteWatch(options.policy, options.device)
        self._tracker = PositionTracker(options.device)
        self._loaders = LoaderChecks()

    def epoch(self, loader: Iterable[Any], max_steps: int | None, first: int | None) -> EpochResult:
        run = self._begin_pass(loader, max_steps, first)
        with self._keeping_result(run, loader), closing(iter(run)) as steps:
            for _ in steps:
                pass
            self._loaders.require_batches(run, loader, max_steps)
        return self._finish(run)

    def steps(self, loader: Iterable[Any], max_steps: int | None, first: int | None) -> Steps:
        own_ref: list[weakref.ref[Steps]] = []
        steps = self._run_steps(own_ref, loader, max_steps, first)
        own_ref.append(weakref.ref(steps))
        return steps

    def _run_steps(
        self,
        own_ref: list[weakref.ref[Steps]],
        loader: Iterable[Any],
        max_steps: int | None,
        first: int | None,
    ) -> Steps:
        run = self._begin_pass(loader, max_steps, first)
        self.loop.attach(own_ref[0])
        try:
            with self._keeping_result(run, loader), closing(iter(run)) as steps:
                while self._advance(run, steps):
                    # Also around a `break`: the update of the last group may follow it.
                    with run.stages.lanes.yielding_to_caller():
                        yield run.progress
                self._loaders.require_batches(run, loader, max_steps)
        except GeneratorExit:
            self._finish(run)
            raise
        self._finish(run)

    def evaluate(self, loader: Iterable[Any], on_outputs: OnOutputs) -> EpochResult:
        builder, options = self.builder.with_model("evaluate"), self.options
        if self.loop.running is not None:
            self.loop.running.tally.keep_peak()
        with eval_mode(builder.model), options.device.ledger.apart():
            lanes, step = builder.evaluation(self.planned.plan, annotate=options.nvtx)
            watch = NonFiniteWatch(NonFinitePolicy("report"), options.device)
            run = open_pass(
                self.planned.pass_options(loader_timeout=0),
                loader,
                lanes,
                step,
                Observers(None, watch, Hooks(on_outputs=on_outputs)),
                Start(),
                epoch=self.epochs,
            )
            with closing(iter(run)) as steps:
                for _ in steps:
                    pass
            self._loaders.require_batches(run, loader, None)
            if run.has_trained:
                self._loaders.note(loader)
            return self._result_of(run)

    def use_plan(self, plan: Plan) -> None:
        self.planned.use_next(plan)
        if self.loop.running is None:
            self.planned.change()

    def state_dict(self) -> dict[str, Any]:
        builder = self.builder.with_model("state_dict")
        return stored_state.state_of(
            builder.parts,
            builder.schedule,
            builder.graphs,
            self._tracker.position(self.epochs, self.loop.running),
            skipped_updates=self._non_finite.skipped,
        )

    def load_state_dict(self, state: dict[str, Any]) -> int:
        builder = self.builder.with_model("load_state_dict")
        self.loop.end()
        state = stored_state.checked(state)
        stored_state.restore(state, builder.parts, builder.schedule, builder.graphs)
        with stored_state.mismatch_as_step_error():
            own = self._tracker.checked(for_rank(state, builder.ranks))
            self._non_finite.restore(int(own["skipped_updates"]))
            self.epochs = own["epoch"]
            return self._tracker.restore(own)

    def _begin_pass(self, loader: Iterable[Any], max_steps: int | None, first: int | None) -> Pass:
        self.loop.end()
        self.planned.change()
        self._loaders.warn_of_eval_mode(self.builder)
        loader = unwrap_prefetcher(loader)
        set_loader_epoch(loader, self.epochs)
        try:
            loader, start = self._tracker.begin(loader, first)
            return self._open(loader, max_steps, start)
        except BaseException:
            self._tracker.cancel()
            raise

    def _open(self, loader: Iterable[Any], max_steps: int | None, start: Start) -> Pass:
        builder, hooks, options = self.builder, self.hooks, self.options
        require_whole("on_update_every", hooks.on_update_every, 1, StepError)
        builder.begin_epoch(from_start=start.first == 0)
        lanes = builder.lanes(self.planned.plan, annotate=options.nvtx)
        observers = Observers(builder.schedule, self._non_finite, replace(hooks), options.on_error)
        return open_pass(
            self.planned.pass_options(options.loader_timeout),
            loader,
            lanes,
            builder.step(lanes),
            observers,
            start,
            epoch=self.epochs,
            limit=None if max_steps is None else builder.batches_for(max_steps),
            parts=builder.parts,
        )

    @contextmanager
    def _keeping_result(self, run: Pass, loader: Iterable[Any]) -> Iterator[None]:
        """Inside the block `run` is the running pass. However it ends, keep its result."""
        failed = True
        try:
            with self.loop.of(run):
                yield
            failed = False
        except torch.OutOfMemoryError as problem:
            graphs = self.builder.graphs
            raise memory_error.out_of_memory_error(
                problem,
                device=self.options.device,
                plan=self.planned.plan,
                parts=self.builder.parts,
                batch=run.tally.failed,
                largest=run.tally.largest,
                graph_bytes=0 if graphs is None else graphs.report().memory_bytes,
            ) from problem
        finally:
            if run.has_trained:  # also after a `break`: an iterator's other batches may be gone
                self._loaders.note(loader)
            self._tracker.end(run, failed=failed)
            if run.ended:
                self.last_result = self._result_of(run)

    def _result_of(self, run: Pass) -> EpochResult:
        result = run.tally.result(run.progress, self.planned.plan.name, run.stages.recorder.entries)
        return replace(result, compiled=self.planned.compiled)

    def _finish(self, run: Pass) -> EpochResult:
        """Count the epoch that has just ended, step the scheduler and call `on_epoch`."""
        result = self.last_result
        assert result is not None
        self.epochs += 1
        self.planned.change()
        if self.builder.schedule is not None:
            mean_loss = run.stages.recorder.loss().mean
            self.builder.schedule.after_epoch(self.epochs, mean_loss)
        if self.hooks.on_epoch is not None:
            self.hooks.on_epoch(result)
        return result

    def _advance(self, run: Pass, steps: Iterator[Progress]) -> bool:
        """Train on the next batch, if there is one, on the stream on which the loop began."""
        with self.options.device.use(run.stages.lanes.caller):
            return next(steps, run) is not run
