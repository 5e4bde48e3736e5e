"""What can be read of an engine, its hooks and its plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.capture import GraphReport
from headrace.device import Device
from headrace.engine.loop.parts import Hooks, OnEpoch, OnOutputs, OnProgress, OnValues
from headrace.engine.loop.results import EpochResult
from headrace.engine.loss.compiled import CompileReport
from headrace.engine.options import Hook
from headrace.engine.training import PlannedTraining
from headrace.engine.update.ema import Ema
from headrace.engine.values.arrived import DeferredValues
from headrace.errors import StepError
from headrace.parallel import Ranks
from headrace.plan import Plan


class EngineView:
    """An engine without its loops and its state."""

    hooks: Hooks
    _training: PlannedTraining

    on_step = Hook[OnProgress]()
    on_update = Hook[OnProgress]()
    on_update_every = Hook[int]()
    on_values = Hook[OnValues]()
    on_outputs = Hook[OnOutputs]()
    on_epoch = Hook[OnEpoch]()

    @property
    def device(self) -> Device:
        return self._training.options.device

    @property
    def plan(self) -> Plan:
        """The plan that passes run under."""
        return self._training.planned.plan

    @property
    def epochs(self) -> int:
        """Finished epochs, including those of a restored state."""
        return self._training.epochs

    @property
    def last_result(self) -> EpochResult | None:
        """The result of the last training loop, also of one that an error or a `break` ended."""
        return self._training.last_result

    @property
    def _builder(self) -> Any:
        return self._training.builder

    @property
    def model(self) -> torch.nn.Module:
        """The model that this engine trains."""
        return self._training.builder.model

    @property
    def ema(self) -> Ema | None:
        """The averaged weights; None without `ema_decay`."""
        return self._training.builder.ema

    @property
    def carried(self) -> Any:
        """The state that the next batch gets, as live tensors; None without a `carry`, or if it is
        the initial state. Set it to continue from another state, or to None to begin anew."""
        return None if self._training.builder.carry is None else self._training.builder.carry.state

    @carried.setter
    def carried(self, state: Any) -> None:
        if self._training.builder.carry is None:
            raise StepError("this engine carries no state: expected Engine(…, carry=…)")
        self._training.builder.carry.set(state)

    @property
    def updates(self) -> int:
        """Optimizer updates so far, including those of a restored state."""
        return self._training.builder.updates

    @property
    def ranks(self) -> Ranks:
        """The ranks that train this model together: one, unless it is wrapped in DDP or FSDP2."""
        return self._training.builder.ranks

    @property
    def is_between_updates(self) -> bool:
        """Whether no accumulation group is open. With several ranks, take a state only then."""
        parts = self._training.builder.parts
        return parts is None or not parts.group.is_open

    @property
    def graphs(self) -> GraphReport | None:
        """How steps run (`way`), and why not as the whole step in one graph; None if the plan has
        no graphs, or the device supports none."""
        graphs = self._training.builder.graphs
        return None if graphs is None else graphs.report()

    @property
    def compiled(self) -> CompileReport | None:
        """Whether the step runs as compiled code, or why not; None if the plan does not compile."""
        return self._training.planned.compiled

    def use_plan(self, plan: Plan | str | Path | Mapping[str, Any]) -> None:
        """Use another plan, from the next epoch on."""
        self._training.use_plan(Plan.of(plan))

    def close(self) -> None:
        """Free the device memory that the plan occupies: graphs and cached batches. The engine can
        still be used."""
        self._training.planned.close()

    # --- between two batches of a `steps()` loop --------------------------------------------------

    def leave(self) -> None:
        """End a `steps()` loop between two batches. Call it on all ranks, then `break`. A single
        process may `break` without it."""
        running = self._training.loop.running
        if running is not None:
            running.leave()

    def settle(self, reason: str = "settle") -> tuple[DeferredValues, ...]:
        """Wait for the values of all batches so far, between two batches of a `steps()` loop.
        Returns those that have not been in `Progress.arrived` yet."""
        running = self._training.loop.running
        return () if running is None else running.settle(reason)
