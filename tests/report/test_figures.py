"""The parts of reports: figures as people read them, thinning that hides nothing, ticks."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.device import Span, Timeline
from headrace.report.fields import Fields
from headrace.report.figures import (
    brief,
    clock,
    median,
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
from headrace.report.markup import Markup, json_script, tag
from headrace.report.thinning import coverage, envelope, fewer_spans, spread
from headrace.report.tune_result import effects, tune_result

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
        (seconds(200), "3 min 20 s"), (seconds(7500), "2 h 05 min"), (clock(0), "0"),
        (clock(0.5), "0.5 s"), (clock(100), "1:40"), (clock(7325), "2:02:05"),
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


def test_median() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5


@given(st.lists(st.tuples(finite, finite), max_size=2000), st.integers(8, 100))
def test_an_envelope_keeps_the_extremes(points: list[tuple[float, float]], most: int) -> None:
    points.sort()
    kept = envelope(points, most)
    assert len(kept) <= most or kept == points
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
        assert min(y for _, y in kept) == min(y for _, y in points)
        assert max(y for _, y in kept) == max(y for _, y in points)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


@given(st.integers(0, 5000), st.integers(2, 100))
def test_a_spread_has_both_ends(count: int, most: int) -> None:
    chosen = spread(count, most)
    assert len(chosen) <= most
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


@given(lanes(), st.integers(10, 60))
def test_fewer_spans_are_busy_as_long(spans: list[Span], most: int) -> None:
    kept = fewer_spans(spans, most)
    assert len(kept) <= max(most, len({(span.lane, span.kind) for span in spans}))

    def busy(found: list[Span]) -> dict[tuple[str, str], int]:
        sums: dict[tuple[str, str], int] = {}
        for span in found:
            key = (span.lane, span.kind)
            sums[key] = sums.get(key, 0) + span.end_ns - span.start_ns
        return sums

    assert busy(kept) == busy(spans)


@given(lanes(), st.integers(1, 50))
def test_coverage_adds_up(spans: list[Span], bins: int) -> None:
    lane = [span for span in spans if span.lane == "a"]
    length_ns = max((span.end_ns for span in lane), default=0) or bins
    parts = coverage(lane, length_ns, bins)
    covered = sum(span.end_ns - span.start_ns for span in lane)
    assert all(0 <= part <= 1 for part in parts)
    if length_ns >= bins:
        assert sum(parts) * length_ns / bins == pytest.approx(covered, abs=1e-3, rel=1e-6)


def test_markup() -> None:
    assert tag("p", "<b>", Markup("<i></i>"), None, ["x", 1]) == "<p>&lt;b&gt;<i></i>x1</p>"
    assert tag("a", class_="x", data_y='"', hidden=True, z=None) == (
        '<a class="x" data-y="&quot;" hidden></a>'
    )
    assert tag("br") == "<br>"
    assert json_script({"a": "</script>&"}, "d") == (
        '<script type="application/json" class="d">{"a":"\\u003c/script\\u003e\\u0026"}</script>'
    )


class TestEffects:
    """What mattered in a search: nothing is said of fields that changed together."""

    def trial(self, number: int, plan: str, ms: float, **changed: Any) -> dict[str, Any]:
        graphs, depth = ("on", 2) if plan == "graph" else ("off", 0)
        return {
            "id": number,
            "plan": {"name": plan, "graphs": graphs, "prefetch_depth": depth} | changed,
            "loader": {
                "workers": changed.get("workers"),
                "prefetch_factor": changed.get("prefetch_factor"),
            },
            "changed": changed,
            "rungs": [{"steps": 20, "ms_per_step": [ms]}],
            "status": "kept",
        }

    def found(self, *trials: dict[str, Any]) -> dict[str, tuple[tuple[str, float], ...]]:
        result = tune_result(Fields("tune.json", "", {"trials": list(trials)}))
        return {effect.name: effect.best_ms for effect in effects(result)}

    def test_plans_are_one_choice_and_fields_are_compared_alone(self) -> None:
        found = self.found(
            self.trial(0, "baseline", 50.0),
            self.trial(1, "graph", 8.0),
            self.trial(2, "graph", 7.0, prefetch_depth=4),
            self.trial(3, "graph", 9.0, prefetch_depth=4, workers=2, prefetch_factor=2),
            self.trial(4, "graph", 9.5, prefetch_depth=4, workers=2, prefetch_factor=4),
        )
        assert found == {
            "plan": (("graph", 8.0), ("baseline", 50.0)),
            "prefetch_depth": (("4", 7.0), ("2", 8.0)),
            "workers": (("as given", 7.0), ("2", 9.0)),
            "prefetch_factor": (("2", 9.0), ("4", 9.5)),
        }

    def test_another_batch_size_is_not_the_same(self) -> None:
        """Graphs are compared at one batch size, though one trial was at another."""
        found = self.found(
            self.trial(0, "pipeline", 10.0, batch_size=None),
            self.trial(1, "pipeline", 9.0, batch_size=None, graphs="on"),
            self.trial(2, "pipeline", 4.0, batch_size=256),
        )
        assert found["graphs"] == (("on", 9.0), ("off", 10.0))

    def test_one_trial_shows_nothing(self) -> None:
        assert self.found(self.trial(0, "graph", 8.0)) == {}
