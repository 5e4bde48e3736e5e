"""Timelines: what ran on which lane and when, how much of it overlapped, and a file to view it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.atomic_files import atomic_file

_NS_PER_MS = 1_000_000

Kind = Literal["kernel", "copy", "wait", "host"]


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel, copy or wait. Times are whole nanoseconds, so that sums are exact."""

    lane: str
    name: str
    kind: Kind
    start_ns: int
    end_ns: int
    where: str = ""

    @property
    def start_ms(self) -> float:
        return self.start_ns / _NS_PER_MS

    @property
    def end_ms(self) -> float:
        return self.end_ns / _NS_PER_MS

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / _NS_PER_MS


class Timeline:
    """Spans by lane. A lane is a stream, or a host thread (whose spans are `wait` or `host`)."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = tuple(sorted(spans, key=lambda span: (span.start_ns, span.end_ns)))

    def lanes(self) -> list[str]:
        """The lanes in the order in which they were first used."""
        return list(dict.fromkeys(span.lane for span in self.spans))

    def on(self, lane: str) -> list[Span]:
        return [span for span in self.spans if span.lane == lane]

    def busy_ms(self, lane: str) -> float:
        """How long something ran on that lane."""
        return _covered_ns(self.on(lane)) / _NS_PER_MS

    @property
    def length_ms(self) -> float:
        """From the first span's start to the last one's end."""
        if not self.spans:
            return 0.0
        end_ns = max(span.end_ns for span in self.spans)
        return (end_ns - self.spans[0].start_ns) / _NS_PER_MS

    def device_busy_ms(self, kind: Kind | None = None) -> float:
        """How long something ran on at least one stream; with `kind`, something of that kind."""
        spans = (span for span in self._device_spans() if kind in (None, span.kind))
        return _covered_ns(spans) / _NS_PER_MS

    def overlap_ms(self) -> float:
        """How long two or more streams ran at the same time."""
        edges = []
        for lane in {span.lane for span in self._device_spans()}:
            for start_ns, end_ns in _merged(self.on(lane)):
                edges += [(start_ns, 1), (end_ns, -1)]
        overlap_ns = running = since_ns = 0
        for at_ns, change in sorted(edges):
            if running >= 2:
                overlap_ns += at_ns - since_ns
            running += change
            since_ns = at_ns
        return overlap_ns / _NS_PER_MS

    def to_chrome_trace(self) -> dict[str, Any]:
        """The trace-event format of Perfetto and chrome://tracing. Times in microseconds."""
        lanes = {lane: number for number, lane in enumerate(self.lanes())}
        events: list[dict[str, Any]] = []
        for lane, number in lanes.items():
            named = {"ph": "M", "pid": 0, "tid": number, "name": "thread_name"}
            events.append(named | {"args": {"name": lane}})
        for span in self.spans:
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": lanes[span.lane],
                    "name": span.name,
                    "cat": span.kind,
                    "ts": span.start_ns / 1000,
                    "dur": (span.end_ns - span.start_ns) / 1000,
                    "args": {"where": span.where} if span.where else {},
                }
            )
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> None:
        """Write the trace to a file; a reader never sees half of it."""
        with atomic_file(Path(path)) as file:
            file.write(json.dumps(self.to_chrome_trace()).encode())

    def _device_spans(self) -> list[Span]:
        return [span for span in self.spans if span.kind in ("kernel", "copy")]


def _merged(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """The spans' times as intervals that neither touch nor overlap, in order."""
    merged: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda span: span.start_ns):
        if merged and span.start_ns <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span.end_ns))
        else:
            merged.append((span.start_ns, span.end_ns))
    return merged


def _covered_ns(spans: Iterable[Span]) -> int:
    return sum(end_ns - start_ns for start_ns, end_ns in _merged(spans))


# --- compact form for files: thousands of spans have few names ------------------------------------

_TABLES = ("lane", "name", "kind")


def pack_spans(spans: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Spans (mappings with lane, name, kind, start_ns, end_ns) in a compact form. Each becomes a
    list of five: indices into tables of lanes, names and kinds, its start and its end."""
    tables: dict[str, dict[str, int]] = {name: {} for name in _TABLES}
    rows = [
        [
            *(tables[name].setdefault(span[name], len(tables[name])) for name in _TABLES),
            span["start_ns"],
            span["end_ns"],
        ]
        for span in spans
    ]
    return {f"{name}s": list(table) for name, table in tables.items()} | {"spans": rows}


def unpack_spans(timeline: Mapping[str, Any]) -> dict[str, Any]:
    """A timeline whose packed spans are mappings again. Everything else in it stays as it is, for
    the reader to check."""
    spans = timeline.get("spans")
    tables = [timeline.get(f"{name}s") for name in _TABLES]
    found = {"spans": [_unpack_span(span, tables) for span in spans]} if type(spans) is list else {}
    return {**timeline, **found}


def _unpack_span(span: Any, tables: list[Any]) -> Any:
    if not isinstance(span, list) or len(span) != 5:
        return span
    found: dict[str, Any] = {"start_ns": span[3], "end_ns": span[4]}
    for name, table, index in zip(_TABLES, tables, span, strict=False):
        is_index = isinstance(index, int) and isinstance(table, list) and 0 <= index < len(table)
        if not is_index:
            return span
        found[name] = table[index]
    return found
