"""The seam to the hardware: no other part of Headrace names a kind of device.

In goes a device's name. Out comes a `Device`, with streams, events, graphs, pinned memory, and a
ledger of every host wait. The CPU has the same methods and nothing to wait for.

    device = open_device("auto")
    transfer = device.stream("transfer", priority=-1)
    arrived = device.event()
    with device.use(transfer):
        device.copy(slot, staging)
        arrived.record()
    device.current_stream().wait_event(arrived)     # the device waits, the host does not
    device.wait(arrived, reason="example")          # the host waits; the ledger counts it
"""

from __future__ import annotations

from headrace.device.base import Device, Event, MemoryFigures, Result, Stream
from headrace.device.determinism import deterministic_kernels
from headrace.device.graph import CaptureQuery, Graph, Obstacle, host_copy, host_wait, torch_draw
from headrace.device.host_activity import noting_host_draws
from headrace.device.host_operators import HostOperator, profiled_operators
from headrace.device.kineto import chrome_trace, is_profiling
from headrace.device.ledger import Ledger, LedgerStatistics, WaitStatistics
from headrace.device.opening import available_devices, open_device
from headrace.device.pinned import PinnedBuffer, PinnedPool
from headrace.device.sensors import SensorReading, Sensors
from headrace.device.stream_manager import StreamManager
from headrace.device.timeline import Kind, Span, Timeline, pack_spans, unpack_spans
from headrace.device.trace import Trace

__all__ = [
    "CaptureQuery",
    "Device",
    "Event",
    "Graph",
    "HostOperator",
    "Kind",
    "Ledger",
    "LedgerStatistics",
    "MemoryFigures",
    "Obstacle",
    "PinnedBuffer",
    "PinnedPool",
    "Result",
    "SensorReading",
    "Sensors",
    "Span",
    "Stream",
    "StreamManager",
    "Timeline",
    "Trace",
    "WaitStatistics",
    "available_devices",
    "chrome_trace",
    "deterministic_kernels",
    "host_copy",
    "host_wait",
    "is_profiling",
    "noting_host_draws",
    "open_device",
    "pack_spans",
    "profiled_operators",
    "torch_draw",
    "unpack_spans",
]
