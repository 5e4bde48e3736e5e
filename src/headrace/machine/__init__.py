"""The machine: what it has, how busy its device and host are, and which problems it has.

In: a device. Out: samples of its sensors and of the host's counters (`Monitor`), its busy time
from a trace (`BusyWindow`), and the findings of `headrace doctor`. Nothing here knows of training
runs. Each name is imported when it is first used.
"""

from __future__ import annotations

from headrace.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headrace.machine.busy_time import BusyTracer as BusyTracer
    from headrace.machine.busy_time import BusyWindow as BusyWindow
    from headrace.machine.busy_time import StreamBusy as StreamBusy
    from headrace.machine.doctor import diagnose as diagnose
    from headrace.machine.doctor import driver_version as driver_version
    from headrace.machine.doctor import usable_cores as usable_cores
    from headrace.machine.monitor import Monitor as Monitor
    from headrace.machine.samples import UseSample as UseSample

__all__, __getattr__, __dir__ = lazy(__name__, __file__)
