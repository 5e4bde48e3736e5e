"""Steps put together from the host's part and the device's times by segment: what the profiler
would have said of them."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headrace.device import HostOperator, open_device
from headrace.diagnosis.breakdown import CAUSES, breakdown
from headrace.diagnosis.explanation import groups_by_step
from headrace.diagnosis.loaders import Loaders
from headrace.diagnosis.segments import (
    GRAPH,
    PAGEABLE_COPY,
    PINNED_COPY,
    TO_HOST,
    WAIT,
    Edge,
    Key,
)
from headrace.diagnosis.torch_calls import TorchCalls
from headrace.diagnosis.trace import StepTrace
from headrace.diagnosis.without_cupti import HostSteps, TimedSteps, trace_of
from support.diagnosis.made_traces import MS, US, Loop


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
        work_ns[key] += (one.end_ns - one.start_ns) / trace.steps
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
        (90 * US, 1_040 * US),
        (2_030 * US, 2_980 * US),
        (2_980 * US, 3_480 * US),
    ]


def test_two_waits_of_a_call_are_two_operators() -> None:
    lengths = (90, 20, 80)
    operators = [
        operator(at * MS, at * MS + length * US, "aten::nonzero", 0)
        for at, length in enumerate(lengths)
    ]
    trace = trace_of(
        host_steps([Edge(0, ("step", 0))], operators, 4 * MS, 4 * MS), {("step", 0): MS}
    )
    assert trace is not None
    assert [one.kind for one in trace.calls] == ["wait", "launch", "wait"]


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


def test_nothing_is_made_up() -> None:
    edges = [Edge(0, ("step", 0)), Edge(10 * MS, ("step", 0))]
    assert trace_of(host_steps(edges, [operator(0, 10, "aten::mm")]), {}) is None


def loop() -> Callable[[], None]:
    """A step of a plain loop."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = itertools.cycle(DataLoader(TensorDataset(torch.ones(40, 2)), batch_size=2))

    def step() -> None:
        (x,) = next(loader)
        model(x).sum().backward()
        optimizer.step()

    return step


def test_a_loop_on_the_cpu_is_cut_into_the_same_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole way, with a device for which nothing has to be waited."""
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    device = open_device("cpu")
    calls, loaders = TorchCalls(), Loaders()
    noted: list[HostSteps] = []
    timed = TimedSteps(device, calls, loaders, lambda count: iter(range(count)))
    step = loop()
    with calls.watching_optimizers(), loaders.watching():
        for _ in timed.note_host(2, noted.append):
            step()
        for _ in timed.measure_device(2, noted[0]):
            step()
    (host,) = noted
    assert [edge.key for edge in host.edges[:5]] == [
        ("step", 0),
        ("input", 0),
        ("batch", 0),
        ("forward", 0),
        ("after forward", 0),
    ]
    assert len(host.marks) == 2
    assert {one.name for one in host.operators} >= {"aten::add_", "aten::fill_"}
    assert timed.trace(host) is not None
    # Here nothing keeps the device busy, so all segments are late.
    assert "100% of the parts were launched too late" in timed.notes[1]
