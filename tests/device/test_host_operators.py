"""The operators that the host called, as PyTorch's profiler has them without CUPTI."""

from __future__ import annotations

from time import perf_counter_ns

import torch

from headrace.device import profiled_operators
from headrace.device.host_operators import HostEvent, launching_operators


def test_operators_are_innermost_and_no_views_and_by_the_hosts_clock() -> None:
    model = torch.nn.Linear(4, 4, bias=False)
    x = torch.ones(2, 4)
    with profiled_operators() as found:
        before = perf_counter_ns()
        y = model(x).t()
        between = perf_counter_ns()
        y.sum().backward()
        after = perf_counter_ns()
    names = [one.name for one in found]
    assert names[0] == "aten::mm"
    assert "aten::t" not in names
    assert "aten::linear" not in names
    assert "aten::fill_" in names  # of the gradient
    first = found[0]
    slack_ns = 200_000
    assert before - slack_ns < first.start_ns < first.end_ns < between + slack_ns
    assert all(before - slack_ns < one.start_ns < after + slack_ns for one in found)


def test_other_threads_than_this_one_and_autograds_do_not_count() -> None:
    events = [
        HostEvent("headrace clock", 1, 0, 10),
        HostEvent("aten::zeros", 1, 20, 60),
        HostEvent("aten::empty", 1, 22, 25),
        HostEvent("aten::fill_", 1, 30, 55),
        HostEvent("autograd::engine::evaluate_function: MmBackward0", 2, 70, 99),
        HostEvent("aten::mm", 2, 75, 95),
        HostEvent("aten::stack", 3, 20, 95),
        HostEvent("triton_poi_fused_add_0", 1, 100, 110),
    ]
    found = launching_operators(events, [(1000, 1010)])
    assert [(one.name, one.start_ns, one.call_ns) for one in found] == [
        ("aten::fill_", 1030, 1020),
        ("aten::mm", 1075, 1070),
        ("triton_poi_fused_add_0", 1100, 1100),
    ]


def test_without_the_clock_nothing_is_known() -> None:
    assert launching_operators([HostEvent("aten::mm", 1, 0, 5)], [(0, 1)]) == []
