"""What is known of the host's part of some steps."""

from __future__ import annotations

from headrace.device import HostOperator
from headrace.diagnosis.host_steps import HostSteps
from headrace.diagnosis.segments import WAIT, Edge

US = 1000
STEP, WAITS = ("step", 0), (WAIT, 0)


def steps(edges: list[Edge], operators: list[HostOperator], *waited: int) -> HostSteps:
    return HostSteps(0, (500 * US,), tuple(edges), (), waited, (), (), tuple(operators))


def nonzero(start_us: int, us: int, call_us: int) -> HostOperator:
    return HostOperator(start_us * US, (start_us + us) * US, "aten::nonzero", call_us * US)


def test_a_wait_was_in_the_longest_operator_of_the_last_call() -> None:
    earlier, waits, later = nonzero(0, 90, 0), nonzero(100, 80, 100), nonzero(190, 5, 100)
    host = steps([Edge(0, STEP)], [earlier, waits, later, nonzero(300, 99, 300)], 230 * US)
    assert host.waiting() == {waits: 230 * US}
    assert host.after_wait_ns() == {STEP: 50 * US}


def test_two_waits_of_a_call_are_two_operators() -> None:
    operators = [nonzero(at * 100, us, 0) for at, us in enumerate((90, 20, 80))]
    host = steps([Edge(0, STEP)], operators, 400 * US, 401 * US)
    assert set(host.waiting()) == {operators[0], operators[2]}


def test_a_wait_without_an_operator_is_not_known() -> None:
    host = steps([Edge(0, STEP)], [nonzero(300, 5, 300)], 200 * US)
    assert host.waiting() == host.after_wait_ns() == {}


def test_the_device_is_busy_for_longer_than_the_host_launches() -> None:
    edges = [(0, STEP), (40, WAITS), (50, STEP), (150, ("end", 0))]
    found = steps([Edge(at * US, key) for at, key in edges], []).delays()
    assert found[STEP] > 1.2 * 100 * US
    assert 10 * US < found[WAITS] < found[STEP]
