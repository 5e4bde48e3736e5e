"""A run from its folder to its end: folder, metrics, usage log, requests to stop, watchdog.

In go settings, metrics and signals. Out come files that are complete or absent, and requests to
stop. Nothing here trains. Each name is imported when it is first used.
"""

from __future__ import annotations

from headrace.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headrace.lifecycle.folder import RunFolder as RunFolder
    from headrace.lifecycle.folder import shared_folder as shared_folder
    from headrace.lifecycle.folder import yaml_text as yaml_text
    from headrace.lifecycle.metrics import MetricsLog as MetricsLog
    from headrace.lifecycle.metrics import NoMetrics as NoMetrics
    from headrace.lifecycle.metrics import read_metrics as read_metrics
    from headrace.lifecycle.signals import StopRequests as StopRequests
    from headrace.lifecycle.signals import ignore_foreign_sigterm as ignore_foreign_sigterm
    from headrace.lifecycle.usage_log import UsageLog as UsageLog
    from headrace.lifecycle.watchdog import Watchdog as Watchdog

__all__, __getattr__, __dir__ = lazy(__name__, __file__)
