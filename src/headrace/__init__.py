"""Headrace keeps a GPU busy during training, and shows that it does.

    import headrace as hr

    engine = hr.Engine(model, optimizer, loss_fn, plan="pipeline")
    for epoch in range(10):
        result = engine.epoch(loader)
        print(result.mean_loss, result.waits.table())

Names are loaded when they are first used, so that `import headrace` costs next to nothing and
touches no GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.buckets import BucketBatches, Buckets, PadToBuckets
    from headrace.busy import BusyWindow
    from headrace.capturing import GraphReport
    from headrace.compiling import CompileReport
    from headrace.deferred import DeferredScalars, DeferredValues
    from headrace.device import Device, Event, Stream, available_devices, open_device
    from headrace.ema import Ema
    from headrace.engine import Engine
    from headrace.errors import HeadraceError
    from headrace.ledger import Ledger, LedgerStatistics, WaitStatistics
    from headrace.loop import StepInfo
    from headrace.monitor import Monitor, UseSample
    from headrace.plan import PRESETS, LoaderPlan, Plan, PlanFile, load_plan
    from headrace.prefetcher import Prefetcher, prefetch
    from headrace.results import EpochResult, EpochStatistics
    from headrace.runahead import RunAhead
    from headrace.streams import StreamManager
    from headrace.timeline import Span, Timeline
    from headrace.watchdog import Watchdog

__version__ = "0.1.0"

_HOMES = {
    "BucketBatches": "buckets",
    "Buckets": "buckets",
    "BusyWindow": "busy",
    "CompileReport": "compiling",
    "DeferredScalars": "deferred",
    "DeferredValues": "deferred",
    "Device": "device",
    "Ema": "ema",
    "Engine": "engine",
    "EpochResult": "results",
    "EpochStatistics": "results",
    "Event": "device",
    "GraphReport": "capturing",
    "HeadraceError": "errors",
    "Ledger": "ledger",
    "LedgerStatistics": "ledger",
    "LoaderPlan": "plan",
    "Monitor": "monitor",
    "PRESETS": "plan",
    "PadToBuckets": "buckets",
    "Plan": "plan",
    "PlanFile": "plan",
    "Prefetcher": "prefetcher",
    "RunAhead": "runahead",
    "Span": "timeline",
    "StepInfo": "loop",
    "Stream": "device",
    "StreamManager": "streams",
    "Timeline": "timeline",
    "UseSample": "monitor",
    "WaitStatistics": "ledger",
    "Watchdog": "watchdog",
    "available_devices": "device",
    "load_plan": "plan",
    "open_device": "device",
    "prefetch": "prefetcher",
}

__all__ = [
    "PRESETS",
    "BucketBatches",
    "Buckets",
    "BusyWindow",
    "CompileReport",
    "DeferredScalars",
    "DeferredValues",
    "Device",
    "Ema",
    "Engine",
    "EpochResult",
    "EpochStatistics",
    "Event",
    "GraphReport",
    "HeadraceError",
    "Ledger",
    "LedgerStatistics",
    "LoaderPlan",
    "Monitor",
    "PadToBuckets",
    "Plan",
    "PlanFile",
    "Prefetcher",
    "RunAhead",
    "Span",
    "StepInfo",
    "Stream",
    "StreamManager",
    "Timeline",
    "UseSample",
    "WaitStatistics",
    "Watchdog",
    "__version__",
    "available_devices",
    "load_plan",
    "open_device",
    "prefetch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"headrace.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
