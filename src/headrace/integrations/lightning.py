"""`hr.lightning.SpeedUp()`: `hr.speed_up` as a callback of Lightning's Trainer.

    trainer = lightning.Trainer(callbacks=[hr.lightning.SpeedUp()])
    trainer.fit(model, loader)

During `fit`, the modules that `training_step` calls and the optimizers run as graphs, batches are
copied ahead, and logged values reach progress bars and loggers once they have arrived on the host.
Everything that is replaced is put back at the end of `fit`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from headrace.capture import SpeedUpHandle, SpeedUpReport, speed_up, watch_models, why_not
from headrace.data import Prefetcher
from headrace.device import Device, open_device
from headrace.engine import RunAhead
from headrace.errors import StepError
from headrace.integrations.late_values import MAX_AHEAD
from headrace.integrations.lightning_values import LoggedValues
from headrace.integrations.versions import warn_if_untested
from headrace.plan import PLAN_VARIABLE
from headrace.replacing import replaced

log = logging.getLogger("headrace")

# In so many batches the modules are looked for that training_step calls.
_WATCHED = 2
_DEPTH = 2
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device")


class SpeedUp(Callback):  # type: ignore[misc]
    """Graphs for a Lightning training. `plan`, `compile`, `after`, `shapes` and `recheck` are those
    of `hr.speed_up`. `report()` says what became of each part, also after `fit`."""

    def __init__(
        self,
        *,
        plan: Literal["auto", "graph"] = "auto",
        compile: bool = False,  # noqa: A002
        after: int = 2,
        shapes: int = 16,
        recheck: int = 1000,
    ) -> None:
        warn_if_untested("lightning")
        self._options: Any = {
            "plan": plan,
            "compile": compile,
            "after": after,
            "shapes": shapes,
            "recheck": recheck,
        }
        self._fit: _Fit | None = None
        self._report: SpeedUpReport | None = None

    def report(self) -> SpeedUpReport:
        """Which parts ran as graphs, which did not, and why: in this `fit`, or in the last one."""
        if self._fit is not None:
            return self._fit.report()
        if self._report is None:
            raise StepError("SpeedUp.report(): there is nothing to report before Trainer.fit()")
        return self._report

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._end()
            self._fit = _Fit(trainer, pl_module, self._options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.begin()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is not None:
            self._fit.batch_starts()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is not None:
            self._fit.batch_ends()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.drain()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end()

    def _end(self) -> None:
        if self._fit is not None:
            fit, self._fit = self._fit, None
            self._report = fit.report()
            fit.close()


class _Fit:
    """What is installed during one `fit`."""

    def __init__(self, trainer: Trainer, module: LightningModule, options: Any) -> None:
        self._trainer, self._options = trainer, options
        self._device = open_device(trainer.strategy.root_device)
        self._installed, self._watching = ExitStack(), ExitStack()
        self._run_ahead = RunAhead(self._device, MAX_AHEAD)
        self._handle: SpeedUpHandle | None = None
        self._models: list[torch.nn.Module] = []
        self._batches = 0
        self._values: LoggedValues | None = None
        self._off = _why_off(self._device)
        if self._off is not None:
            log.warning("SpeedUp does nothing: %s", self._off)
        elif (why := _why_not_ahead(trainer, module)) is not None:
            log.info("SpeedUp: batches are not copied ahead, because %s", why)
        else:
            ahead = replaced(trainer.strategy, "process_dataloader", self._ahead())
            self._installed.enter_context(ahead)

    def _ahead(self) -> Any:
        device, trainer = self._device, self._trainer
        theirs = trainer.strategy.process_dataloader

        def process_dataloader(dataloader: Any) -> Any:
            dataloader = theirs(dataloader)
            return _Ahead(dataloader, device) if trainer.training else dataloader

        return process_dataloader

    def begin(self) -> None:
        """A training begins: the one, or one by which a learning rate or a batch size is found,
        after which Lightning makes new optimizers."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            handle.close()
        self._models, self._batches = [], 0
        if self._off is None and self._values is None and self._trainer.world_size == 1:
            self._values = LoggedValues(self._trainer, self._device)

    def batch_starts(self) -> None:
        if self._off is not None:
            return
        self._run_ahead.admit()
        if self._values is not None:
            self._values.deliver()
        if self._batches < _WATCHED:
            self._watching.enter_context(watch_models(self._note, lambda: None))

    def _note(self, model: torch.nn.Module) -> None:
        if why_not(model) is None and all(model is not one for one in self._models):
            self._models.append(model)

    def batch_ends(self) -> None:
        if self._off is not None:
            return
        self._run_ahead.launched(self._device.current_stream())
        self._watching.close()
        self._batches += 1
        if self._batches == _WATCHED:
            parts: list[torch.nn.Module | torch.optim.Optimizer]
            parts = [*self._models, *_optimizers(self._trainer)]
            if parts:
                self._handle = speed_up(*parts, device=self._device, **self._options)

    def report(self) -> SpeedUpReport:
        if self._handle is not None:
            return self._handle.report()
        return SpeedUpReport((), self._off or f"fewer than {_WATCHED} batches were trained on")

    def drain(self) -> None:
        if self._values is not None:
            self._values.drain()

    def close(self) -> None:
        """Put everything back. Values that have not arrived yet are handed on first."""
        with ExitStack() as last:
            last.callback(self._installed.close)
            if self._handle is not None:
                last.callback(self._handle.close)
            if self._values is not None:
                last.callback(self._values.close)
            self._watching.close()
            self.drain()


def _why_off(device: Device) -> str | None:
    if os.environ.get(PLAN_VARIABLE) == "baseline":
        return f"{PLAN_VARIABLE}=baseline is set"
    return None if device.captures else f"graphs need a GPU, and this trains on {device}"


def _optimizers(trainer: Trainer) -> list[torch.optim.Optimizer]:
    """The optimizers that train something, without Lightning's wrappers."""
    inner = [getattr(one, "_optimizer", one) for one in trainer.strategy.optimizers]
    return [one for one in inner if isinstance(one, torch.optim.Optimizer) and one.param_groups]


# --- batches --------------------------------------------------------------------------------------


def _why_not_ahead(trainer: Trainer, module: LightningModule) -> str | None:
    """Why Lightning itself must move the batches; None if they can be copied ahead of use."""
    for owner in filter(None, (module, trainer.datamodule)):
        for name in _TRANSFER_HOOKS:
            if not _is_lightnings(getattr(type(owner), name)):
                return f"{type(owner).__name__}.{name} moves or changes them"
    return None


def _is_lightnings(method: Any) -> bool:
    """Whether a method is the framework's own, under either name of its package."""
    return method.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")


class _Ahead(Prefetcher):
    """A loader whose batches are copied ahead. A loader without workers makes them in this process,
    where it may draw random numbers: it is asked for a batch only when that is needed."""

    def __init__(self, loader: Iterable[Any], device: Device) -> None:
        ahead = bool(getattr(loader, "num_workers", 0))
        super().__init__(loader, device, _DEPTH if ahead else 0)

    def __iter__(self) -> Any:
        return super().__iter__().begin()  # begins its loader when Lightning would
