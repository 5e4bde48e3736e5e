"""Steps with and without graphs, in turns: what is measured, and what is decided."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.capture import Turns
from headrace.fake import FakeDevice

Milliseconds = Callable[[int], float]


def run(
    device: FakeDevice,
    *,
    graph_ms: Milliseconds,
    eager_ms: Milliseconds,
    steps: int = 200,
    has_graph: Callable[[int], bool] = lambda step: step >= 3,
    each: Callable[[Turns, int], object] = lambda turns, step: None,
) -> tuple[Turns, list[bool]]:
    """Steps that take so long, until a decision. Returns also which were replays."""
    turns, replayed = Turns(device), []
    for step in range(steps):
        replays = turns.begin() and has_graph(step)
        replayed.append(replays)
        device.host_work((graph_ms if replays else eager_ms)(step))
        if turns.end(replayed=replays):
            break
        each(turns, step)
    return turns, replayed


@pytest.mark.parametrize(
    ("graph", "eager", "pays"), [(2.0, 9.0, True), (9.0, 2.0, False), (2.0, 2.0, False)]
)
def test_the_faster_way_is_chosen(graph: float, eager: float, pays: bool) -> None:
    with FakeDevice() as device:
        turns, replayed = run(device, graph_ms=lambda _: graph, eager_ms=lambda _: eager)
    assert turns.pays is pays
    assert f"{graph:.2f} ms with graphs and {eager:.2f} ms without" in str(turns.decision)
    assert str(turns.decision).endswith("no graphs are used") is not pays
    assert turns.begin() is pays
    # Three steps without a graph, the first replay, and three turns of each way.
    assert len(replayed) == 4 + 8 * 6


def test_a_gain_that_is_not_clear_takes_more_turns() -> None:
    with FakeDevice() as device:
        turns, replayed = run(
            device, graph_ms=lambda _: 2.0, eager_ms=lambda step: 1.9 if step < 20 else 3.0
        )
    assert turns.pays
    assert "2.00 ms with graphs and 2.82 ms without" in str(turns.decision)
    assert len(replayed) == 4 + 8 * 12


def test_steps_with_something_else_before_them_do_not_count() -> None:
    """A validation, say, that falls into the turns of one way only."""
    with FakeDevice() as device:
        turns, _ = run(
            device,
            graph_ms=lambda _: 3.0,
            eager_ms=lambda step: 500.0 if step % 16 == 0 else 2.0,
        )
    assert turns.pays is False
    assert "3.00 ms with graphs and 2.00 ms without" in str(turns.decision)


def test_the_first_steps_of_a_turn_do_not_count() -> None:
    """The allocator has to find its memory again."""
    before: list[bool] = []

    def slow_after_a_change(turns: Turns, step: int) -> None:
        before.append(turns.begin())

    def eager_ms(step: int) -> float:
        return 50.0 if len(before) < 2 or before[-2] else 4.0

    with FakeDevice() as device:
        turns, _ = run(device, graph_ms=lambda _: 4.0, eager_ms=eager_ms, each=slow_after_a_change)
    assert "4.00 ms with graphs and 4.00 ms without" in str(turns.decision)


def test_what_happens_between_two_passes_does_not_count() -> None:
    def end_epoch(turns: Turns, step: int) -> None:
        if step % 5 == 4:
            turns.pause()
            device.host_work(1000.0)
            turns.begin_pass()

    with FakeDevice() as device:
        turns, _ = run(device, graph_ms=lambda _: 2.0, eager_ms=lambda _: 3.0, each=end_epoch)
    assert "2.00 ms with graphs and 3.00 ms without (1.50 ×" in str(turns.decision)


def test_a_turn_that_an_error_has_ended_is_begun_again() -> None:
    def fail(turns: Turns, step: int) -> None:
        if step == 9:
            device.host_work(1000.0)
            turns.begin_pass()

    with FakeDevice() as device:
        turns, replayed = run(device, graph_ms=lambda _: 2.0, eager_ms=lambda _: 3.0, each=fail)
    assert "2.00 ms with graphs and 3.00 ms without" in str(turns.decision)
    assert len(replayed) > 4 + 6 * 8


def test_a_step_that_should_have_had_a_graph_does_not_count() -> None:
    with FakeDevice() as device:
        turns, replayed = run(
            device,
            graph_ms=lambda _: 2.0,
            eager_ms=lambda step: 100.0 if step == 7 else 3.0,
            has_graph=lambda step: step >= 3 and step != 7,
        )
    assert turns.pays
    assert "2.00 ms with graphs and 3.00 ms without" in str(turns.decision)
    assert len(replayed) == 4 + 1 + 6 * 8


def test_shapes_that_never_settle_end_without_graphs() -> None:
    with FakeDevice() as device:
        turns, _ = run(
            device,
            graph_ms=lambda _: 2.0,
            eager_ms=lambda _: 3.0,
            has_graph=lambda step: step % 4 == 3,
            steps=1000,
        )
    assert turns.pays is False
    assert "many still have no graph" in str(turns.decision)


def test_nothing_is_measured_again_after_a_restore() -> None:
    with FakeDevice() as device:
        turns = Turns(device)
        turns.restore(pays=True, decision="as it was")
        waits = device.ledger.statistics()
        assert turns.begin()
        assert not turns.end(replayed=False)
        assert device.ledger.statistics() == waits
    assert (turns.pays, turns.decision) == (True, "as it was")
