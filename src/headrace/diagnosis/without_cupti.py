"""Steps as a trace where CUPTI does not work: in containers, on parts of a GPU, beside nsys.

The host's part is noted in some steps: its operators, waits and loading. What the device does in
each segment is measured in some more steps (`segments.py`). The trace is put together from both:
each operator is a launch, the operators of a segment share its time, and they run in turn. So a
step's computing, and how long it waits for what, are right; single kernels are not known.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter_ns
from typing import NamedTuple

from headrace.device import Device, HostOperator, profiled_operators
from headrace.diagnosis.loaders import Loaders
from headrace.diagnosis.segment_calls import watching_edges
from headrace.diagnosis.segments import (
    GRAPH,
    PAGEABLE_COPY,
    PINNED_COPY,
    TO_HOST,
    DeviceEdges,
    Edge,
    Edges,
    HostEdges,
    Key,
    delays,
)
from headrace.diagnosis.torch_calls import TorchCall, TorchCalls
from headrace.diagnosis.trace import Call, CallKind, StepTrace, Work, WorkKind

#: An operator that takes longer runs on the host, or waits.
_LONG_OPERATOR_NS = 150_000
#: So little work in a segment without operators is none.
_NO_WORK_NS = 5_000
#: A copy from pageable memory that takes the host longer has blocked it.
_BLOCKING_COPY_NS = 30_000
#: From this share of segments on that were launched late, the user is told.
_MANY_LATE = 0.2
_COPIES = (PAGEABLE_COPY, PINNED_COPY, TO_HOST)
_LABEL = (
    "measured without CUPTI: the times of the GPU's work are from CUDA events around parts of a "
    "step, launches are PyTorch's operators, and work on other streams is not seen"
)


@dataclass(frozen=True, slots=True)
class HostSteps:
    """What the host did in some steps, by `time.perf_counter_ns`."""

    start_ns: int
    marks: tuple[int, ...]
    edges: tuple[Edge, ...]
    waits: tuple[tuple[int, int], ...]
    waited_ns: tuple[int, ...]
    inputs: tuple[tuple[int, int], ...]
    torch_calls: tuple[TorchCall, ...]
    operators: tuple[HostOperator, ...]

    def edge_at(self, at_ns: int) -> int:
        """The position of the segment in which the host was at a moment."""
        return max(0, bisect_right(self.edges, at_ns, key=lambda edge: edge.at_ns) - 1)


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
        late = f"{self._late_share:.0%} of the parts were launched too late to be timed exactly"
        return _LABEL, f"{late}: the GPU may compute for less than is said"

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
                )
            )

    def measure_device(self, count: int, host: HostSteps) -> Iterator[None]:
        """Measure what the device's work takes in each segment of a step."""
        edges = DeviceEdges(self._device, delays(host.edges))
        self._device.delay(1)  # the first one measures how long it is, and waits
        self._device.synchronize("diagnose")
        with self._watched(edges):
            edges.measure_nothing()
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


# --- putting it together --------------------------------------------------------------------------


class _Called(NamedTuple):
    """Something that the host called, the segment in which it did, and what the device did then:
    None, if nothing."""

    call: Call
    edge: int
    launches: WorkKind | None


def trace_of(host: HostSteps, work_ns: Mapping[Key, float]) -> StepTrace | None:
    """The steps as a trace; None if no work of the device was seen."""
    found = [*_operators(host), *_explicit_waits(host)]
    found += _segments_without_operators(host, found, work_ns)
    found.sort(key=lambda one: (one.call.start_ns, one.call.end_ns))
    calls, work = _run(found, host, work_ns)
    if not work:
        return None
    end_ns = max(host.marks[-1], max(one.end_ns for one in work))
    return StepTrace(host.start_ns, end_ns, host.marks, calls, work, host.inputs, host.torch_calls)


def _explicit_waits(host: HostSteps) -> Iterator[_Called]:
    for start_ns, end_ns in host.waits:
        if end_ns:
            yield _Called(_call(start_ns, end_ns, "wait"), host.edge_at(start_ns), None)


def _operators(host: HostSteps) -> Iterator[_Called]:
    """The operators as launches and waits. A copy from pageable memory blocks the host, and if the
    script says so, it waits then."""
    waiting = _waiting(host)
    for one in host.operators:
        ns, edge = one.end_ns - one.start_ns, host.edge_at(one.start_ns)
        copies = host.edges[edge].key[0]
        if copies == PAGEABLE_COPY and (one in waiting or ns > _BLOCKING_COPY_NS):
            yield _Called(_call(one.start_ns, one.end_ns, "copy", "cudaMemcpyAsync"), edge, "copy")
            if one in waiting:
                sync = _call(one.end_ns, one.end_ns, "wait", "cudaStreamSynchronize")
                yield _Called(sync, edge, None)
        elif one in waiting:
            if copies in _COPIES:
                yield _Called(_call(one.start_ns, one.start_ns, "launch", one.name), edge, "copy")
            yield _Called(_call(one.start_ns, one.end_ns, "wait"), edge, None)
        elif ns <= _LONG_OPERATOR_NS or copies in _COPIES:
            kind: WorkKind = "copy" if copies in _COPIES else "kernel"
            yield _Called(_call(one.start_ns, one.end_ns, "launch", one.name), edge, kind)


def _waiting(host: HostSteps) -> set[HostOperator]:
    """The operators in which the host waited. It is told when the script's call has returned: so,
    of the operators of that call, the longest."""
    found: set[HostOperator] = set()
    for at_ns in host.waited_ns:
        end = bisect_right(host.operators, at_ns, key=lambda one: one.start_ns)
        if end == 0:
            continue
        call_ns = host.operators[end - 1].call_ns
        begin = bisect_left(host.operators, call_ns, hi=end, key=lambda one: one.start_ns)
        called = set(host.operators[begin:end]) - found
        if called:
            found.add(max(called, key=lambda one: one.end_ns - one.start_ns))
    return found


def _segments_without_operators(
    host: HostSteps, found: Sequence[_Called], work_ns: Mapping[Key, float]
) -> Iterator[_Called]:
    """Graphs, and work that PyTorch does not know of: one launch for a segment."""
    launching = {one.edge for one in found if one.launches is not None}
    for at, (edge, after) in enumerate(pairwise(host.edges)):
        is_graph = edge.key[0] == GRAPH
        if at not in launching and (is_graph or work_ns.get(edge.key, 0.0) > _NO_WORK_NS):
            end_ns = after.at_ns if is_graph else edge.at_ns
            yield _Called(_call(edge.at_ns, end_ns, "launch", edge.key[0]), at, "kernel")


def _call(start_ns: int, end_ns: int, kind: CallKind, name: str = "host wait") -> Call:
    return Call(start_ns, max(start_ns, end_ns), kind, name)


def _run(
    found: Sequence[_Called], host: HostSteps, work_ns: Mapping[Key, float]
) -> tuple[tuple[Call, ...], tuple[Work, ...]]:
    """The host's calls without overlap, and what the device did: the launches of a segment share
    its time, and each begins when it was launched and the one before it has ended."""
    launches = Counter(one.edge for one in found if one.call.kind == "launch" and one.launches)
    calls: list[Call] = []
    work: list[Work] = []
    host_ns = device_ns = host.start_ns
    last_ns = host.marks[-1]
    for called in found:
        call, kind = called.call, called.launches
        if not host.start_ns <= call.start_ns < last_ns:
            continue
        call = replace(call, start_ns=max(call.start_ns, host_ns), end_ns=max(call.end_ns, host_ns))
        host_ns = call.end_ns
        if kind is not None:
            if call.kind == "copy":  # the host is blocked until it is done
                begins, ends = max(call.start_ns, device_ns), max(call.end_ns, device_ns)
            else:
                ns = work_ns.get(host.edges[called.edge].key, 0.0) / launches[called.edge]
                begins = max(call.end_ns, device_ns)
                ends = begins + round(ns)
            if ends > begins:
                work.append(Work(begins, ends, kind, call=len(calls), name=call.name))
                device_ns = ends
        calls.append(call)
    return tuple(calls), tuple(work)
