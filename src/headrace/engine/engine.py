"""`Engine`: trains a model under a plan. The plan changes the speed, not the losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from headrace.device import Device, open_device
from headrace.engine.build.model_builder import ModelStepBuilder
from headrace.engine.build.user_builder import UserStepBuilder
from headrace.engine.device_choice import device_to_train_on
from headrace.engine.loop.open_loop import Steps
from headrace.engine.loop.parts import Hooks, OnEpoch, OnOutputs, OnProgress, OnValues
from headrace.engine.loop.results import EpochResult
from headrace.engine.loss.forward import LossFunction
from headrace.engine.options import EngineOptions
from headrace.engine.step.user_step import StepFunction
from headrace.engine.training import PlannedTraining
from headrace.engine.update.nonfinite import NonFinitePolicy
from headrace.engine.update.schedules import LearningRateFunction, Scheduler, SchedulerInterval
from headrace.engine.view import EngineView
from headrace.plan import Plan


class Engine(EngineView):
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
        on_step: OnProgress = None,
        on_update: OnProgress = None,
        on_update_every: int = 1,
        on_values: OnValues = None,
        on_outputs: OnOutputs = None,
        on_epoch: OnEpoch = None,
        on_error: Callable[[BaseException], object] | None = None,
    ) -> None:
        options = EngineOptions(
            open_device(device or device_to_train_on(model)),
            precision,
            deterministic,
            nvtx,
            NonFinitePolicy.of(on_nonfinite),
            loader_timeout,
            on_error,
        )
        builder = ModelStepBuilder(
            options.device,
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
            policy=options.policy,
            restores_buffers=on_error is not None,
            on_oom=on_oom,
            carry=carry,
        )
        self.hooks = Hooks(on_step, on_update, on_update_every, on_values, on_outputs, on_epoch)
        self._training = PlannedTraining(options, self.hooks, builder, Plan.of(plan))

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
        on_step: OnProgress = None,
        on_update: OnProgress = None,
        on_update_every: int = 1,
        on_values: OnValues = None,
        on_outputs: OnOutputs = None,
        on_epoch: OnEpoch = None,
    ) -> Engine:
        """An engine that calls your own training step, for a GAN or two optimizers for example.

        `step(batch)` does the forward, the backward and the update, on one stream. It returns what
        to report, as a loss function does, or None. The engine adds what the plan says of
        prefetching, deferred values, run-ahead, host waits and graphs. With a `carry`, it is called
        as `step(batch, carried)` and returns a tuple of what to report and the state for the next
        batch. The other arguments are those of `Engine`; each batch counts as an update.
        """
        options = EngineOptions(open_device(device), deterministic=deterministic, nvtx=nvtx)
        builder = UserStepBuilder(options.device, step, carry)
        hooks = Hooks(on_step, on_update, on_update_every, on_values, on_outputs, on_epoch)
        return _StepEngine(hooks, PlannedTraining(options, hooks, builder, Plan.of(plan)))

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
        return self._training.epoch(loader, max_steps, first_batch)

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
        return self._training.steps(loader, max_steps, first_batch)

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
        return self._training.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """Restore a state of `state_dict()`. The next `epoch(loader)` continues after the last
        batch trained on. Returns how many batches of the current epoch have been trained on."""
        return self._training.load_state_dict(state)

    @torch.no_grad()
    def evaluate(self, loader: Iterable[Any], *, on_outputs: OnOutputs = None) -> EpochResult:
        """Compute loss and metrics over a loader: in eval mode, without gradients, under the plan.
        Carried state begins with the initial one. `on_outputs(step, outputs)` gets what the loss
        function returns under `outputs`, such as predictions for a metric."""
        return self._training.evaluate(loader, on_outputs)


class _StepEngine(Engine):
    """What `Engine.from_step` returns."""

    def __init__(self, hooks: Hooks, training: PlannedTraining) -> None:
        self.hooks = hooks
        self._training = training
