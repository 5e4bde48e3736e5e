"""What an engine is given once, and what it calls: its options and its hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headrace.device import Device
from headrace.engine.loop.parts import Observers
from headrace.engine.loop.results import EpochResult
from headrace.engine.stages import Progress
from headrace.engine.update.nonfinite import NonFinitePolicy, NonFiniteWatch
from headrace.engine.update.schedules import Schedule

OnProgress = Callable[[Progress], object] | None
OnValues = Callable[[int, dict[str, float]], object] | None
OnOutputs = Callable[[int, Any], object] | None
OnEpoch = Callable[[EpochResult], object] | None
Value = TypeVar("Value")
_REPORT = NonFinitePolicy("report")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What stays the same as long as an engine lives."""

    device: Device
    precision: str | None = None
    deterministic: bool = False
    nvtx: bool = False
    policy: NonFinitePolicy = _REPORT
    loader_timeout: float = 0
    on_error: Callable[[BaseException], object] | None = None


@dataclass(slots=True)
class Hooks:
    """What an engine calls. Each may be replaced at any time; a pass takes those that it finds when
    it begins."""

    on_step: OnProgress = None
    on_update: OnProgress = None
    on_update_every: int = 1
    on_values: OnValues = None
    on_outputs: OnOutputs = None
    on_epoch: OnEpoch = None

    def observers(
        self,
        schedule: Schedule | None,
        non_finite: NonFiniteWatch,
        on_error: Callable[[BaseException], object] | None,
    ) -> Observers:
        """What a pass calls that begins now."""
        return Observers(
            schedule,
            non_finite,
            on_update=self.on_update,
            on_update_every=self.on_update_every,
            on_values=self.on_values,
            on_outputs=self.on_outputs,
            on_step=self.on_step,
            on_error=on_error,
        )


class Hook(Generic[Value]):
    """An attribute of an engine that stands in its `hooks`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, engine: Any, owner: type | None = None) -> Value:
        if engine is None:
            return self  # type: ignore[return-value]
        value: Value = getattr(engine.hooks, self._name)
        return value

    def __set__(self, engine: Any, value: Value) -> None:
        setattr(engine.hooks, self._name, value)
