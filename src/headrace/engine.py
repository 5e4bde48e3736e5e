"""The engine: one loop, run under any plan, with the same losses under all of them."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

from headrace import batches
from headrace.deferred import DeferredScalars, DeferredValues, Scalar
from headrace.device import Device, open_device
from headrace.ema import Ema
from headrace.errors import StepError
from headrace.lanes import HostSync, Lanes
from headrace.plan import Plan
from headrace.prefetcher import BatchCache, Prefetcher, PrefetchIterator
from headrace.results import EpochResult, Pass, epoch_result
from headrace.runahead import RunAhead
from headrace.step import LossFunction, LossParts, TrainingStep

log = logging.getLogger("headrace")

StepFunction = Callable[[Any], torch.Tensor | Mapping[str, Scalar] | None]


@dataclass(frozen=True, slots=True)
class StepInfo:
    """Where the loop stands after a batch. `come_back` are earlier batches' values that have
    arrived from the device since the last one: nothing was waited for."""

    epoch: int
    batch: int
    updates: int
    come_back: tuple[DeferredValues, ...]


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
        return engine

    def _set_up(
        self, plan: Any, device: Any, precision: str | None, deterministic: bool, nvtx: bool
    ) -> None:
        self.plan = Plan.of(plan)
        if precision is not None and precision != self.plan.precision:
            self.plan = replace(self.plan, precision=precision)  # type: ignore[arg-type]
        self.device = open_device(device)
        self.epochs = 0
        self.last_result: EpochResult | None = None
        self._custom: StepFunction | None = None
        self._deterministic = deterministic
        self._nvtx = nvtx
        if self.plan.graphs != "off":
            self.device.say_once(
                "graphs",
                "plan %s: this version launches the step's kernels one by one on %s; "
                "all else is as the plan says",
                self.plan.name,
                self.device,
            )
        self._cache = None
        if self.plan.cache_batches:
            self._cache = BatchCache(self.device, self.plan.cache_batches)

    # --- what is called --------------------------------------------------------------------------

    def epoch(self, loader: Iterable[Any], *, max_steps: int | None = None) -> EpochResult:
        """Train on every batch of the loader (or for `max_steps` updates), to the last loss.

        If the loader or the loss raises, what was trained on before is in `last_result`.
        """
        run = self._training_run(loader, max_steps)
        with self._reported(run), closing(run.loop()) as loop:
            for _ in loop:
                pass
        return self._finish(run)

    def steps(
        self, loader: Iterable[Any], *, max_steps: int | None = None
    ) -> Generator[StepInfo, None, None]:
        """The same as `epoch`, but the loop is the caller's: a `StepInfo` after each batch.

        At each yield the caller's stream is ordered after the engine's. The result is in
        `last_result` once the loop has ended, or has been left: a batch that was trained on is
        never lost.
        """
        run = self._training_run(loader, max_steps)
        try:
            with self._reported(run), closing(run.loop()) as loop:
                while (info := self._next(run, loop)) is not None:
                    run.lanes.give_back()
                    yield info
                    run.lanes.take_over()
        except GeneratorExit:
            self._finish(run)
            raise
        self._finish(run)

    @torch.no_grad()
    def evaluate(self, loader: Iterable[Any]) -> EpochResult:
        """The loss and metrics over a loader, without gradients, under the same plan."""
        if self._step is None:
            raise StepError("evaluate needs a model and a loss: this engine was made from a step")
        training = self.model.training
        self.model.eval()
        try:
            run = _Run(self, loader, self._evaluate_batch)
            with closing(run.loop()) as loop:
                for _ in loop:
                    pass
        finally:
            self.model.train(training)
        return run.result()

    # --- one batch -------------------------------------------------------------------------------

    def _train_batch(self, run: _Run, index: int, batch: Any) -> None:
        step, lanes = self._step, run.lanes
        assert step is not None
        with lanes.on(lanes.forward), self._annotated("forward"):
            parts = step.forward(batch)
            run.report(index, parts)
        lanes.forward_to_backward()
        with lanes.on(lanes.backward), self._annotated("backward"):
            step.backward(parts)
            if step.group_is_full:
                step.update()
        lanes.backward_to_forward()

    def _evaluate_batch(self, run: _Run, index: int, batch: Any) -> None:
        assert self._step is not None
        with run.lanes.on(run.lanes.forward), self._annotated("evaluate"):
            run.report(index, self._step.forward(batch))

    def _custom_batch(self, run: _Run, index: int, batch: Any) -> None:
        assert self._custom is not None
        with run.lanes.on(run.lanes.forward), self._annotated("step"):
            returned = self._custom(batch)
            if returned is not None:
                run.report(index, LossParts.of(returned, self.device, needs_grad=False))

    # --- around the loop -------------------------------------------------------------------------

    def _training_run(self, loader: Iterable[Any], max_steps: int | None) -> _Run:
        _tell_epoch(loader, self.epochs)
        if self._step is None:
            return _Run(self, loader, self._custom_batch, most=max_steps)
        most = None if max_steps is None else max_steps * self._step.accumulate
        return _Run(self, loader, self._train_batch, most=most, step=self._step)

    @contextmanager
    def _reported(self, run: _Run) -> Iterator[None]:
        """Whatever ends the loop, its result is kept."""
        try:
            yield
        finally:
            if run.ended:
                self.last_result = run.result()

    def _finish(self, run: _Run) -> EpochResult:
        result = run.result()
        self.epochs += 1
        if self._step is not None:
            self._step.end_epoch(result.mean_loss)
        if self.on_epoch is not None:
            self.on_epoch(result)
        return result

    def _next(self, run: _Run, loop: Iterator[StepInfo]) -> StepInfo | None:
        """One batch, on the stream the loop began on, whatever is current by now."""
        with self.device.use(run.lanes.caller):
            return next(loop, None)

    def _annotated(self, name: str) -> AbstractContextManager[object]:
        return self.device.annotate(name) if self._nvtx else nullcontext()


class _Run:
    """One pass over a loader under the engine's plan."""

    def __init__(
        self,
        engine: Engine,
        loader: Iterable[Any],
        run_batch: Callable[[_Run, int, Any], None],
        *,
        most: int | None = None,
        step: TrainingStep | None = None,
    ) -> None:
        plan, device = engine.plan, engine.device
        self.engine, self.device, self.plan = engine, device, plan
        self.step = step
        self.ended = False
        self.lanes = Lanes(device, plan, split=plan.split_backward and step is not None)
        source = loader if most is None else _First(loader, most)
        self._feed = Prefetcher(
            source,
            device,
            plan.prefetch_depth,
            pin=plan.pin,
            transfers=self.lanes.transfers,
            owner=self.lanes.forward,
            runs_on_owner=self.lanes.forward is self.lanes.caller,
            cache=engine._cache,
        )
        self._run_batch = run_batch
        self._deferred = DeferredScalars(device, plan.deferred_every, stream=self.lanes.losses)
        self._window = RunAhead(device, plan.run_ahead_steps, plan.run_ahead_bytes)
        self._sync = HostSync(device, plan, self.lanes)
        self._entries: list[DeferredValues] = []
        self._come_back: tuple[DeferredValues, ...] = ()
        self._batches = self._samples = 0
        self._weighted = False
        self._updates_before = step.updates if step is not None else 0

    def loop(self) -> Generator[StepInfo, None, None]:
        """The loop. Whatever happens, what was launched is finished and its values come back."""
        with ExitStack() as session:
            session.enter_context(self._settings())
            session.callback(self._end)
            feed = session.enter_context(closing(self._begin()))
            for index, batch in enumerate(feed):
                self.lanes.arrived(feed)
                self._window.admit(feed.last_nbytes)
                self._samples += feed.last_samples
                if index == 0 and self.engine._step is not None:
                    _require_tensor(batch)
                try:
                    self._run_batch(self, index, batch)
                except BaseException:
                    if self.step is not None:
                        self.step.abandon()
                    raise
                del batch  # freed before the next one is asked for
                self._batches += 1
                self._window.launched(self.lanes.backward)
                feed.freed_by = self.lanes.freed_by
                self._sync.after_batch(index)
                self._collect(self._deferred.ready())
                yield self._info(index)

    def report(self, index: int, parts: LossParts) -> None:
        self._weighted = self._weighted or parts.weighted
        self._deferred.push(index, parts.values)

    def result(self) -> EpochResult:
        """What the pass gave; the loop must have ended."""
        counted = Pass(
            epoch=self.engine.epochs,
            plan=self.plan.name,
            device=str(self.device),
            batches=self._batches,
            updates=self._updates(),
            samples=self._samples,
            weighted=self._weighted,
            elapsed_s=self._elapsed_s,
            peak_memory_bytes=self.device.peak_memory(),
        )
        return epoch_result(counted, self._entries, self.device.ledger.epoch_statistics())

    def _begin(self) -> PrefetchIterator:
        self.device.ledger.start_epoch()
        self.device.reset_peak_memory()
        self._start_ns = self.device.ledger.now_ns()
        self.lanes.take_over()
        return iter(self._feed)

    def _end(self) -> None:
        """Use a last partial group's gradients, read the last values, and hand the streams back."""
        if self.step is not None and self.step.group_is_open:
            with self.lanes.on(self.lanes.backward):
                self.step.update()
            self.lanes.backward_to_forward()
        with self.lanes.on(self.lanes.forward):
            self._deferred.flush()
        self._sync.at_end(self._batches)
        self._collect(self._deferred.drain())
        with self.lanes.on(self.lanes.forward):
            self._deferred.close()
        self.lanes.give_back()
        self._elapsed_s = (self.device.ledger.now_ns() - self._start_ns) / 1e9
        self.ended = True

    def _collect(self, come_back: list[DeferredValues]) -> None:
        self._entries += come_back
        self._come_back = tuple(come_back)
        for entry in come_back:
            if entry.non_finite:
                names = ", ".join(entry.non_finite)
                self.device.say_once("non-finite", "%s not finite at batch %d", names, entry.step)

    def _info(self, index: int) -> StepInfo:
        info = StepInfo(self.engine.epochs, index, self._updates(), self._come_back)
        if self.engine.on_step is not None:
            self.engine.on_step(info)
        return info

    def _updates(self) -> int:
        return self._batches if self.step is None else self.step.updates - self._updates_before

    @contextmanager
    def _settings(self) -> Iterator[None]:
        with self.device.numerics(self.plan.precision), _determinism(self.engine._deterministic):
            yield


class _First:
    """The first items of a loader: no more are asked for, so none are lost to prefetching."""

    def __init__(self, loader: Iterable[Any], most: int) -> None:
        self._loader, self._most = loader, most

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._loader), self._most)


def _require_tensor(batch: Any) -> None:
    if next(batches.leaves(batch), None) is None:
        raise StepError(
            f"batch 0 (a {type(batch).__name__}) holds no tensor: expected tensors, in whatever "
            "nesting of tuples, dicts and dataclasses"
        )


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


@contextmanager
def _determinism(wanted: bool) -> Iterator[None]:
    """Deterministic kernels inside the block, errors where PyTorch has none."""
    if not wanted:
        yield
        return
    # cuBLAS reads this when it is first used; without it PyTorch refuses.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn
    was = (cudnn.deterministic, cudnn.benchmark)
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        cudnn.deterministic, cudnn.benchmark = was
