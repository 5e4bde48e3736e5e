"""Headrace keeps a GPU busy during training, and shows that it does.

    import headrace as hr

    device = hr.open_device("auto")
    manager = hr.StreamManager(device, 4)

Names are loaded when they are first used, so that `import headrace` costs next to nothing and
touches no GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.device import Device, Event, Stream, available_devices, open_device
    from headrace.errors import HeadraceError
    from headrace.ledger import Ledger, LedgerStatistics, WaitStatistics
    from headrace.plan import PRESETS, LoaderPlan, Plan, PlanFile, load_plan
    from headrace.streams import StreamManager
    from headrace.timeline import Span, Timeline

__version__ = "0.1.0"

_HOMES = {
    "Device": "device",
    "Event": "device",
    "HeadraceError": "errors",
    "Ledger": "ledger",
    "LedgerStatistics": "ledger",
    "LoaderPlan": "plan",
    "PRESETS": "plan",
    "Plan": "plan",
    "PlanFile": "plan",
    "Span": "timeline",
    "Stream": "device",
    "StreamManager": "streams",
    "Timeline": "timeline",
    "WaitStatistics": "ledger",
    "available_devices": "device",
    "load_plan": "plan",
    "open_device": "device",
}

__all__ = [
    "PRESETS",
    "Device",
    "Event",
    "HeadraceError",
    "Ledger",
    "LedgerStatistics",
    "LoaderPlan",
    "Plan",
    "PlanFile",
    "Span",
    "Stream",
    "StreamManager",
    "Timeline",
    "WaitStatistics",
    "__version__",
    "available_devices",
    "load_plan",
    "open_device",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"headrace.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
