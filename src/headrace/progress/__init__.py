"""Shows what a command is doing, and how far a training run is, in one line on stderr.

In: messages, and the `Progress` and results of an engine. Out: a line that is redrawn on a
terminal, or plain lines anywhere else. Each name is imported when it is first used.
"""

from __future__ import annotations

from headrace.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headrace.progress.display import silent_console as silent_console
    from headrace.progress.progress_line import Gauges as Gauges
    from headrace.progress.progress_line import ProgressLine as ProgressLine
    from headrace.progress.recent_loss import RecentLoss as RecentLoss
    from headrace.progress.status_line import StatusLine as StatusLine

__all__, __getattr__, __dir__ = lazy(__name__, __file__)
