"""What surrounds a run: its folder, its log, what a person sees of it, and what ends it.

In go settings, progress and results; out come files that are whole or not there, lines on a
terminal, and signals that were asked for. Nothing here trains. Names are loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.runs.busy_window import BusyWindow
    from headrace.runs.display import silent_console
    from headrace.runs.doctor import diagnose, driver_version, usable_cores
    from headrace.runs.folder import RunFolder, replace_file, shared_folder, yaml_text
    from headrace.runs.metrics import MetricsLog, NoMetrics, read_metrics
    from headrace.runs.progress_line import Gauges, ProgressLine
    from headrace.runs.run_monitor import RunMonitor
    from headrace.runs.signals import StopRequests, outlive_sigterm
    from headrace.runs.status_line import StatusLine
    from headrace.runs.use_monitor import Monitor, UseSample
    from headrace.runs.watchdog import Watchdog

_HOMES = {
    "BusyWindow": "busy_window",
    "Gauges": "progress_line",
    "MetricsLog": "metrics",
    "Monitor": "use_monitor",
    "NoMetrics": "metrics",
    "ProgressLine": "progress_line",
    "RunFolder": "folder",
    "RunMonitor": "run_monitor",
    "StatusLine": "status_line",
    "StopRequests": "signals",
    "UseSample": "use_monitor",
    "Watchdog": "watchdog",
    "diagnose": "doctor",
    "driver_version": "doctor",
    "outlive_sigterm": "signals",
    "read_metrics": "metrics",
    "replace_file": "folder",
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
    "RunFolder",
    "RunMonitor",
    "StatusLine",
    "StopRequests",
    "UseSample",
    "Watchdog",
    "diagnose",
    "driver_version",
    "outlive_sigterm",
    "read_metrics",
    "replace_file",
    "shared_folder",
    "silent_console",
    "usable_cores",
    "yaml_text",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
