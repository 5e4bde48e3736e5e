"""Timelines: a few steps of each plan, on one time scale.

A lane is a channel and the fill its level: the share of each moment in which the lane had something
to do. Drawn as solid bars, 20,000 short kernels with gaps between them would look like a full lane.
Zoomed in, a kernel is a block of full height.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence

from headrace.device import Kind, Timeline
from headrace.report.charts import Cell, Cells, as_table, percent, table
from headrace.report.figures import ms, number, share, tick, ticks
from headrace.report.markup import Markup, json_script, shown_text, tag
from headrace.report.thinning import coverage, fewer_spans
from headrace.runs.records import StoredTimeline

_KINDS = typing.get_args(Kind)
_MOST_SPANS = 6_000  # of one plan
_MOST_OF_ALL = 60_000
_BINS = 480  # across the longest timeline, as drawn without the script
_TICK_NS = 100  # what the script is told is as exact as this
_LONGEST_NAME = 140
_NAMES_SHOWN = 12  # in the table
_NAMES_KEPT = 400  # for the script: those that took longest


def timelines(found: Sequence[tuple[str, StoredTimeline]]) -> Markup:
    """Every plan's timeline, with the tools to look closer."""
    length_ns = max(span.end_ns for _, timeline in found for span in timeline.spans)
    length_ns = max(length_ns, 1)
    most = min(_MOST_SPANS, _MOST_OF_ALL // len(found))
    return tag(
        "div",
        _tools(),
        [_timeline(plan, timeline, length_ns, most) for plan, timeline in found],
        class_="timelines",
        data_length=length_ns / _TICK_NS,
    )


def _tools() -> Markup:
    buttons = [
        ("in", "Zoom in", "+"),
        ("out", "Zoom out", "−"),
        ("left", "Earlier", "←"),
        ("right", "Later", "→"),
        ("all", "Show all", "All"),
    ]
    return tag(
        "div",
        [
            tag("button", sign, type="button", data_zoom=name, aria_label=label, title=label)
            for name, label, sign in buttons
        ],
        tag("output", "", class_="tl-window", aria_live="polite"),
        class_="tl-tools",
        role="group",
        aria_label="Look closer at all timelines",
        hidden=True,
    )


def _timeline(plan: str, stored: StoredTimeline, length_ns: int, most: int) -> Markup:
    timeline = Timeline(stored.spans)
    kept = Timeline(fewer_spans(timeline.spans, most))
    lanes = _ordered_lanes(kept)
    count = round(stored.steps)
    steps = f"{count} steps" if count > 1 else "1 step"
    end_ms = max(span.end_ns for span in timeline.spans) / 1e6
    described = f"Timeline of {plan}: {steps} in {ms(end_ms)}; " + "; ".join(
        f"{lane} busy {share(_busy(timeline, lane))}" for lane in lanes
    )
    drawn = tag(
        "div",
        [_lane(timeline, lane, length_ns) for lane in lanes],
        tag("span", class_="tl-name"),
        tag(
            "svg",
            [
                tag(
                    "text",
                    f"{tick(at)} ms" if at else "0",
                    x=percent(at, length_ns / 1e6),
                    y=14,
                    text_anchor="start" if at == 0 else "middle",
                )
                for at in ticks(0, length_ns / 1e6 * 0.97, 5)
            ],
            class_="tl-axis",
            height=18,
            aria_hidden="true",
        ),
        class_="tl-lanes",
        role="img",
        aria_label=described,
    )
    title = tag("h3", plan, " ", tag("small", f"{steps} in {ms(end_ms)}"))
    save = tag("button", "Save for Perfetto", type="button", class_="tl-save", hidden=True)
    return tag(
        "figure",
        tag("figcaption", title, tag("p", class_="tl-detail", aria_live="polite"), save),
        drawn,
        as_table("What took the time", _names_table(plan, timeline)),
        json_script(_data(kept, lanes), "tl-data"),
        class_="timeline",
        data_plan=plan,
    )


def _ordered_lanes(timeline: Timeline) -> list[str]:
    """The host first, then the streams, the busiest first."""
    on_host = {span.lane for span in timeline.spans if span.kind in ("wait", "host")}
    return sorted(
        timeline.lanes(), key=lambda lane: (lane not in on_host, -timeline.busy_ms(lane), lane)
    )


def _busy(timeline: Timeline, lane: str) -> float:
    end_ms = max(span.end_ns for span in timeline.spans) / 1e6
    return timeline.busy_ms(lane) / end_ms if end_ms else 0.0


def _lane(timeline: Timeline, lane: str, length_ns: int) -> list[Markup]:
    end = max(span.end_ns for span in timeline.spans) / length_ns * _BINS
    paths = [tag("rect", width=f"{end:.2f}", height=100, class_="track")]
    base = [0.0] * _BINS
    for kind in _KINDS:
        chosen = [span for span in timeline.on(lane) if span.kind == kind]
        if chosen:
            level = coverage(chosen, length_ns, _BINS)
            top = [min(1.0, below + own) for below, own in zip(base, level, strict=True)]
            paths.append(
                tag("path", d=Markup(_stepped(base, top)), class_=f"fill {kind}", data_kind=kind)
            )
            base = top
    name = tag("span", lane, tag("small", share(_busy(timeline, lane))), class_="tl-name")
    plot = tag(
        "svg",
        paths,
        class_="tl-plot",
        viewBox=f"0 0 {_BINS} 100",
        preserveAspectRatio="none",
        data_lane=lane,
    )
    return [name, plot]


def _stepped(base: Sequence[float], top: Sequence[float]) -> str:
    """The area between two step functions, in percent of the lane's height."""
    parts = []
    at = 0
    while at < len(top):
        low, high = round(100 * base[at]), round(100 * top[at])
        end = at + 1
        while end < len(top) and (round(100 * base[end]), round(100 * top[end])) == (low, high):
            end += 1
        if top[at] > base[at]:
            high = max(high, low + 2)  # what is there is seen, however short it is
            parts.append(f"M{at} {100 - high}H{end}V{100 - low}H{at}Z")
        at = end
    return "".join(parts)


def _data(timeline: Timeline, lanes: Sequence[str]) -> dict[str, object]:
    """The spans for the script: of each lane, [start − last start, duration, name, …] in 0.1 µs."""
    took_ns: dict[tuple[str, Kind], int] = {}
    for span in timeline.spans:
        key = (span.name, span.kind)
        took_ns[key] = took_ns.get(key, 0) + span.end_ns - span.start_ns
    kept = set(sorted(took_ns, key=lambda key: -took_ns[key])[:_NAMES_KEPT])
    names: dict[tuple[str, Kind], int] = {}
    packed = []
    for lane in lanes:
        numbers: list[int] = []
        before = 0
        for span in timeline.on(lane):
            start, end = round(span.start_ns / _TICK_NS), round(span.end_ns / _TICK_NS)
            is_kept = (span.name, span.kind) in kept
            name = shown_text(span.name[:_LONGEST_NAME]) if is_kept else f"another {span.kind}"
            index = names.setdefault((name, span.kind), len(names))
            numbers += [start - before, end - start, index]
            before = start
        packed.append({"lane": shown_text(lane), "spans": numbers})
    return {"names": [[name, _KINDS.index(kind)] for name, kind in names], "lanes": packed}


def _names_table(plan: str, timeline: Timeline) -> Markup:
    """What ran longest, by name: for those who do not see the picture."""
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for span in timeline.spans:
        key = (span.name, span.kind, span.lane)
        count, total = sums.get(key, (0, 0))
        sums[key] = (count + 1, total + span.end_ns - span.start_ns)
    ordered = sorted(sums.items(), key=lambda entry: -entry[1][1])
    rows: list[Cells] = [
        [
            name[:_LONGEST_NAME],
            kind,
            lane,
            Cell(f"{count:,}", float(count)),
            Cell(number(total / 1e6), total / 1e6),
        ]
        for (name, kind, lane), (count, total) in ordered[:_NAMES_SHOWN]
    ]
    caption = f"{plan}: what ran longest"
    if len(ordered) > _NAMES_SHOWN:
        caption += f" ({_NAMES_SHOWN} of {len(ordered):,} names)"
    return table(caption, ("name", "kind", "lane", "times", "ms"), rows)
