"""What surrounds a training run: its folder, metrics, progress line, monitor, signals, watchdog.

In go settings, progress and results. Out come files that are complete or absent, lines on a
terminal, and requests to stop. Nothing here trains. Each name is imported when it is first used.
"""

from __future__ import annotations

from headrace.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headrace.runs.busy_time import BusyWindow as BusyWindow
    from headrace.runs.display import silent_console as silent_console
    from headrace.runs.doctor import diagnose as diagnose
    from headrace.runs.doctor import driver_version as driver_version
    from headrace.runs.doctor import usable_cores as usable_cores
    from headrace.runs.folder import RunFolder as RunFolder
    from headrace.runs.folder import shared_folder as shared_folder
    from headrace.runs.folder import yaml_text as yaml_text
    from headrace.runs.metrics import MetricsLog as MetricsLog
    from headrace.runs.metrics import NoMetrics as NoMetrics
    from headrace.runs.metrics import read_metrics as read_metrics
    from headrace.runs.monitor import Monitor as Monitor
    from headrace.runs.monitor import UseSample as UseSample
    from headrace.runs.progress_line import Gauges as Gauges
    from headrace.runs.progress_line import ProgressLine as ProgressLine
    from headrace.runs.recent_loss import RecentLoss as RecentLoss
    from headrace.runs.signals import StopRequests as StopRequests
    from headrace.runs.signals import ignore_foreign_sigterm as ignore_foreign_sigterm
    from headrace.runs.status_line import StatusLine as StatusLine
    from headrace.runs.usage_log import UsageLog as UsageLog
    from headrace.runs.watchdog import Watchdog as Watchdog

__all__, __getattr__, __dir__ = lazy(__name__, __file__)
