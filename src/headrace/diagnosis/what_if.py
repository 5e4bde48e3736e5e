"""What a step would take if the script were changed, from a trace of the script as it is.

The host's calls and the device's work are replayed with their dependencies: work starts after its
launch and after the work before it on its stream, and a wait ends after the work that it waited
for. A change takes waits, loading, copies or launches out and replays the rest. If a replay without
changes does not give the traced time, the trace misses something, and nothing is predicted.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from headrace.diagnosis.trace import HostSegment, StepTrace, host_segments

#: How far a replay without changes may be from the traced time.
MAX_ERROR = 0.03
#: How many launches the driver queues before a further one blocks. A slow launch may have been
#: blocked if at least half as many were queued: the trace does not show when some of them ended.
_QUEUE = 1000
#: Times at which work waits for work on another stream: it starts this soon after it.
_EDGE_NS = 15_000
#: How much longer a step's graph takes than its kernels run. Per kernel: the median gap in the
#: timelines of graphs in benchmarks/results/2026-11-15-h200-bench-*.json. Per replay: what is left
#: in 2026-11-16-h200-works.json.
_GRAPH_GAP_NS = 400
_GRAPH_START_NS = 150_000
#: What the host needs to launch a graph, about.
_GRAPH_LAUNCH_NS = 60_000
#: Bytes per nanosecond from pinned memory, if the trace has no such copy: what PCIe 4 does.
_PINNED_BYTES_PER_NS = 24.0
_LARGE_COPY = 1_000_000
#: How much faster and slower than in the trace the host may be without the profiler, and how
#: exactly that is found out.
_HOST_SHARES = 0.4, 1.6
_SHARE_STEP = 0.01


@dataclass(frozen=True, slots=True)
class Change:
    """What is different from the script as it is.

    `without` are positions of waiting calls that go; `no_waits` takes all of them. With
    `overlap_copies`, copies run on a stream of their own and block nobody. With `one_graph`, a step
    is one launch, and the Python code of model, backward and optimizer does not run. `load_share`
    is what is left of the time spent on loading, `python_share` of that spent in long stretches of
    Python.
    """

    without: frozenset[int] = frozenset()
    no_waits: bool = False
    overlap_copies: bool = False
    one_graph: bool = False
    load_share: float = 1.0
    python_share: float = 1.0


PIPELINE = Change(no_waits=True, overlap_copies=True)
GRAPH = Change(no_waits=True, overlap_copies=True, one_graph=True)
#: `headrace run`: the script waits where it did, but not for copies to the device.
RUN = Change(overlap_copies=True, one_graph=True)
NO_WAITS = Change(no_waits=True)
INSTANT_LOADER = Change(load_share=0.0)
NO_PYTHON = Change(python_share=0.0)


@dataclass(slots=True)
class _Work:
    stream: int
    ns: int
    is_copy: bool
    #: From its launch, if the device was free.
    latency_ns: int = 0
    #: Work on other streams that it waits for, by position.
    after: tuple[int, ...] = ()
    #: How long the host takes to launch it.
    launch_ns: int = 0
    #: Between the work before it and this, if the device did not have to wait for the launch.
    gap_ns: int = 0
    #: How long a copy takes from pinned memory.
    pinned_ns: int = 0
    #: Whether it copies to the host.
    to_host: bool = False


@dataclass(slots=True)
class _Operation:
    """Something that the host does: it takes `ns`, launches `work`, and waits for `waits_for`."""

    ns: int
    cause: str
    call: int | None = None
    work: list[int] = field(default_factory=list)
    waits_for: tuple[int, ...] = ()
    wake_ns: int = 0
    ends_step: bool = False
    #: Whether it is Python that a captured step does not run.
    is_captured: bool = False


class Replay:
    """A trace that can be run again, with changes.

    `step_ms` is what a step takes without the profiler. The device's times are the same there; the
    host's are scaled until a replay takes as long. The profiler only slows launches down, so to
    make a step shorter, only they are scaled. `loading_ms` is what the loader needs for a step's
    batches: no step is shorter, unless the loader changes.
    """

    def __init__(
        self, trace: StepTrace, step_ms: float | None = None, loading_ms: float = 0.0
    ) -> None:
        self._trace, self._loading_ms = trace, loading_ms
        self._work: list[_Work] = []
        self._operations: list[_Operation] = []
        self._ends = sorted((one.end_ns, at) for at, one in enumerate(trace.work))
        self._launched_by = sorted(one.call or 0 for one in trace.work)
        self._streams = len({one.stream for one in trace.work})
        self._build()
        self._host_share = 1.0
        self.traced_ms = trace.step_ms
        first, both = self._run(Change())
        self.replayed_ms = first / trace.steps / 1e6
        self._steady_ms = (both - first) / trace.steps / 1e6
        if step_ms is not None and self.holds:
            self._calibrate(step_ms)

    @property
    def error(self) -> float:
        """How far the replay without changes is from the traced time, as a share of it."""
        return abs(self.replayed_ms / self.traced_ms - 1.0) if self.traced_ms > 0 else 1.0

    @property
    def holds(self) -> bool:
        return self.error <= MAX_ERROR

    def speedup_with_workers(self, workers: int) -> float:
        """The same with a loader of `workers` processes: each step then takes what it takes without
        loading, or what the processes need for a batch."""
        load_ns = sum(one.ns for one in self._operations if one.cause == "input")
        load_ms = load_ns / self._trace.steps / 1e6
        return max(
            1.0, self._steady_ms / max(self._steady(INSTANT_LOADER), load_ms / workers, 1e-9)
        )

    def speedup(self, change: Change) -> float:
        """How many times as fast the changed script would be; at least 1, since taking things out
        makes nothing slower."""
        least_ms = self._loading_ms if change.load_share else 0.0
        return max(1.0, self._steady_ms / max(self._steady(change), least_ms, 1e-9))

    def is_limited_by_loader(self, change: Change) -> bool:
        """Whether the changed script would be faster if the loader were."""
        return self._steady(change) < min(self._loading_ms, self._steady_ms)

    # --- from the trace to a program ------------------------------------------------------------

    def _build(self) -> None:
        trace = self._trace
        launched: dict[int, list[int]] = {}
        for at, one in enumerate(trace.work):
            if one.call is not None:
                launched.setdefault(one.call, []).append(at)
        self._describe_work()
        usual_ns = _median(
            [call.end_ns - call.start_ns for call in trace.calls if call.kind == "launch"]
        )
        marks = iter(trace.marks)
        mark = next(marks, None)
        for segment in host_segments(trace):
            if segment.call is None and segment.start_ns >= trace.marks[-1]:
                continue  # after the last step the host only waits for the end
            while mark is not None and mark <= segment.start_ns and self._operations:
                self._operations[-1].ends_step = True
                mark = next(marks, None)
            self._append(self._operation(segment, launched, usual_ns))
        if self._operations:
            self._operations[-1].ends_step = True

    def _append(self, operation: _Operation) -> None:
        """Add an operation. Short Python before a launch becomes part of it: half as many
        operations to replay."""
        before = self._operations[-1] if self._operations else None
        if (
            before is not None
            and (before.cause, before.call, before.ends_step) == ("launch", None, False)
            and operation.cause == "launch"
        ):
            operation.ns += before.ns
            self._operations[-1] = operation
        else:
            self._operations.append(operation)

    def _operation(
        self, segment: HostSegment, launched: dict[int, list[int]], usual_ns: int
    ) -> _Operation:
        if segment.call is None:
            ns = min(segment.end_ns, self._trace.marks[-1]) - segment.start_ns
            return _Operation(ns, segment.cause, is_captured=segment.inside is not None)
        call = self._trace.calls[segment.call]
        operation = _Operation(segment.ns, call.kind, segment.call)
        operation.work = launched.get(segment.call, [])
        if call.kind == "launch":
            if segment.ns > 20 * usual_ns and self._queued(segment) > _QUEUE // 2:
                operation.ns = usual_ns  # the driver's queue was full: the replay has one, too
            for at in operation.work:
                self._work[at].launch_ns = operation.ns
        elif call.kind in ("wait", "copy"):
            operation.waits_for = self._waited_for(segment, operation.work)
            done_ns = max((self._trace.work[at].end_ns for at in operation.waits_for), default=0)
            if done_ns > segment.start_ns:
                operation.ns, operation.wake_ns = 0, segment.end_ns - done_ns
            else:
                operation.wake_ns = segment.ns  # nothing to wait for; in a replay there may be
        return operation

    def _queued(self, segment: HostSegment) -> int:
        """How much work was launched before a call and had not ended when it began."""
        ended = bisect_right(self._ends, (segment.start_ns, len(self._ends)))
        return bisect_left(self._launched_by, segment.call or 0) - ended

    def _waited_for(self, segment: HostSegment, own: list[int]) -> tuple[int, ...]:
        """The work that was launched before a call and had ended when it returned: the last of each
        stream."""
        found: dict[int, int] = {}
        work, calls = self._trace.work, self._trace.calls
        for at in reversed(self._ended_by(segment.end_ns)):
            one = work[at]
            before = one.call is not None and calls[one.call].start_ns < segment.start_ns
            if one.stream not in found and (before or at in own):
                found[one.stream] = at
                if len(found) == self._streams:
                    break
        return tuple(found.values())

    def _ended_by(self, end_ns: int) -> list[int]:
        """The last work that had ended by then, in order."""
        high = bisect_right(self._ends, (end_ns, len(self._ends)))
        return [at for _, at in self._ends[max(0, high - 64) : high]]

    def _describe_work(self) -> None:
        trace = self._trace
        pinned_rate = _pinned_bytes_per_ns(trace)
        free: dict[int, tuple[int, int]] = {}  # by stream: end and position of its last work
        latencies: list[int] = []
        gaps: list[int] = []
        bound_by_launch: list[bool] = []
        for at, one in enumerate(trace.work):
            described = _Work(one.stream, one.end_ns - one.start_ns, one.kind == "copy")
            described.pinned_ns = described.ns
            described.to_host = "dtoh" in one.name.lower()
            if one.nbytes and "pageable" in one.name.lower():
                described.pinned_ns = min(described.ns, round(one.nbytes / pinned_rate))
            before_ns = free.get(one.stream, (trace.start_ns, -1))[0]
            launch_ns = trace.start_ns if one.call is None else trace.calls[one.call].start_ns
            others = [
                position
                for stream, (end_ns, position) in free.items()
                if stream != one.stream and before_ns < end_ns <= one.start_ns <= end_ns + _EDGE_NS
            ]
            waited = one.start_ns - max(before_ns, launch_ns)
            if others and waited > _EDGE_NS:
                described.after = tuple(others)
            is_bound = launch_ns >= before_ns and not described.after
            bound_by_launch.append(is_bound)
            if is_bound:
                described.latency_ns = max(0, one.start_ns - launch_ns)
                latencies.append(described.latency_ns)
            elif not described.after:
                gaps.append(max(0, one.start_ns - before_ns))
                described.gap_ns = min(gaps[-1], _EDGE_NS)
            self._work.append(described)
            if one.end_ns >= before_ns:
                free[one.stream] = one.end_ns, at
        usual_ns, usual_gap_ns = _median(latencies), _median(gaps)
        for described, is_bound in zip(self._work, bound_by_launch, strict=True):
            if is_bound:
                described.gap_ns = min(usual_gap_ns, described.latency_ns)
            else:
                described.latency_ns = usual_ns

    # --- running it -----------------------------------------------------------------------------

    def _calibrate(self, step_ms: float) -> None:
        """Change the host's speed until a replay takes `step_ms`. If no speed does it, the host is
        not what the step waits for, and keeps its speed."""
        low, high = _HOST_SHARES
        if self._steady_ms > step_ms:
            high = 1.0
            is_possible = self._steady_at(low) <= step_ms
        else:
            low = 1.0
            is_possible = self._steady_at(high) >= step_ms
        if not is_possible:
            self._host_share = 1.0
            return
        while high - low > _SHARE_STEP:
            middle = (low + high) / 2
            if self._steady_at(middle) > step_ms:
                high = middle
            else:
                low = middle
        self._steady_ms = self._steady_at(low)

    def _steady_at(self, host_share: float) -> float:
        self._host_share = host_share
        return self._steady(Change())

    def _steady(self, change: Change) -> float:
        """Milliseconds per step once it runs: without the first round, which begins idle."""
        first, both = self._run(change)
        return (both - first) / self._trace.steps / 1e6

    def _run(self, change: Change) -> tuple[float, float]:
        """Replay the trace twice in a row. Returns when host and device have finished the first
        round, and both, in nanoseconds."""
        host = _Host(self._trace, self._work, change, self._host_share)
        finished = []
        for _ in range(2):
            host.begin_round()
            for operation in self._operations:
                host.do(operation)
            finished.append(host.finish())
        return finished[0], finished[1]


class _Host:
    """The host and the device's streams during a replay."""

    def __init__(
        self, trace: StepTrace, work: Sequence[_Work], change: Change, host_share: float
    ) -> None:
        self._trace, self._work, self._change = trace, work, change
        self._launch_share = host_share
        self._load_share = change.load_share * max(1.0, host_share)
        self._python_share = change.python_share * max(1.0, host_share)
        self._now = 0.0
        self._free: dict[int | str, float] = {}
        self._ends: dict[int, float] = {}
        self._begins: list[float] = []
        self._graph: list[int] = []

    def begin_round(self) -> None:
        """Work that was launched before the trace began runs first: in a graph, with the rest."""
        self._ends = {}
        earlier = [at for at, one in enumerate(self._trace.work) if one.call is None]
        if self._change.one_graph:
            self._record(earlier)
        else:
            self._launch(earlier)

    def do(self, operation: _Operation) -> None:
        change = self._change
        if operation.cause == "input":
            self._now += operation.ns * self._load_share
        elif change.one_graph and operation.is_captured:
            pass
        elif operation.cause == "host" and operation.call is None:
            self._now += operation.ns * self._python_share
        elif operation.cause in ("wait", "copy", "memory"):
            self._wait(operation)
        elif change.one_graph and operation.cause == "launch":
            self._record(operation.work)
        else:
            self._now += operation.ns * self._launch_share
            self._launch(operation.work)
        if operation.ends_step and change.one_graph:
            self._launch_graph()

    def finish(self) -> float:
        return max(self._now, *self._free.values(), 0.0) if self._free else self._now

    def _wait(self, operation: _Operation) -> None:
        change = self._change
        self._launch(operation.work)
        if change.no_waits or operation.call in change.without:
            return
        if change.overlap_copies and self._is_for_copies_in(operation):
            return
        self._now += operation.ns
        if change.one_graph and self._graph:  # the wait comes in the middle of the step
            self._launch_graph()
            self._now = max(self._now, self._free["graph"] + operation.wake_ns)
        done = [self._ends[at] for at in operation.waits_for if at in self._ends]
        if done:
            self._now = max(self._now, max(done) + operation.wake_ns)

    def _is_for_copies_in(self, operation: _Operation) -> bool:
        """Whether what the host waits for at last is a copy to the device."""
        last = max((*operation.work, *operation.waits_for), default=None)
        if last is None:
            return operation.cause == "copy"
        return self._work[last].is_copy and not self._work[last].to_host

    def _record(self, positions: Collection[int]) -> None:
        """A captured step runs no Python and launches nothing, except for its copies."""
        for at in positions:
            if self._work[at].is_copy:
                self._launch([at])
            else:
                self._graph.append(at)

    def _launch_graph(self) -> None:
        if not self._graph:
            return
        self._now += _GRAPH_LAUNCH_NS
        start = max(self._now, self._free.get("graph", 0.0)) + _GRAPH_START_NS
        self._free["graph"] = start + self._graph_ns()
        self._block_if_queue_is_full(start)
        self._graph = []

    def _graph_ns(self) -> int:
        """How long the recorded kernels take. Those that overlapped in the trace still do."""
        total_ns, end_ns = 0, 0
        for at in sorted(self._graph):
            one = self._trace.work[at]
            if one.start_ns >= end_ns:
                total_ns += one.end_ns - one.start_ns + _GRAPH_GAP_NS
            else:
                total_ns += max(0, one.end_ns - end_ns)
            end_ns = max(end_ns, one.end_ns)
        return total_ns

    def _launch(self, positions: Collection[int]) -> None:
        first_start: float | None = None
        first_traced = 0
        for at in positions:
            work = self._work[at]
            lane: int | str = work.stream
            if work.is_copy and self._change.overlap_copies:
                lane = "copies"
            if first_start is None:
                # Latencies count from the begin of a launch; the host is at its end.
                launched = self._now + work.latency_ns - work.launch_ns * self._launch_share
                free = self._free.get(lane, 0.0)
                start = max(launched, free + work.gap_ns if free else 0.0)
                start = max([start, *(self._ends[one] for one in work.after if one in self._ends)])
                first_start, first_traced = start, self._trace.work[at].start_ns
            else:  # of a graph: as far after its first kernel as in the trace
                start = first_start + (self._trace.work[at].start_ns - first_traced)
            end = start + (work.pinned_ns if lane == "copies" else work.ns)
            self._free[lane] = max(end, self._free.get(lane, 0.0))
            self._ends[at] = end
        if first_start is not None:
            self._block_if_queue_is_full(first_start)

    def _block_if_queue_is_full(self, start: float) -> None:
        self._begins.append(start)
        if len(self._begins) > _QUEUE:
            self._now = max(self._now, self._begins[-_QUEUE])


def _pinned_bytes_per_ns(trace: StepTrace) -> float:
    rates = [
        one.nbytes / (one.end_ns - one.start_ns)
        for one in trace.work
        if one.nbytes > _LARGE_COPY and "Pinned -> Device" in one.name
    ]
    return max(rates, default=_PINNED_BYTES_PER_NS)


def _median(values: list[int]) -> int:
    return int(statistics.median(values)) if values else 0
