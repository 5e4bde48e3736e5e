"""Figures as people read them, and the ticks of an axis."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.report.figures import (
    brief,
    moment,
    ms,
    number,
    plain,
    seconds,
    share,
    size,
    tick,
    ticks,
    times,
)

finite = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (number(None), "–"), (number(0), "0"), (number(36.14), "36.1"), (number(1250), "1,250"),
        (number(0.01234), "0.0123"), (number(209_302.4), "209,302"), (number(2.0), "2"),
        (number(1e-7), "1.00e-07"), (ms(8.6), "8.60 ms"), (share(0.95), "95 %"),
        (ms(0.0207), "20.7 µs"), (tick(2.5), "2.5"), (tick(200), "200"),
        (share(0.996), "99.6 %"), (share(1.0), "100 %"), (share(0.004), "0.4 %"),
        (share(3.35), "335 %"), (times(4.2), "4.20×"), (times(12.34), "12.3×"),
        (size(5.3e9), "5.30 GB"), (size(900), "900 B"), (seconds(4.5), "4.50 s"),
        (seconds(200), "3 min 20 s"), (seconds(7500), "2 h 05 min"),
        (brief(0.01), "0.01"), (plain(True), "yes"), (plain(None), "–"), (plain([1, "a"]), "1, a"),
        (plain({"a": 1}), "a 1"), (moment("2026-11-15T09:51:22+00:00"), "2026-11-15 09:51"),
        (moment(None), ""), (plain(10**400), str(10**400)),
    ],
)  # fmt: skip
def test_figures(written: str, expected: str) -> None:
    assert written == expected


@given(st.floats(-1e307, 1e307))
def test_any_number_can_be_written(value: float) -> None:
    for write in (number, ms, share, times, size, brief, plain):
        assert "inf" not in write(value)
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=6e-3)


@given(finite, finite, st.integers(1, 10))
def test_ticks_lie_inside_and_are_few(low: float, high: float, about: int) -> None:
    found = ticks(low, high, about)
    assert len(found) <= 2 * about + 2
    for at in found:
        around = (high - low) * 1e-6
        assert not math.isfinite(around) or low >= high or low - around <= at <= high + around
