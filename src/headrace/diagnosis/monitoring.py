"""Where the figures of steps go that are watched all the time: files and experiment trackers."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.diagnosis.step_figures import StepFigures
from headrace.diagnosis.step_monitor import StepMonitor, Use
from headrace.lifecycle import MetricsLog

log = logging.getLogger("headrace")

#: Watches the steps of the whole process: 1, or the file for the figures.
VARIABLE = "HEADRACE_MONITOR"
_EVERY_S = 10.0
#: MLflow allows no others in a name.
_NOT_IN_NAMES = re.compile(r"[^\w\-. /]+")

Target = str | os.PathLike[str] | Use | None


def monitor_steps(
    to: Target = None,
    *,
    tensorboard: str | os.PathLike[str] | None = None,
    every_s: float = _EVERY_S,
) -> StepMonitor:
    """Watch the training steps inside the block, all the time.

        with hr.monitor_steps("steps.jsonl") as steps:
            train()
        print(steps)

    Every `every_s` seconds the figures of the steps since then are written to the file `to`, as a
    line of JSON, or given to the function `to`; to TensorBoard events in the folder `tensorboard`;
    and to the runs of Weights & Biases and MLflow that are active. Once, a warning says that steps
    have become slower, or that the data loader is the limit. This costs a step less than 10 µs.
    """
    return _StoringMonitor(to, tensorboard, every_s)


class _StoringMonitor(StepMonitor):
    """A monitor whose figures are handed on. Files are opened when the block begins."""

    def __init__(
        self, to: Target, tensorboard: str | os.PathLike[str] | None, every_s: float
    ) -> None:
        super().__init__(self._hand_on, every_s=every_s)
        self._to = to
        self._tensorboard = None if tensorboard is None else Path(tensorboard)
        self._file: MetricsLog | None = None
        self._trackers = ActiveTrackers(sys.modules)

    def __enter__(self) -> StepMonitor:
        path = os.devnull if self._to is None or callable(self._to) else self._to
        if path != os.devnull or self._tensorboard is not None:
            self._file = MetricsLog(Path(path), self._tensorboard, warn_only=True)
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if self._file is not None:
            self._file.close()

    def _hand_on(self, figures: StepFigures) -> None:
        if callable(self._to):
            self._to(figures)
        if self._file is not None:
            values = asdict(figures)
            self._file.write("steps", values.pop("step"), **values)
        self._trackers.log(figures)


def numbers_of(figures: StepFigures) -> dict[str, float]:
    """The figures as experiment trackers store them."""
    values = asdict(figures)
    kept = {name: values[name] for name in values if name not in ("step", "steps", "waits")}
    kept |= {f"wait_ms/{_name(one.place)}": one.ms for one in figures.waits}
    return {f"steps/{name}": value for name, value in kept.items() if value is not None}


def _name(place: str) -> str:
    """A file and its line as a part of a metric's name: MLflow may store it as a path."""
    file, _, line = place.rpartition(":")
    parts = [part for part in re.split(r"[/\\]", file) if part.strip(". ")]
    return _NOT_IN_NAMES.sub("_", f"{'/'.join(parts)} line {line}")


class ActiveTrackers:
    """The active runs of Weights & Biases and MLflow. `modules` are those that the script has
    imported. If one fails, a warning says so once, and the training goes on."""

    def __init__(self, modules: Mapping[str, object]) -> None:
        self._modules = modules
        self._failed: set[str] = set()

    def log(self, figures: StepFigures) -> None:
        """Hand the figures to the runs that are active now."""
        numbers = numbers_of(figures)
        for name, hand_on in (("wandb", _to_wandb), ("mlflow", _to_mlflow)):
            module = self._modules.get(name)
            if module is None or name in self._failed:
                continue
            try:
                hand_on(module, numbers, figures.step)
            except Exception as problem:  # a lost server must not end the training
                self._failed.add(name)
                log.warning("%s gets no more figures of steps: %s", name, problem)


def _to_wandb(wandb: Any, numbers: Mapping[str, float], step: int) -> None:
    run = getattr(wandb, "run", None)
    if run is not None:
        run.log(numbers, commit=False)  # with the script's own next values


def _to_mlflow(mlflow: Any, numbers: Mapping[str, float], step: int) -> None:
    if mlflow.active_run() is not None:  # else log_metrics would begin one
        mlflow.log_metrics(numbers, step=step)


def monitor_by_environment() -> None:
    """Watch the steps of this process until it ends, if `HEADRACE_MONITOR` asks for it. Processes
    that it starts, such as a loader's, are left alone."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted in ("", "0") or multiprocessing.parent_process() is not None:
        return
    monitor = monitor_steps(None if wanted == "1" else wanted)
    monitor.__enter__()

    def end() -> None:
        monitor.__exit__()
        sys.stderr.write(f"{VARIABLE}: {monitor}\n")

    atexit.register(end)
