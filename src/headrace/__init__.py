"""Headrace: a PyTorch training engine that keeps the GPU busy, and shows what the host waits for.

    import headrace as hr

    engine = hr.Engine(model, optimizer, loss_fn, plan="pipeline")
    for epoch in range(10):
        result = engine.epoch(loader)
        print(result.mean_loss, result.waits.table())

`import headrace` takes almost no time and touches no GPU: each name is loaded on first use.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # importing `typing` would take longer than all else here
if TYPE_CHECKING:
    from typing import Any

    from headrace.capture import GraphReport
    from headrace.data import BucketBatches, Buckets, PadToBuckets, Prefetcher, prefetch
    from headrace.device import (
        Device,
        Event,
        Ledger,
        LedgerStatistics,
        Span,
        Stream,
        StreamManager,
        Timeline,
        WaitStatistics,
        available_devices,
        open_device,
    )
    from headrace.diagnosis import Diagnosis, diagnose
    from headrace.engine import (
        Carry,
        CompileReport,
        DeferredScalars,
        DeferredValues,
        Ema,
        Engine,
        EpochResult,
        EpochStatistics,
        GraphedFunction,
        Progress,
        RunAhead,
        graphed,
    )
    from headrace.errors import HeadraceError
    from headrace.plan import PRESETS, LoaderPlan, Plan, PlanFile, load_plan
    from headrace.runs import BusyWindow, Monitor, UseSample, Watchdog

__version__ = "0.1.0"

_HOMES = {
    "BucketBatches": "data",
    "Buckets": "data",
    "BusyWindow": "runs",
    "Carry": "engine",
    "CompileReport": "engine",
    "DeferredScalars": "engine",
    "DeferredValues": "engine",
    "Device": "device",
    "Diagnosis": "diagnosis",
    "Ema": "engine",
    "Engine": "engine",
    "EpochResult": "engine",
    "EpochStatistics": "engine",
    "Event": "device",
    "GraphReport": "capture",
    "GraphedFunction": "engine",
    "HeadraceError": "errors",
    "Ledger": "device",
    "LedgerStatistics": "device",
    "LoaderPlan": "plan",
    "Monitor": "runs",
    "PRESETS": "plan",
    "PadToBuckets": "data",
    "Plan": "plan",
    "PlanFile": "plan",
    "Prefetcher": "data",
    "Progress": "engine",
    "RunAhead": "engine",
    "Span": "device",
    "Stream": "device",
    "StreamManager": "device",
    "Timeline": "device",
    "UseSample": "runs",
    "WaitStatistics": "device",
    "Watchdog": "runs",
    "available_devices": "device",
    "diagnose": "diagnosis",
    "graphed": "engine",
    "load_plan": "plan",
    "open_device": "device",
    "prefetch": "data",
}

__all__ = [
    "PRESETS",
    "BucketBatches",
    "Buckets",
    "BusyWindow",
    "Carry",
    "CompileReport",
    "DeferredScalars",
    "DeferredValues",
    "Device",
    "Diagnosis",
    "Ema",
    "Engine",
    "EpochResult",
    "EpochStatistics",
    "Event",
    "GraphReport",
    "GraphedFunction",
    "HeadraceError",
    "Ledger",
    "LedgerStatistics",
    "LoaderPlan",
    "Monitor",
    "PadToBuckets",
    "Plan",
    "PlanFile",
    "Prefetcher",
    "Progress",
    "RunAhead",
    "Span",
    "Stream",
    "StreamManager",
    "Timeline",
    "UseSample",
    "WaitStatistics",
    "Watchdog",
    "__version__",
    "available_devices",
    "diagnose",
    "graphed",
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
