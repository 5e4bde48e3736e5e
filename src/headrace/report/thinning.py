"""Fewer points, without hiding extremes, and how much of the time spans cover."""

from __future__ import annotations

from collections.abc import Sequence

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
