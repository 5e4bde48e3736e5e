"""Large inputs made small without hiding what is in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from headrace.device import Span

Point = tuple[float, float]


def envelope(points: Sequence[Point], most: int = 400) -> list[Point]:
    """At most about `most` points, in order, that look the same: of each stretch its first, lowest,
    highest and last."""
    if len(points) <= most:
        return list(points)
    stretches = max(1, most // 4)
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


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the indices 0 … count − 1, evenly, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def fewer_spans(spans: Sequence[Span], most: int) -> list[Span]:
    """At most `most` spans where that can be: short neighbours of a lane and kind become one, as
    long as they were together, so that every lane is busy as long as before."""
    kept = list(spans)
    shorter_than_ns = 1_000
    while len(kept) > most:
        before = len(kept)
        kept = _merged(spans, shorter_than_ns)
        if len(kept) == before and shorter_than_ns > 10**13:
            break
        shorter_than_ns *= 2
    return kept


def _merged(spans: Sequence[Span], shorter_than_ns: int) -> list[Span]:
    """Spans that end within the same stretch of time, each stretch `shorter_than_ns` long."""

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
    """The share of each of `bins` equal parts of 0 … `length_ns` that the spans cover. Spans of a
    lane do not overlap; where they do, a part is covered once."""
    width_ns = max(1.0, length_ns / bins)
    covered = [0.0] * bins
    for span in spans:
        first = min(bins - 1, int(span.start_ns / width_ns))
        last = min(bins - 1, int(span.end_ns / width_ns))
        for index in range(first, last + 1):
            begin, end = index * width_ns, (index + 1) * width_ns
            covered[index] += max(0.0, min(end, span.end_ns) - max(begin, span.start_ns))
    return [min(1.0, part / width_ns) for part in covered]
