"""Thinning: fewer points that hide nothing; coverage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.device import Span, Timeline
from headrace.report.thinning import coverage, envelope, evenly_spaced

finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(finite, finite), max_size=2000), st.integers(8, 100))
def test_an_envelope_keeps_the_extremes(points: list[tuple[float, float]], limit: int) -> None:
    points.sort()
    kept = envelope(points, limit)
    assert len(kept) <= limit or kept == points
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
        assert min(y for _, y in kept) == min(y for _, y in points)
        assert max(y for _, y in kept) == max(y for _, y in points)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


@given(st.integers(0, 5000), st.integers(2, 100))
def test_evenly_spaced_indices_have_both_ends(count: int, limit: int) -> None:
    chosen = evenly_spaced(count, limit)
    assert len(chosen) <= limit
    assert chosen == sorted(set(chosen))
    if count:
        assert (chosen[0], chosen[-1]) == (0, count - 1)


@st.composite
def lanes(draw: st.DrawFn) -> list[Span]:
    """Spans that do not overlap within a lane, as on a stream."""
    spans = []
    for lane in draw(st.lists(st.sampled_from(["a", "b", "c"]), unique=True, min_size=1)):
        at = 0
        for gap, length in draw(
            st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), max_size=80)
        ):
            kind = draw(st.sampled_from(["kernel", "copy"]))
            spans.append(Span(lane, "k", kind, at + gap, at + gap + length))
            at += gap + length
    return list(Timeline(spans).spans)


@given(lanes(), st.integers(1, 50))
def test_coverage_adds_up(spans: list[Span], bins: int) -> None:
    lane = [span for span in spans if span.lane == "a"]
    length_ns = max((span.end_ns for span in lane), default=0) or bins
    parts = coverage(lane, length_ns, bins)
    covered = sum(span.end_ns - span.start_ns for span in lane)
    assert all(0 <= part <= 1 for part in parts)
    if length_ns >= bins:
        assert sum(parts) * length_ns / bins == pytest.approx(covered, abs=1e-3, rel=1e-6)
