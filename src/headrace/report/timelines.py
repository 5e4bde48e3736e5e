"""Timelines: a few steps of each plan, on one time scale.

A lane's fill shows the share of each moment in which the lane was busy. Solid bars would hide the
gaps between 20,000 short kernels: the lane would look full. Zoomed in, a kernel is a block of full
height.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.device import Kind, Timeline
from headrace.records import StoredTimeline
from headrace.report.charts import Table, figure, percent, table
from headrace.report.figures import ms, share, tick, ticks
from headrace.report.page import shown_text
from headrace.report.thinning import coverage
from headrace.text_table import counted

_KINDS: tuple[Kind, ...] = typing.get_args(Kind)
_BINS = 480  # across the longest timeline, as drawn without the script
_TICK_NS = 100  # timelines.js counts time in 0.1 µs
_MAX_NAME = 140
_NAMES_IN_TABLE = 12
_NAMES_IN_SCRIPT = 400  # the longest-running ones


@dataclass(frozen=True, slots=True)
class LaneView:
    """A lane: how busy it was, and an SVG path for each kind of span."""

    name: str
    busy: str
    fills: Sequence[tuple[Kind, str]]


@dataclass(frozen=True, slots=True)
class TimelineView:
    """One plan's timeline. `end` is where it ends, in bins; `data` goes to timelines.js."""

    plan: str
    steps: str
    duration: str
    end: str
    lanes: Sequence[LaneView]
    names: Table
    data: dict[str, Any]

    @property
    def busy_words(self) -> str:
        return "; ".join(f"{lane.name} busy {lane.busy}" for lane in self.lanes)


@dataclass(frozen=True, slots=True)
class TimelineGroup:
    """Timelines on one scale. `length` is the longest one's, in ticks of timelines.js."""

    length: float
    ticks: Sequence[tuple[str, str, str]]
    timelines: Sequence[TimelineView]
    bins: int = _BINS


def timeline_group(found: Sequence[tuple[str, StoredTimeline]]) -> TimelineGroup:
    """The timelines of plans, by name."""
    length_ns = max(1, *(span.end_ns for _, timeline in found for span in timeline.spans))
    length_ms = length_ns / 1e6
    axis = [
        (percent(at, length_ms), "middle" if at else "start", f"{tick(at)} ms" if at else "0")
        for at in ticks(0, length_ms * 0.97, 5)
    ]
    views = [_timeline(plan, stored, length_ns) for plan, stored in found]
    return TimelineGroup(length_ns / _TICK_NS, axis, views)


def _timeline(plan: str, stored: StoredTimeline, length_ns: int) -> TimelineView:
    timeline = Timeline(stored.spans)
    lanes = _ordered_lanes(timeline)
    end_ns = max(span.end_ns for span in timeline.spans)
    return TimelineView(
        plan=plan,
        steps=counted(max(1, round(stored.steps)), "step"),
        duration=ms(end_ns / 1e6),
        end=f"{end_ns / length_ns * _BINS:.2f}",
        lanes=[_lane(timeline, lane, end_ns, length_ns) for lane in lanes],
        names=_names_table(plan, timeline),
        data=_data(timeline, lanes),
    )


def _ordered_lanes(timeline: Timeline) -> list[str]:
    """The host first, then the streams, the busiest first."""
    on_host = {span.lane for span in timeline.spans if span.kind in ("wait", "host")}
    return sorted(
        timeline.lanes(), key=lambda lane: (lane not in on_host, -timeline.busy_ms(lane), lane)
    )


def _lane(timeline: Timeline, lane: str, end_ns: int, length_ns: int) -> LaneView:
    fills: list[tuple[Kind, str]] = []
    base = [0.0] * _BINS
    for kind in _KINDS:
        spans = [span for span in timeline.on(lane) if span.kind == kind]
        if spans:
            level = coverage(spans, length_ns, _BINS)
            top = [min(1.0, below + own) for below, own in zip(base, level, strict=True)]
            fills.append((kind, _stepped(base, top)))
            base = top
    busy = timeline.busy_ms(lane) * 1e6 / end_ns if end_ns else 0.0
    return LaneView(lane, share(busy), fills)


def _stepped(base: Sequence[float], top: Sequence[float]) -> str:
    """An SVG path of the area between two step functions, in percent of the lane's height."""
    parts = []
    at = 0
    while at < len(top):
        low, high = round(100 * base[at]), round(100 * top[at])
        end = at + 1
        while end < len(top) and (round(100 * base[end]), round(100 * top[end])) == (low, high):
            end += 1
        if top[at] > base[at]:
            high = max(high, low + 2)  # the shortest span is seen, too
            parts.append(f"M{at} {100 - high}H{end}V{100 - low}H{at}Z")
        at = end
    return "".join(parts)


def _data(timeline: Timeline, lanes: Sequence[str]) -> dict[str, Any]:
    """The spans for the script: of each lane, [start − last start, duration, name, …] in 0.1 µs."""
    took_ns: dict[tuple[str, Kind], int] = {}
    for span in timeline.spans:
        key = (span.name, span.kind)
        took_ns[key] = took_ns.get(key, 0) + span.end_ns - span.start_ns
    kept = set(sorted(took_ns, key=lambda key: -took_ns[key])[:_NAMES_IN_SCRIPT])
    names: dict[tuple[str, Kind], int] = {}
    packed = []
    for lane in lanes:
        numbers: list[int] = []
        before = 0
        for span in timeline.on(lane):
            start, end = round(span.start_ns / _TICK_NS), round(span.end_ns / _TICK_NS)
            is_kept = (span.name, span.kind) in kept
            name = shown_text(span.name[:_MAX_NAME]) if is_kept else f"another {span.kind}"
            index = names.setdefault((name, span.kind), len(names))
            numbers += [start - before, end - start, index]
            before = start
        packed.append({"lane": shown_text(lane), "spans": numbers})
    return {"names": [[name, _KINDS.index(kind)] for name, kind in names], "lanes": packed}


def _names_table(plan: str, timeline: Timeline) -> Table:
    """The names that took the most time."""
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for span in timeline.spans:
        key = (span.name, span.kind, span.lane)
        count, total_ns = sums.get(key, (0, 0))
        sums[key] = (count + 1, total_ns + span.end_ns - span.start_ns)
    ordered = sorted(sums.items(), key=lambda item: -item[1][1])
    caption = f"{plan}: what ran longest"
    if len(ordered) > _NAMES_IN_TABLE:
        caption += f" ({_NAMES_IN_TABLE} of {len(ordered):,} names)"
    return table(
        caption,
        ("name", "kind", "lane", "times", "ms"),
        [
            [
                name[:_MAX_NAME],
                kind,
                lane,
                figure(float(count), lambda value: f"{value:,.0f}"),
                figure(total_ns / 1e6),
            ]
            for (name, kind, lane), (count, total_ns) in ordered[:_NAMES_IN_TABLE]
        ],
    )
