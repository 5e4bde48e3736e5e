"""`monitor_steps` as a callback of Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from headrace.diagnosis.monitoring import numbers_of
from headrace.diagnosis.step_figures import StepFigures
from headrace.diagnosis.step_monitor import StepMonitor


class LightningMonitor(Callback):  # type: ignore[misc]
    """Watches the steps of `fit`, and gives their figures to the trainer's loggers.

    trainer = lightning.Trainer(callbacks=[hr.LightningMonitor()])
    """

    def __init__(self, *, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._monitor: StepMonitor | None = None

    @property
    def latest(self) -> StepFigures | None:
        """The last figures; None before there are any."""
        return None if self._monitor is None else self._monitor.latest

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def to_loggers(figures: StepFigures) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(numbers_of(figures), step=trainer.global_step)

        self._monitor = StepMonitor(to_loggers, every_s=self._every_s)
        self._monitor.__enter__()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: Any) -> None:
        self._end()

    def _end(self) -> None:
        if self._monitor is not None:
            self._monitor.__exit__()
