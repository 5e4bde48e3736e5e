"""Fewer points and spans, without hiding extremes or busy time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from headrace.device import Span

Point = tuple[float, float]


def envelope(points: Sequence[Point], limit: int) -> list[Point]:
    """About `limit` points whose line looks the same.

    The points are cut into stretches; each keeps its first, lowest, highest and last point."""
    if len(points) <= limit:
        return list(points)
    stretches = max(1, limit // 4)
    kept: list[Point] = []
    for index in range(stretches):
        begin = index * len(points) // stretches
        stretch = range(begin, (index + 1) * len(points) // stretches)
        chosen = {
            stretch[0],
            min(stretch, key=lambda at: points[at][1]),
            max(stretch, key=lambda at: points[at][1]),
            stretch[-1],
        }
        kept += [points[at] for at in sorted(chosen)]
    return kept


def evenly_spaced(count: int, limit: int) -> list[int]:
    """At most `limit` of the indices 0 … count − 1, including the first and the last."""
    if count <= limit:
        return list(range(count))
    return sorted({round(index * (count - 1) / (limit - 1)) for index in range(limit)})


def fewer_spans(spans: Sequence[Span], limit: int) -> list[Span]:
    """At most `limit` spans, if each lane and kind may keep one.

    Short neighbors of one lane and kind are merged into a span as long as their sum, so each lane
    is busy as long as before."""
    kept = list(spans)
    shorter_than_ns = 1_000
    while len(kept) > limit:
        before = len(kept)
        kept = _merged(spans, shorter_than_ns)
        if len(kept) == before and shorter_than_ns > 10**13:
            break
        shorter_than_ns *= 2
    return kept


def _merged(spans: Sequence[Span], shorter_than_ns: int) -> list[Span]:
    """Merge spans shorter than `shorter_than_ns` that start in the same stretch of that length."""

    def place(span: Span) -> tuple[str, str, int, int]:
        is_long = span.end_ns - span.start_ns >= shorter_than_ns
        return (span.lane, span.kind, span.start_ns // shorter_than_ns, span.start_ns * is_long)

    merged = []
    for _, group in groupby(sorted(spans, key=place), key=place):
        together = list(group)
        first = together[0]
        if len(together) > 1:
            busy_ns = sum(span.end_ns - span.start_ns for span in together)
            name = f"{len(together)} × {first.kind}, drawn as one"
            first = replace(first, name=name, end_ns=first.start_ns + busy_ns)
        merged.append(first)
    return sorted(merged, key=lambda span: (span.start_ns, span.end_ns))


def coverage(spans: Sequence[Span], length_ns: int, bins: int) -> list[float]:
    """How much of each of `bins` equal parts of 0 … `length_ns` the spans cover, from 0 to 1."""
    width_ns = max(1.0, length_ns / bins)
    covered = [0.0] * bins
    for span in spans:
        first = min(bins - 1, int(span.start_ns / width_ns))
        last = min(bins - 1, int(span.end_ns / width_ns))
        for index in range(first, last + 1):
            begin, end = index * width_ns, (index + 1) * width_ns
            covered[index] += max(0.0, min(end, span.end_ns) - max(begin, span.start_ns))
    return [min(1.0, part / width_ns) for part in covered]
