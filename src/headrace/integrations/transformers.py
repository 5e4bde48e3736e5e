"""`hr.transformers.speed_up(trainer)`: `hr.speed_up` in the Trainer of Hugging Face.

    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    hr.transformers.speed_up(trainer)
    trainer.train()

Methods are replaced on this trainer, not on its class: a callback gets no trainer, and subclasses
keep what they override. While it trains, model and optimizer run as graphs, batches are copied
without a wait, and the loss is checked and logged without one.
"""

from __future__ import annotations

import functools
import logging
import os
from contextlib import ExitStack
from typing import Any, Literal

import torch
from transformers import Trainer

from headrace.capture import SpeedUpHandle, SpeedUpReport
from headrace.capture import speed_up as speed_up_parts
from headrace.device import open_device
from headrace.engine import RunAhead
from headrace.errors import StepError
from headrace.integrations.late_values import MAX_AHEAD
from headrace.integrations.transformers_values import LateLogs, as_filtered
from headrace.integrations.versions import warn_if_untested
from headrace.plan import PLAN_VARIABLE
from headrace.replacing import replaced

log = logging.getLogger("headrace")

# What must be this version's, for values to arrive late.
_OF_LOGS = ("log", "_maybe_log_save_evaluate", "_track_num_input_tokens")


def speed_up(
    trainer: Trainer,
    *,
    plan: Literal["auto", "graph"] = "auto",
    compile: bool = False,  # noqa: A002
    after: int = 2,
    shapes: int = 16,
    recheck: int = 1000,
) -> SpeedUpTrainer:
    """Speed up `trainer.train()`. Call it once, after the trainer is made.

    The options are those of `hr.speed_up`. The result's `report()` says what became of each part,
    and its `close()` gives the trainer its own methods back. With `HEADRACE_PLAN=baseline` in the
    environment, and on a CPU, it does nothing.
    """
    if not isinstance(trainer, Trainer):
        raise StepError(
            f"transformers.speed_up was given {type(trainer).__name__}; expected a Trainer"
        )
    warn_if_untested("transformers")
    warn_if_untested("accelerate")
    options = {"after": after, "shapes": shapes, "recheck": recheck}
    return SpeedUpTrainer(trainer, options | {"plan": plan, "compile": compile})


class SpeedUpTrainer:
    """What `speed_up` returns: a trainer's methods, replaced until `close()`."""

    def __init__(self, trainer: Any, options: Any) -> None:
        self._trainer, self._options = trainer, options
        self._device = open_device(trainer.args.device)
        self._run_ahead = RunAhead(self._device, MAX_AHEAD)
        self._installed = ExitStack()
        self._handle: SpeedUpHandle | None = None
        self._report = SpeedUpReport((), "the trainer has not trained yet")
        self._logs: LateLogs | None = None
        self._has_removed_hooks = False
        off = None
        if os.environ.get(PLAN_VARIABLE) == "baseline":
            off = f"{PLAN_VARIABLE}=baseline is set"
        elif not self._device.captures:
            off = f"graphs need a GPU, and this trains on {self._device}"
        if off is not None:
            self._report = SpeedUpReport((), off)
            log.warning("transformers.speed_up does nothing: %s", off)
            return
        self._train = trainer._inner_training_loop
        self._step = trainer.training_step

        @functools.wraps(self._train)  # transformers reads the signature
        def training_loop(*args: Any, **kwargs: Any) -> Any:
            return self._training_loop(*args, **kwargs)

        for name, method in (
            ("_inner_training_loop", training_loop),
            ("training_step", self._training_step),
        ):
            self._installed.enter_context(replaced(trainer, name, method))

    def report(self) -> SpeedUpReport:
        """Which parts run as graphs, which do not, and why: in this `train()`, or the last one."""
        return self._report if self._handle is None else self._handle.report()

    def close(self) -> None:
        """Give the trainer its own methods back."""
        self._installed.close()

    def _training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's loop. It begins again with smaller batches if memory runs out, so what is
        made for one loop ends with it."""
        config = self._trainer.accelerator.dataloader_config
        before, config.non_blocking = config.non_blocking, True
        why = _why_on_time(self._trainer)
        try:
            if why is None:
                self._logs = LateLogs(self._trainer, self._device)
            else:
                log.info(
                    "transformers.speed_up: the host waits for what is logged, because %s", why
                )
            return self._train(*args, **kwargs)
        finally:
            config.non_blocking = before
            if self._logs is not None:
                self._logs.close()
                self._logs = None
            self._end_parts()

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._handle is None:
            self._begin_parts(args[0] if args else kwargs["model"])
        self._run_ahead.admit()
        if self._logs is not None:
            self._logs.deliver()
        loss = self._step(*args, **kwargs)
        self._run_ahead.launched(self._device.current_stream())
        filters = self._trainer.args.logging_nan_inf_filter
        return as_filtered(loss, self._trainer) if filters else loss

    def _begin_parts(self, model: torch.nn.Module) -> None:
        trainer = self._trainer
        self._has_removed_hooks = _has_needless_hooks(trainer)
        if self._has_removed_hooks:
            trainer.model.disable_input_require_grads()
        self._handle = speed_up_parts(
            model, *_optimizers(trainer), device=self._device, **self._options
        )

    def _end_parts(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._report = handle.report()
            handle.close()
            if self._has_removed_hooks:
                self._trainer.model.enable_input_require_grads()


def _optimizers(trainer: Any) -> list[torch.optim.Optimizer]:
    found = trainer.optimizer
    return [found] if isinstance(found, torch.optim.Optimizer) else []


def _has_needless_hooks(trainer: Any) -> bool:
    """Whether hooks on the embeddings, which make their output require a gradient, can go while the
    trainer trains: no graph could be captured with them. Only reentrant checkpoints need them."""
    options = trainer.args.gradient_checkpointing_kwargs or {}
    return (
        trainer.args.gradient_checkpointing
        and not options.get("use_reentrant", False)
        and bool(getattr(trainer.model, "_require_grads_hooks", None))
    )


def _why_on_time(trainer: Any) -> str | None:
    """Why values must be logged at the step that they belong to; None if they may arrive later."""
    if trainer.args.world_size > 1 or trainer.args.n_gpu > 1:
        return "several devices gather it"
    for name in _OF_LOGS:
        if not hasattr(Trainer, name):
            return f"this version of transformers has no Trainer.{name}"
        own = vars(trainer).get(name, getattr(type(trainer), name))
        if own is not getattr(Trainer, name):
            return f"{type(trainer).__name__} has a method {name} of its own"
    return None
