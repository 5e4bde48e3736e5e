"""What was trained, and on which machine: part of every bench and tune result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class WorkRecord:
    """What was trained. `options` are the workload's own, `unit` is what throughput counts."""

    name: str = "work"
    description: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    unit: Literal["samples", "tokens"] = "samples"


@dataclass(frozen=True, slots=True)
class Environment:
    """Where and when a result was measured, and with which versions."""

    command: str = ""
    date: str = ""
    headrace: str = ""
    torch: str = ""
    python: str = ""
    device: str = ""
    device_name: str = ""
    device_memory_bytes: int | None = None
    driver: str | None = None
    cpu: str = ""
    cores: int | None = None
    platform: str = ""
    #: Which float32 products PyTorch was set to compute in TF32; None if the device has no choice.
    float32_switches: str | None = None
