"""Values of batches that have arrived on the host, and how they are stored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.device import Device

Scalar = torch.Tensor | float | int


@dataclass(frozen=True, slots=True)
class DeferredValues:
    """One step's values, arrived on the host. They are exact: the copy uses float64, or float32 if
    that holds all of them. `outputs` are the tensors that the loss function returned under that
    name; they are on the device."""

    step: int
    values: dict[str, float]
    outputs: Any = None

    @property
    def non_finite(self) -> tuple[str, ...]:
        """The names of values that were NaN or infinite in this step."""
        return tuple(name for name, value in self.values.items() if not math.isfinite(value))


def state_of_values(entries: Iterable[DeferredValues]) -> list[dict[str, Any]]:
    """Values that have arrived, in the form of `DeferredScalars.state`."""
    return [
        {"steps": [entry.step], "numbers": [entry.values], "names": [], "rows": None}
        for entry in entries
    ]


def values_of_state(state: Iterable[Mapping[str, Any]], device: Device) -> list[DeferredValues]:
    """The values in a stored `DeferredScalars.state`."""
    entries = []
    for block in state:
        rows: list[list[float]] = [[]] * len(block["steps"])
        if block["rows"] is not None:
            with device.ledger.waiting("restore"):
                rows = device.read_host(block["rows"].to("cpu"))
        for step, numbers, row in zip(block["steps"], block["numbers"], rows, strict=True):
            named = dict(zip(block["names"], row, strict=True))
            entries.append(DeferredValues(step, dict(numbers) | named))
    return entries
