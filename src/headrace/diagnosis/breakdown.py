"""Where a step's time goes, without a remainder.

At each moment the device computes, communicates, only copies, or is idle. Idle time is charged
once, to the first thing that made the next launch late. The host falls behind when it waits for the
device, for the loader, or runs Python for long; what it owes is paid by the idle time that follows.
Once the host is ahead of the device again, it owes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from headrace.diagnosis.trace import HostSegment, StepTrace, Work, host_segments

Cause = Literal[
    "computing",
    "input",
    "transfer",
    "synchronisation",
    "launch",
    "host",
    "other ranks",
    "unattributed",
]
CAUSES: tuple[Cause, ...] = Cause.__args__  # type: ignore[attr-defined]
#: A kernel starts up to this long after its launch, on an idle device.
_LAUNCH_LATENCY_NS = 20_000


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Nanoseconds of the whole trace by cause. `by_call` has the idle time that each waiting call
    exposed, by its position in the trace's calls."""

    steps: int
    ns: dict[Cause, int]
    by_call: dict[int, int]

    @property
    def total_ns(self) -> int:
        return sum(self.ns.values())

    def share(self, cause: Cause) -> float:
        return self.ns[cause] / self.total_ns if self.total_ns else 0.0

    @property
    def idle_share(self) -> float:
        return 1.0 - self.share("computing")

    def ms_per_step(self, cause: Cause) -> float:
        return self.ns[cause] / self.steps / 1e6


def breakdown(trace: StepTrace) -> Breakdown:
    """Divide the time from the trace's start to its end. The parts add up exactly."""
    ns: dict[Cause, int] = dict.fromkeys(CAUSES, 0)
    by_call: dict[int, int] = {}
    gaps: list[tuple[int, int]] = []
    for start, end, state in _device_states(trace):
        if state is None:
            gaps.append((start, end))
        else:
            ns[state] += end - start
    debts = _Debts(trace)
    for start, end, work in _with_next_work(gaps, trace.work):
        for cause, call, paid_ns in debts.charge(start, end, work):
            ns[cause] += paid_ns
            if call is not None:
                by_call[call] = by_call.get(call, 0) + paid_ns
    return Breakdown(trace.steps, ns, by_call)


def _device_states(trace: StepTrace) -> Iterator[tuple[int, int, Cause | None]]:
    """What the device did from start to end; None: nothing."""
    edges: list[tuple[int, int, str]] = []
    for one in trace.work:
        start, end = max(one.start_ns, trace.start_ns), min(one.end_ns, trace.end_ns)
        if end > start:
            edges += [(start, 1, one.kind), (end, -1, one.kind)]
    edges.sort()
    running = {"kernel": 0, "copy": 0, "communication": 0}
    since_ns = trace.start_ns
    for at_ns, change, kind in edges:
        if at_ns > since_ns:
            yield since_ns, at_ns, _state(running)
            since_ns = at_ns
        running[kind] += change
    if trace.end_ns > since_ns:
        yield since_ns, trace.end_ns, None


def _state(running: dict[str, int]) -> Cause | None:
    if running["kernel"]:
        return "computing"
    if running["communication"]:
        return "other ranks"
    return "transfer" if running["copy"] else None


def _with_next_work(
    gaps: list[tuple[int, int]], work: tuple[Work, ...]
) -> Iterator[tuple[int, int, Work | None]]:
    """Each gap with the work that ends it."""
    at = 0
    for start, end in gaps:
        while at < len(work) and work[at].start_ns < end:
            at += 1
        found = work[at] if at < len(work) and work[at].start_ns == end else None
        yield start, end, found


@dataclass(slots=True)
class _Debt:
    """What the host still owes for one thing that it did."""

    segment: HostSegment
    ns: int


class _Debts:
    """What the host did since it was last ahead of the device, and has not been charged for."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        self._segments = host_segments(trace)
        self._next = 0
        self._owed: deque[_Debt] = deque()
        self._ahead = _launches_ahead(trace)

    def charge(
        self, start_ns: int, end_ns: int, work: Work | None
    ) -> Iterator[tuple[Cause, int | None, int]]:
        """Who pays for a gap: (cause, position of the waiting call, nanoseconds)."""
        calls, left_ns = self._trace.calls, end_ns - start_ns
        call = calls[work.call] if work is not None and work.call is not None else None
        self._look_up_to(end_ns if call is None else min(end_ns, max(start_ns, call.start_ns)))
        if call is not None and call.end_ns <= start_ns:
            # It was launched in time: the device itself was late.
            yield "launch" if left_ns <= _LAUNCH_LATENCY_NS else "unattributed", None, left_ns
            return
        while left_ns > 0 and self._owed:
            debt = self._owed[0]
            paid_ns = min(left_ns, debt.ns)
            yield debt.segment.cause, debt.segment.call, paid_ns
            left_ns -= paid_ns
            debt.ns -= paid_ns
            if debt.ns == 0:
                self._owed.popleft()
        if left_ns > 0:
            yield "launch" if calls else "unattributed", None, left_ns

    def _look_up_to(self, at_ns: int) -> None:
        while self._next < len(self._segments):
            segment = self._segments[self._next]
            if segment.start_ns >= at_ns and segment.ns > 0:
                break
            self._next += 1
            if segment.call is not None and segment.call in self._ahead:
                self._owed.clear()
            elif segment.cause != "launch" and segment.ns > 0:
                self._owed.append(_Debt(segment, segment.ns))


def _launches_ahead(trace: StepTrace) -> set[int]:
    """The launches whose work had to wait for the device: there the host was ahead."""
    starts: dict[int, int] = {}
    for one in trace.work:
        if one.call is not None:
            starts.setdefault(one.call, one.start_ns)  # of a graph, its first kernel
    return {
        call
        for call, start_ns in starts.items()
        if start_ns - trace.calls[call].end_ns > _LAUNCH_LATENCY_NS
    }
