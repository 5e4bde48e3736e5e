"""The time of a model's own eager code, without that of the parts inside it."""

from __future__ import annotations

import time

import pytest

from headrace.capture.parts.breaks import BreakTimer, is_inside_break


class Clock:
    """A clock that a test sets."""

    now_ns = 0

    def work(self, ms: int) -> None:
        self.now_ns += ms * 1_000_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: made.now_ns)
    return made


def test_the_parts_inside_do_not_count(clock: Clock) -> None:
    model, child, grandchild = BreakTimer(), BreakTimer(), BreakTimer()

    def runs_child() -> None:
        clock.work(2)
        grandchild.call(clock.work, 5)

    def runs_model() -> str:
        assert is_inside_break()
        clock.work(1)
        child.call(runs_child)
        child.call(runs_child)
        clock.work(3)
        return "result"

    assert model.call(runs_model) == "result"
    found = [one.ms_per_call for one in (model, child, grandchild)]
    assert found == [4.0, 2.0, 5.0]
    assert not is_inside_break()


def test_the_mean_of_all_calls_since_a_restart(clock: Clock) -> None:
    timer = BreakTimer()
    timer.call(clock.work, 100)

    def restarts() -> None:
        clock.work(100)
        timer.restart()

    timer.call(restarts)
    assert timer.ms_per_call is None
    timer.call(clock.work, 1)
    timer.call(clock.work, 2)
    assert timer.ms_per_call == 1.5


def test_a_call_that_raises_is_timed_and_ended(clock: Clock) -> None:
    timer = BreakTimer()

    def fails() -> None:
        clock.work(7)
        raise ValueError("too much")

    with pytest.raises(ValueError, match="too much"):
        timer.call(fails)
    assert timer.ms_per_call == 7.0
    assert not is_inside_break()
