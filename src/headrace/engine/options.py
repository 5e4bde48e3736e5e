"""What an engine is given once, and what it calls: its options and its hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headrace.device import Device
from headrace.engine.update.nonfinite import NonFinitePolicy

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
