"""Where a step's time goes, without a remainder.

At each moment the device computes, communicates, only copies, or is idle. Idle time is charged
once, to the first thing that made the next launch late. The host's lead is how much work the device
still has queued. The host loses it when it waits for the device, for the loader, or runs Python for
long; what it lost is paid by the idle time that follows. Once the host has the lead again that it
had before, or waits for the device anyway, it owes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from headrace.diagnosis.trace import HostSegment, StepTrace, Work, host_segments

Cause = Literal[
    "computing",
    "input",
    "transfer",
    "synchronization",
    "launch",
    "host",
    "other ranks",
    "unattributed",
]
CAUSES: tuple[Cause, ...] = Cause.__args__  # type: ignore[attr-defined]
#: A kernel starts up to this long after its launch, on an idle device.
_LAUNCH_LATENCY_NS = 20_000
#: A kernel that starts later than this, on an idle device, waits for something else.
_LATE_START_NS = 500_000
#: The device takes about a microsecond from one queued kernel to the next, at most this long.
_NEXT_KERNEL_NS = 5_000


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Nanoseconds of `steps` steps by cause. `copying_ns` is the part of "transfer" in which the
    device copied; the rest is idle. `by_call` has the idle time that each waiting call exposed, by
    its position in the trace's calls."""

    steps: int
    ns: dict[Cause, int]
    by_call: dict[int, int]
    copying_ns: int = 0
    #: The idle time that each long stretch of Python exposed, by its start.
    by_python: dict[int, int] = field(default_factory=dict)

    @property
    def total_ns(self) -> int:
        return sum(self.ns.values())

    def share(self, cause: Cause) -> float:
        return self.ns[cause] / self.total_ns if self.total_ns else 0.0

    def scaled_to(self, step_ms: float) -> dict[Cause, float]:
        """Milliseconds of a step that takes `step_ms`, by cause. The profiler slows the host down,
        not the device: what the device ran keeps its time, and its idle time is scaled."""
        busy = self._busy_ns()
        busy_scale, idle_scale = self._scales(step_ms)
        return {
            cause: busy.get(cause, 0) * busy_scale
            + (self.ns[cause] - busy.get(cause, 0)) * idle_scale
            for cause in CAUSES
        }

    def idle_ms(self, calls: Iterable[int], step_ms: float) -> float:
        """The idle time that these calls exposed per step, in a step that takes `step_ms`."""
        return sum(self.by_call.get(call, 0) for call in calls) * self._scales(step_ms)[1]

    def _busy_ns(self) -> dict[Cause, int]:
        return {
            "computing": self.ns["computing"],
            "other ranks": self.ns["other ranks"],
            "transfer": self.copying_ns,
        }

    def _scales(self, step_ms: float) -> tuple[float, float]:
        """From nanoseconds of this trace to milliseconds of a step: for busy and for idle time."""
        busy_ns, step_ns = sum(self._busy_ns().values()), step_ms * 1e6 * self.steps
        idle_ns = self.total_ns - busy_ns
        if idle_ns <= 0 or busy_ns >= step_ns:
            scale = step_ms / self.total_ns if self.total_ns else 0.0
            return scale, scale
        return 1 / self.steps / 1e6, (step_ns - busy_ns) / idle_ns / self.steps / 1e6


def breakdown(trace: StepTrace) -> Breakdown:
    """Divide the time from the end of the first step to the trace's end. The parts add up."""
    from_ns, steps = trace.steady_start()
    ns: dict[Cause, int] = dict.fromkeys(CAUSES, 0)
    by_call: dict[int, int] = {}
    by_python: dict[int, int] = {}
    for start, end, state in _device_states(trace):
        if state is not None:
            ns[state] += max(0, end - max(start, from_ns))
    copying_ns = ns["transfer"]
    for idle in idle_times(trace):
        idle_ns = max(0, idle.end_ns - max(idle.start_ns, from_ns))
        ns[idle.cause] += idle_ns
        segment = idle.charged_to
        if segment is None or not idle_ns:
            continue
        if segment.call is not None:
            by_call[segment.call] = by_call.get(segment.call, 0) + idle_ns
        elif idle.cause == "host":
            by_python[segment.start_ns] = by_python.get(segment.start_ns, 0) + idle_ns
    return Breakdown(steps, ns, by_call, copying_ns, by_python)


@dataclass(frozen=True, slots=True)
class Idle:
    """Time in which the device did nothing, and what the host did that it is charged to."""

    start_ns: int
    end_ns: int
    cause: Cause
    charged_to: HostSegment | None


def idle_times(trace: StepTrace) -> Iterator[Idle]:
    """When the device was idle in the whole trace, and why, in order."""
    gaps = [(start, end) for start, end, state in _device_states(trace) if state is None]
    debts = _Debts(trace)
    for start, end, work in _with_next_work(gaps, trace.work):
        at_ns = start
        for cause, segment, ns in debts.charge(start, end, work):
            yield Idle(at_ns, at_ns + ns, cause, segment)
            at_ns += ns


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
    """Idle time that is still to be charged to one thing that the host did."""

    segment: HostSegment
    ns: int
    #: How far ahead of the device the host was before it.
    lead_ns: int


class _Debts:
    """What the host did since it last had its lead, and has not been charged for."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        self._segments = host_segments(trace)
        self._next = 0
        self._owed: deque[_Debt] = deque()
        self._starts, self._ends = _work_by_call(trace)
        #: When the device has finished what was launched so far.
        self._done_ns = trace.start_ns

    def charge(
        self, start_ns: int, end_ns: int, work: Work | None
    ) -> Iterator[tuple[Cause, HostSegment | None, int]]:
        """Who pays for a gap: (cause, what the host did, nanoseconds)."""
        calls, left_ns = self._trace.calls, end_ns - start_ns
        call = calls[work.call] if work is not None and work.call is not None else None
        self._look_up_to(end_ns if call is None else min(end_ns, max(start_ns, call.start_ns)))
        if call is not None and call.end_ns <= start_ns:
            # It was launched in time: the device itself was late.
            if left_ns > _LAUNCH_LATENCY_NS:
                yield "unattributed", None, left_ns
            elif left_ns <= _NEXT_KERNEL_NS and start_ns - call.end_ns >= _LAUNCH_LATENCY_NS:
                yield "computing", None, left_ns
            else:
                yield "launch", None, left_ns
            return
        late_ns = 0
        if call is not None and end_ns - call.end_ns > _LATE_START_NS:
            late_ns = end_ns - call.end_ns  # again the device: the host had done its part
            left_ns -= late_ns
        while left_ns > 0 and self._owed:
            debt = self._owed[0]
            paid_ns = min(left_ns, debt.ns)
            yield debt.segment.cause, debt.segment, paid_ns
            left_ns -= paid_ns
            debt.ns -= paid_ns
            if debt.ns == 0:
                self._owed.popleft()
        if left_ns > 0:
            yield "launch" if calls else "unattributed", None, left_ns
        if late_ns > 0:
            yield "unattributed", None, late_ns

    def _look_up_to(self, at_ns: int) -> None:
        while self._next < len(self._segments):
            segment = self._segments[self._next]
            if segment.start_ns >= at_ns and segment.ns > 0:
                break
            self._next += 1
            self._look_at(segment)

    def _look_at(self, segment: HostSegment) -> None:
        lead_ns = max(0, self._done_ns - segment.start_ns)
        if segment.call is not None:
            if segment.call in self._starts:
                self._regain(self._starts[segment.call] - segment.end_ns)
                self._done_ns = max(self._done_ns, self._ends[segment.call])
            is_wait = self._trace.calls[segment.call].kind in ("wait", "copy")
            if is_wait and lead_ns > 0 and not self._ends_copy(segment.call):
                self._owed.clear()  # an earlier host would have waited longer
        if segment.cause != "launch" and segment.ns > 0:
            self._owed.append(_Debt(segment, segment.ns, lead_ns))

    def _ends_copy(self, call: int) -> bool:
        """Whether this is the wait with which a blocking copy ends: without the copy, there would
        be none."""
        calls = self._trace.calls
        return calls[call].kind == "wait" and call > 0 and calls[call - 1].kind == "copy"

    def _regain(self, lead_ns: int) -> None:
        """The host is ahead by this much."""
        if lead_ns > _LAUNCH_LATENCY_NS:
            self._owed = deque(debt for debt in self._owed if debt.lead_ns > lead_ns)


def _work_by_call(trace: StepTrace) -> tuple[dict[int, int], dict[int, int]]:
    """When the work of each call began and ended; of a graph, its first and last kernel."""
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for one in trace.work:
        if one.call is not None:
            starts.setdefault(one.call, one.start_ns)
            ends[one.call] = max(one.end_ns, ends.get(one.call, 0))
    return starts, ends
