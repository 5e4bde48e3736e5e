"""Steps as a trace where CUPTI does not work: in containers, on parts of a GPU, beside nsys.

The host's part is noted in some steps: its operators, waits and loading. What the device does in
each segment is measured in some more steps (`segments.py`). The trace is put together from both
(`timed_trace.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from time import perf_counter_ns

from headrace.device import Device, profiled_operators
from headrace.diagnosis.host_steps import HostSteps
from headrace.diagnosis.loaders import Loaders
from headrace.diagnosis.segment_calls import watching_edges
from headrace.diagnosis.segments import DeviceEdges, Edges, HostEdges, Key
from headrace.diagnosis.timed_trace import trace_of
from headrace.diagnosis.torch_calls import TorchCall, TorchCalls
from headrace.diagnosis.trace import StepTrace

#: From this share of time on that was launched late, the user is told.
_MANY_LATE = 0.2
_LABEL = (
    "measured without CUPTI: the times of the GPU's work are from CUDA events around parts of a "
    "step, launches are PyTorch's operators, and work on other streams is not seen"
)


class TimedSteps:
    """Runs steps with events in place of the profiler. `steps` yields once per step, as many times
    as it is told."""

    def __init__(
        self,
        device: Device,
        torch_calls: TorchCalls,
        loaders: Loaders,
        steps: Callable[[int], Iterator[int]],
    ) -> None:
        self._device, self._steps = device, steps
        self._torch_calls, self._loaders = torch_calls, loaders
        self._work_ns: dict[Key, float] = {}
        self._late_share = 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user must know of these figures."""
        if self._late_share <= _MANY_LATE:
            return (_LABEL,)
        late = f"{self._late_share:.0%} of the GPU's time was launched too late to be timed exactly"
        return _LABEL, f"{late}: it may compute for less than is said, and wait longer for launches"

    def note_host(self, count: int, keep: Callable[[HostSteps], object]) -> Iterator[None]:
        """Note what the host does in some steps, and call `keep` with it, also if the script
        ends."""
        marks: list[int] = []
        edges = HostEdges(self._device)
        with profiled_operators() as operators:
            self._device.synchronize("diagnose")  # before waits are watched
            with self._watched(edges) as (torch_calls, inputs):
                start_ns = perf_counter_ns()
                edges.end_step()
                with suppress(GeneratorExit):  # the script has ended: read what there is
                    for _ in self._steps(count):
                        yield
                        marks.append(perf_counter_ns())
                        edges.end_step()
            self._device.synchronize("diagnose")
        if marks:
            keep(
                HostSteps(
                    start_ns,
                    tuple(marks),
                    tuple(edges.edges),
                    tuple(edges.waits),
                    tuple(edges.waited_ns),
                    tuple(inputs),
                    tuple(sorted(torch_calls)),
                    tuple(operators),
                    edges.communication_ns(),
                )
            )

    def measure_device(self, count: int, host: HostSteps) -> Iterator[None]:
        """Measure what the device's work takes in each segment of a step."""
        edges = DeviceEdges(self._device, host.delays(), host.after_wait_ns())
        self._device.delay(1)  # the first one measures how long it is, and waits
        self._device.synchronize("diagnose")
        with self._watched(edges):
            edges.end_step()
            with suppress(GeneratorExit):  # the script has ended
                for _ in self._steps(count):
                    yield
                    edges.end_step()
        self._work_ns, self._late_share = edges.work_ns(), edges.late_share()

    def trace(self, host: HostSteps) -> StepTrace | None:
        """The steps as a trace; None if no work of the device was seen."""
        return trace_of(host, self._work_ns)

    def _watched(self, edges: Edges) -> _Watched:
        return _Watched(edges, self._torch_calls, self._loaders)


class _Watched:
    """A block in which `edges` is told everything. It gets the calls of modules and such, and the
    times of loading."""

    def __init__(self, edges: Edges, torch_calls: TorchCalls, loaders: Loaders) -> None:
        self._edges, self._torch_calls, self._loaders = edges, torch_calls, loaders
        self._stack = ExitStack()

    def __enter__(self) -> tuple[list[TorchCall], list[tuple[int, int]]]:
        edges, stack = self._edges, self._stack
        stack.enter_context(watching_edges(edges))
        torch_calls = stack.enter_context(self._torch_calls.noted(edges.edge))
        inputs = stack.enter_context(
            self._loaders.noted(lambda: edges.pause("input"), lambda: edges.edge("batch"))
        )
        return torch_calls, inputs

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
