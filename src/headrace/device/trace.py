"""Traces: every kernel and copy that a device ran in a block, with its time and stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.device.timeline import Span, Timeline

if TYPE_CHECKING:
    from headrace.device.base import Device


class Trace:
    """What ran on a device inside a block of `Device.trace`. Filled when the block has ended.

    `timeline` starts at 0 when the block begins. It is None if the work could not be traced; then
    `missing` says why. `wall_ns` is how long the block took, from an idle device to an idle device.
    `launches` counts the host's launches: a graph, a kernel and a copy each count once.
    """

    def __init__(self) -> None:
        self.timeline: Timeline | None = None
        self.missing: str | None = "the block has not ended"
        self.wall_ns = 0
        self.launches: int | None = None

    @property
    def wall_ms(self) -> float:
        return self.wall_ns / 1e6

    def set_spans(self, spans: list[Span], launches: int | None, *, from_ns: int) -> None:
        """Fill the trace, for devices. `from_ns` is when the block began."""
        self.timeline = Timeline(
            Span(
                span.lane,
                span.name,
                span.kind,
                max(0, span.start_ns - from_ns),
                span.end_ns - from_ns,
                span.where,
            )
            for span in spans
            if span.end_ns > from_ns
        )
        self.launches, self.missing = launches, None

    def give_up(self, why: str) -> None:
        """Say why there is no timeline, for devices."""
        self.missing = why


@contextmanager
def traced(device: Device) -> Iterator[Trace]:
    """The block of `Device.trace`."""
    trace = Trace()
    with device._watch_work(trace):
        # From idle to idle: the time covers all work of the block and no other.
        device.synchronize("trace")
        start_ns = device.ledger.now_ns()
        try:
            yield trace
        finally:
            device.synchronize("trace")
            trace.wall_ns = device.ledger.now_ns() - start_ns
