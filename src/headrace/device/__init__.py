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

from headrace.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headrace.device.base import Device as Device
    from headrace.device.base import Event as Event
    from headrace.device.base import MemoryFigures as MemoryFigures
    from headrace.device.base import Result as Result
    from headrace.device.base import Stream as Stream
    from headrace.device.cuda import cuda_namespace as cuda_namespace
    from headrace.device.determinism import deterministic_kernels as deterministic_kernels
    from headrace.device.graph import CaptureQuery as CaptureQuery
    from headrace.device.graph import Graph as Graph
    from headrace.device.graph import Obstacle as Obstacle
    from headrace.device.graph import host_copy as host_copy
    from headrace.device.graph import host_wait as host_wait
    from headrace.device.graph import torch_draw as torch_draw
    from headrace.device.host_activity import copied_tensor as copied_tensor
    from headrace.device.host_activity import noting_host_draws as noting_host_draws
    from headrace.device.host_operators import HostOperator as HostOperator
    from headrace.device.host_operators import profiled_operators as profiled_operators
    from headrace.device.kineto import chrome_trace as chrome_trace
    from headrace.device.kineto import is_profiling as is_profiling
    from headrace.device.ledger import Ledger as Ledger
    from headrace.device.ledger import LedgerStatistics as LedgerStatistics
    from headrace.device.ledger import WaitStatistics as WaitStatistics
    from headrace.device.marked import eager as eager
    from headrace.device.opening import available_devices as available_devices
    from headrace.device.opening import open_device as open_device
    from headrace.device.pinned import PinnedBuffer as PinnedBuffer
    from headrace.device.pinned import PinnedPool as PinnedPool
    from headrace.device.sensors import SensorReading as SensorReading
    from headrace.device.sensors import Sensors as Sensors
    from headrace.device.stream_manager import StreamManager as StreamManager
    from headrace.device.timeline import Kind as Kind
    from headrace.device.timeline import Span as Span
    from headrace.device.timeline import Timeline as Timeline
    from headrace.device.timeline import pack_spans as pack_spans
    from headrace.device.timeline import unpack_spans as unpack_spans
    from headrace.device.trace import Trace as Trace

__all__, __getattr__, __dir__ = lazy(__name__, __file__)
