"""When a graph is checked again, and what is said of it."""

from __future__ import annotations

import pytest

from headrace.capture.watching.recheck import Recheck


class Graph:
    """Stands for a captured graph."""


@pytest.mark.parametrize(
    ("every", "due"),
    [(1000, [10, 30, 100, 300, 1000, 2000]), (0, []), (400, [10, 30, 100, 300, 400, 800, 1200])],
)
def test_the_uses_at_which_a_graph_is_checked(every: int, due: list[int]) -> None:
    recheck, graph = Recheck(every), Graph()
    found = [use for use in range(1, due[-1] + 2 if due else 400) if recheck.is_due(graph)]
    assert found == due


def test_the_range_of_steps_begins_after_the_last_check_that_agreed() -> None:
    recheck, graph, other = Recheck(1000), Graph(), Graph()
    for use in range(1, 31):
        recheck.is_due(other)
        if recheck.is_due(graph):
            assert recheck.learn(graph, "mul differs" if use == 30 else None) is (use == 30)
    assert recheck.checks == 2
    assert "mul differs. Replays 21 to 59 may" in str(recheck.differed)
    assert not recheck.is_hopeless


def test_after_three_differences_nothing_is_worth_capturing() -> None:
    recheck = Recheck(1000)
    for _ in range(3):
        graph = Graph()
        assert not recheck.is_hopeless
        recheck.is_due(graph)
        recheck.learn(graph, "mul differs")
    assert recheck.is_hopeless
