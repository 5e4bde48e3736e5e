"""What surrounds a training run: its folder, metrics, progress line, monitor, signals, watchdog.

In go settings, progress and results. Out come files that are complete or absent, lines on a
terminal, and requests to stop. Nothing here trains. Each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.runs.busy_time import BusyWindow
    from headrace.runs.display import silent_console
    from headrace.runs.doctor import diagnose, driver_version, usable_cores
    from headrace.runs.folder import RunFolder, shared_folder, yaml_text
    from headrace.runs.metrics import MetricsLog, NoMetrics, read_metrics
    from headrace.runs.monitor import Monitor, UseSample
    from headrace.runs.progress_line import Gauges, ProgressLine
    from headrace.runs.recent_loss import RecentLoss
    from headrace.runs.signals import StopRequests, ignore_foreign_sigterm
    from headrace.runs.status_line import StatusLine
    from headrace.runs.usage_log import UsageLog
    from headrace.runs.watchdog import Watchdog

_HOMES = {
    "BusyWindow": "busy_time",
    "Gauges": "progress_line",
    "MetricsLog": "metrics",
    "Monitor": "monitor",
    "NoMetrics": "metrics",
    "ProgressLine": "progress_line",
    "RecentLoss": "recent_loss",
    "RunFolder": "folder",
    "StatusLine": "status_line",
    "StopRequests": "signals",
    "UsageLog": "usage_log",
    "UseSample": "monitor",
    "Watchdog": "watchdog",
    "diagnose": "doctor",
    "driver_version": "doctor",
    "ignore_foreign_sigterm": "signals",
    "read_metrics": "metrics",
    "shared_folder": "folder",
    "silent_console": "display",
    "usable_cores": "doctor",
    "yaml_text": "folder",
}

__all__ = [
    "BusyWindow",
    "Gauges",
    "MetricsLog",
    "Monitor",
    "NoMetrics",
    "ProgressLine",
    "RecentLoss",
    "RunFolder",
    "StatusLine",
    "StopRequests",
    "UsageLog",
    "UseSample",
    "Watchdog",
    "diagnose",
    "driver_version",
    "ignore_foreign_sigterm",
    "read_metrics",
    "shared_folder",
    "silent_console",
    "usable_cores",
    "yaml_text",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
