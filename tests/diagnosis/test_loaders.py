"""How fast a loader is on its own, by a clock that the test sets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.diagnosis.loaders import time_per_batch


class Batches:
    """A loader that has `ready` batches, and then needs `each_ms` for one. After `count` of them it
    ends, or fails."""

    def __init__(
        self, ready: int, each_ms: float, count: int, end: type[Exception] = StopIteration
    ) -> None:
        self.ready, self.each_ms, self.count, self.end = ready, each_ms, count, end
        self.taken, self.now_ms = 0, 0.0

    def take(self) -> None:
        if self.taken == self.count:
            raise self.end
        self.taken += 1
        self.now_ms += 0.01 if self.taken <= self.ready else self.each_ms

    def clock(self) -> Callable[[], int]:
        return lambda: round(self.now_ms * 1e6)

    def timed(self) -> float | None:
        return time_per_batch(self.take, self.ready, self.clock())


@given(ready=st.integers(0, 64), each_ms=st.floats(0.05, 50.0))
def test_batches_that_were_loaded_before_do_not_count(ready: int, each_ms: float) -> None:
    loader = Batches(ready, each_ms, count=200)
    assert loader.timed() == pytest.approx(each_ms, rel=0.01)
    assert loader.taken == ready + 32


@pytest.mark.parametrize("end", [StopIteration, RuntimeError])
@pytest.mark.parametrize(("left", "expected"), [(3, None), (4, 2.0), (10, 2.0)])
def test_an_epoch_that_ends_meanwhile(
    end: type[Exception], left: int, expected: float | None
) -> None:
    assert Batches(8, 2.0, 8 + left, end).timed() == (
        expected if expected is None else pytest.approx(expected)
    )


def test_a_slow_loader_does_not_hold_up_the_end_of_the_script() -> None:
    slow = Batches(2, 700.0, count=200)
    assert slow.timed() == pytest.approx(700.0)
    assert slow.taken == 8  # until 4 seconds are over
    too_slow = Batches(2, 1500.0, count=200)
    assert too_slow.timed() is None
    assert too_slow.now_ms < 5000
