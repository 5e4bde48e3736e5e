"""Steps as a trace, from what the host did and how long the device's work in each segment takes.

Each operator is a launch, the operators of a segment share its time, and they run in turn. So a
step's computing, and how long it waits for what, are right; single kernels are not known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from headrace.diagnosis.host_steps import HostSteps
from headrace.diagnosis.segments import (
    COMMUNICATION,
    GRAPH,
    PAGEABLE_COPY,
    PINNED_COPY,
    TO_HOST,
    Key,
)
from headrace.diagnosis.trace import Call, CallKind, StepTrace, Work, WorkKind

#: An operator that takes longer runs on the host, or waits; unless it is one of the model's, which
#: may launch hundreds of kernels, as recurrent layers do.
_LONG_OPERATOR_NS = 150_000
_MODELS_PARTS = ("forward", "backward", "optimizer")
#: So little work in a segment is none: its operators run on the host.
_NO_WORK_NS = 5_000
#: A copy from pageable memory that takes the host longer has blocked it.
_BLOCKING_COPY_NS = 30_000
#: The device takes about so long from one queued kernel to the next: a part of a segment's time,
#: but not of its work if each kernel was late.
_NEXT_KERNEL_NS = 1_000
_COLLECTIVE = "c10d::"
_KINDS: dict[str, WorkKind] = {
    PAGEABLE_COPY: "copy",
    PINNED_COPY: "copy",
    TO_HOST: "copy",
    COMMUNICATION: "communication",
}


class _Called(NamedTuple):
    """Something that the host called, the segment in which it did, and what the device did then:
    None, if nothing."""

    call: Call
    edge: int
    launches: WorkKind | None


def trace_of(host: HostSteps, device_ns: Mapping[Key, float]) -> StepTrace | None:
    """The steps as a trace; None if no work of the device was seen."""
    work_ns = {**device_ns, **host.communication_ns}
    found = [*_operators(host, work_ns), *_explicit_waits(host)]
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


def _operators(host: HostSteps, work_ns: Mapping[Key, float]) -> Iterator[_Called]:
    """The operators as launches and waits. A copy from pageable memory blocks the host, and if the
    script says so, it waits then."""
    waiting = host.waiting()
    for one in host.operators:
        ns, edge = one.end_ns - one.start_ns, host.edge_at(one.start_ns)
        key = host.edges[edge].key
        kind = _KINDS.get(key[0], "kernel")
        if one.name.startswith(_COLLECTIVE) and kind != "communication":  # on another stream
            yield _Called(_call(one.start_ns, one.end_ns, "launch", one.name), edge, None)
        elif key[0] == PAGEABLE_COPY and (one in waiting or ns > _BLOCKING_COPY_NS):
            yield _Called(_call(one.start_ns, one.end_ns, "copy", "cudaMemcpyAsync"), edge, kind)
            if one in waiting:
                sync = _call(one.end_ns, one.end_ns, "wait", "cudaStreamSynchronize")
                yield _Called(sync, edge, None)
        elif one in waiting:
            if kind == "copy":
                yield _Called(_call(one.start_ns, one.start_ns, "launch", one.name), edge, kind)
            yield _Called(_call(one.start_ns, one.end_ns, "wait"), edge, None)
        elif kind == "copy" or (_may_launch(key, ns) and work_ns.get(key, 0.0) > _NO_WORK_NS):
            yield _Called(_call(one.start_ns, one.end_ns, "launch", one.name), edge, kind)


def _may_launch(key: Key, ns: int) -> bool:
    return key[0] in _MODELS_PARTS or ns <= _LONG_OPERATOR_NS


def _segments_without_operators(
    host: HostSteps, found: Sequence[_Called], work_ns: Mapping[Key, float]
) -> Iterator[_Called]:
    """Graphs, communication, and work that PyTorch does not know of: one launch for a segment."""
    launching = {one.edge for one in found if one.launches is not None}
    for at, (edge, after) in enumerate(pairwise(host.edges)):
        is_graph = edge.key[0] == GRAPH
        if at not in launching and (is_graph or work_ns.get(edge.key, 0.0) > _NO_WORK_NS):
            end_ns = after.at_ns if is_graph else edge.at_ns
            kind = _KINDS.get(edge.key[0], "kernel")
            yield _Called(_call(edge.at_ns, end_ns, "launch", edge.key[0]), at, kind)


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
            ns = round(work_ns.get(host.edges[called.edge].key, 0.0))
            if call.kind == "copy":  # the host is blocked until it is done
                ends = max(call.end_ns, device_ns)
                begins = max(call.start_ns, device_ns, ends - ns)
            else:
                count = launches[called.edge]
                if device_ns < call.end_ns:  # launched late
                    ns = max(ns // 2, ns - _NEXT_KERNEL_NS * (count - 1))
                begins = max(call.end_ns, device_ns)
                ends = begins + ns // count
            if ends > begins:
                work.append(Work(begins, ends, kind, call=len(calls), name=call.name))
                device_ns = ends
        calls.append(call)
    return tuple(calls), tuple(work)
