"""Steps put together from the host's part and the device's times by segment: what the profiler
would have said of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from headrace.device import HostOperator
from headrace.diagnosis.breakdown import CAUSES, Cause, breakdown
from headrace.diagnosis.explanation import groups_by_step
from headrace.diagnosis.host_steps import HostSteps
from headrace.diagnosis.segments import (
    COMMUNICATION,
    GRAPH,
    PAGEABLE_COPY,
    PINNED_COPY,
    TO_HOST,
    WAIT,
    Edge,
    Key,
)
from headrace.diagnosis.timed_trace import trace_of
from headrace.diagnosis.trace import StepTrace
from support.diagnosis.made_traces import MS, US, Loop

#: What events measure besides the work.
_GAPS_NS = {"kernel": 1_000, "copy": 0}


def seen_without_cupti(trace: StepTrace) -> tuple[HostSteps, dict[Key, float]]:
    """What is noted of a loop's host, and the device's time in each segment."""
    edges = [Edge(0, ("step", 0))]
    operators, waits = [], []
    counts: Counter[str] = Counter()
    marks = list(trace.marks)

    def begin(at_ns: int, kind: str) -> None:
        edges.append(Edge(at_ns, (kind, counts[kind])))
        counts[kind] += 1

    for call in trace.calls:
        while marks and call.start_ns >= marks[0]:
            edges.append(Edge(marks.pop(0), ("step", 0)))
            counts.clear()
        if call.kind == "launch":
            operators.append(HostOperator(call.start_ns, call.end_ns, "aten::mm", call.start_ns))
        elif call.kind == "copy":
            begin(call.start_ns, PAGEABLE_COPY)
            operators.append(HostOperator(call.start_ns, call.end_ns, "aten::copy_", call.start_ns))
            begin(call.end_ns, "after copy")
        else:
            begin(call.start_ns, WAIT)
            waits.append((call.start_ns, call.end_ns))
    edges.append(Edge(trace.marks[-1], ("step", 0)))
    host = HostSteps(
        trace.start_ns,
        trace.marks,
        tuple(edges),
        tuple(waits),
        (),
        trace.inputs,
        trace.torch_calls,
        tuple(operators),
    )
    work_ns: defaultdict[Key, float] = defaultdict(float)
    for one in trace.work:
        assert one.call is not None
        key = edges[host.edge_at(trace.calls[one.call].start_ns)].key
        work_ns[key] += (one.end_ns - one.start_ns + _GAPS_NS[one.kind]) / trace.steps
    return host, dict(work_ns)


LOOPS = {
    "computing": Loop(),
    "launch": Loop(kernel=4 * US, kernels=200),
    "synchronization": Loop(kernel=40 * US, kernels=6, reads=1),
    "input": Loop(load=6 * MS),
    "host": Loop(logging=5 * MS),
    "transfer": Loop(copy=2 * MS, pageable=True),
}


@pytest.mark.parametrize("cause", LOOPS)
def test_the_parts_are_those_of_the_profiler(cause: str) -> None:
    traced = LOOPS[cause].run()
    rebuilt = trace_of(*seen_without_cupti(traced))
    assert rebuilt is not None
    truth, found = breakdown(traced), breakdown(rebuilt)
    assert truth.share(cause) > 0.15  # type: ignore[arg-type]
    for part in CAUSES:
        assert found.share(part) == pytest.approx(truth.share(part), abs=0.03), part
    # Each wait is one group of calls, to be joined with its line.
    counts = [list(map(len, map(list, groups_by_step(one)))) for one in (rebuilt, traced)]
    assert counts[0] == counts[1]


def host_steps(edges: list[Edge], operators: list[HostOperator], *waited: int) -> HostSteps:
    return HostSteps(0, (10 * MS,), tuple(edges), (), waited, (), (), tuple(operators))


def operator(start_ns: int, end_ns: int, name: str, call_ns: int | None = None) -> HostOperator:
    return HostOperator(start_ns, end_ns, name, start_ns if call_ns is None else call_ns)


def test_a_hidden_wait_was_in_the_longest_operator_of_the_last_call() -> None:
    host = host_steps(
        [Edge(0, ("step", 0)), Edge(2_100 * US, (WAIT, 0)), Edge(10 * MS, ("step", 0))],
        [
            operator(10 * US, 90 * US, "aten::mm"),
            operator(120 * US, 2 * MS, "aten::nonzero", 100 * US),
            operator(2_010 * US, 2_030 * US, "aten::index", 100 * US),
            operator(2_200 * US, 2_210 * US, "aten::mm"),
        ],
        2_100 * US,
    )
    trace = trace_of(host, {("step", 0): 1.9 * MS, (WAIT, 0): 0.5 * MS})
    assert trace is not None
    assert [one.kind for one in trace.calls] == ["launch", "wait", "launch", "launch"]
    assert (trace.calls[1].start_ns, trace.calls[1].end_ns) == (120 * US, 2 * MS)
    assert [(one.start_ns, one.end_ns) for one in trace.work] == [
        (90_000, 1_039_500),
        (2_030_000, 2_979_500),
        (2_979_500, 3_479_500),
    ]


def test_copies_and_waits_for_them() -> None:
    copy = operator(10 * US, 1 * MS, "aten::copy_")

    def calls(kind: str, *waited: int) -> list[tuple[str, str]]:
        edges = [Edge(0, (kind, 0)), Edge(2 * MS, ("after copy", 0))]
        trace = trace_of(host_steps(edges, [copy], *waited), {(kind, 0): 0.9 * MS})
        if trace is None:
            return []
        return [(one.kind, trace.calls[one.call or 0].kind) for one in trace.work]

    waited = 1_020 * US
    assert calls(PAGEABLE_COPY, waited) == calls(PAGEABLE_COPY) == [("copy", "copy")]
    for kind in (PINNED_COPY, TO_HOST):
        assert calls(kind, waited) == calls(kind) == [("copy", "launch")]


def test_a_graph_is_one_launch_although_no_operator_is_seen() -> None:
    edges = [Edge(0, ("step", 0)), Edge(1 * MS, (GRAPH, 0)), Edge(1_050 * US, ("after graph", 0))]
    trace = trace_of(host_steps(edges, []), {(GRAPH, 0): 5.0 * MS, ("after graph", 0): 900.0})
    assert trace is not None
    assert trace.launches_per_step() == 1
    (work,) = trace.work
    assert (work.start_ns, work.end_ns) == (1_050 * US, 6_050 * US)


def test_operators_that_the_device_does_nothing_for_are_the_hosts() -> None:
    """Such as those of a dataset."""
    edges = [Edge(0, ("input", 0)), Edge(1 * MS, ("batch", 0)), Edge(2 * MS, ("step", 0))]
    operators = [operator(at * 100 * US, at * 100 * US + 20 * US, "aten::sort") for at in range(9)]
    operators.append(operator(1_100 * US, 1_110 * US, "aten::mm"))
    trace = trace_of(host_steps(edges, operators), {("input", 0): 800.0, ("batch", 0): MS})
    assert trace is not None
    assert trace.launches_per_step() == 1


@pytest.mark.parametrize(("part", "cause"), [("forward", "launch"), ("after forward", "host")])
def test_a_long_operator_of_a_model_launches(part: str, cause: Cause) -> None:
    """As recurrent layers do: hundreds of kernels. Elsewhere it is the host's own work."""
    edges = [Edge(0, (part, 0)), Edge(4 * MS, ("step", 0))]
    operators = [operator(0, 10 * US, "aten::mm"), operator(20 * US, 3 * MS, "aten::_cudnn_rnn")]
    operators.append(operator(3_100 * US, 3_110 * US, "aten::mm"))
    trace = trace_of(host_steps(edges, operators), {(part, 0): 60.0 * US})
    assert trace is not None
    assert breakdown(trace).ns[cause] > 2 * MS


def test_kernels_that_are_launched_late_are_shorter_than_from_one_to_the_next() -> None:
    def work_ns(every_us: int) -> int:
        operators = [operator(at * US, at * US + US, "aten::add") for at in range(0, 80, every_us)]
        segments = [Edge(0, ("step", 0)), Edge(1 * MS, ("step", 0))]
        device_ns = {("step", 0): 5.0 * US * len(operators)}
        trace = trace_of(host_steps(segments, operators), device_ns)
        assert trace is not None
        return trace.work[1].end_ns - trace.work[1].start_ns

    assert work_ns(4) == 5 * US  # queued
    assert work_ns(20) == 4.25 * US  # of four kernels, three begin after another


def test_communication_is_told_from_computing() -> None:
    """With DistributedDataParallel: collectives in backward run on another stream, and what is left
    of them when backward ends is waited for."""
    edges = [
        Edge(0, ("backward", 0)),
        Edge(1 * MS, (COMMUNICATION, 0)),
        Edge(1_050 * US, ("after backward", 0)),
        Edge(10 * MS, ("step", 0)),
    ]
    operators = [
        operator(100 * US, 110 * US, "aten::mm"),
        operator(900 * US, 920 * US, "c10d::allreduce_"),
        operator(1_100 * US, 1_110 * US, "aten::mm"),
    ]
    host = replace(host_steps(edges, operators), communication_ns={(COMMUNICATION, 0): 3.0 * MS})
    trace = trace_of(host, {("backward", 0): 2.0 * MS, ("after backward", 0): 1.0 * MS})
    assert trace is not None
    assert trace.launches_per_step() == 4
    assert [(one.kind, one.end_ns - one.start_ns) for one in trace.work] == [
        ("kernel", 2 * MS),
        ("communication", 3 * MS),
        ("kernel", 1 * MS),
    ]
    assert breakdown(trace).ns["other ranks"] == 3 * MS


def test_nothing_is_made_up() -> None:
    edges = [Edge(0, ("step", 0)), Edge(10 * MS, ("step", 0))]
    assert trace_of(host_steps(edges, [operator(0, 10, "aten::mm")]), {}) is None
