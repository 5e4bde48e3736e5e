"""`monitor_steps` as a callback of the Trainer of Transformers."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from headrace.diagnosis.monitoring import monitor_steps
from headrace.diagnosis.step_figures import StepFigures
from headrace.diagnosis.step_monitor import StepMonitor


class TrainerMonitor(TrainerCallback):  # type: ignore[misc]
    """Watches the steps of `train`. Their figures go where `hr.monitor_steps` puts them, and to the
    TensorBoard events of the Trainer, if it writes any.

    trainer = Trainer(..., callbacks=[hr.TrainerMonitor()])
    """

    def __init__(self, to: str | os.PathLike[str] | None = None, *, every_s: float = 10.0) -> None:
        self._to, self._every_s = to, every_s
        self._monitor: StepMonitor | None = None

    @property
    def latest(self) -> StepFigures | None:
        """The last figures; None before there are any."""
        return None if self._monitor is None else self._monitor.latest

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.on_train_end(args, state, control)  # an error has ended the training before
        events = getattr(args, "logging_dir", None)
        writes = state.is_world_process_zero and "tensorboard" in (args.report_to or ())
        self._monitor = monitor_steps(
            self._to, tensorboard=events if writes else None, every_s=self._every_s
        )
        self._monitor.__enter__()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._monitor is not None and self._monitor.is_running:
            self._monitor.__exit__()
