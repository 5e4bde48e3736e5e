"""Some steps as the profiler saw them: what the host called, what the device ran, and when.

`StepTrace` is what `breakdown` and `what_if` read. `read_trace` makes one from the profiler's
trace file. Times are whole nanoseconds of one clock.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from headrace.diagnosis.torch_calls import TorchCall, TorchCallKind

#: What the device runs. A copy is one between host and device; copies on the device are kernels.
WorkKind = Literal["kernel", "copy", "communication"]
#: What the host does in a call of the driver: launch work, wait for the device, copy from memory
#: that is not pinned (which blocks), or allocate and free memory.
CallKind = Literal["launch", "wait", "copy", "memory"]

_BLOCKING_COPIES = (
    *("cudaMemcpy", "cudaMemcpy2D", "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2"),
    "cudaMemcpyWithStream",  # of ROCm
)
_LAUNCHES = ("Launch", "MemcpyAsync", "MemsetAsync", "Memset")
_MEMORY = (
    *("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaHostRegister", "cuMemAlloc", "cuMemFree"),
    *("cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemRelease", "cuMemSetAccess"),
)
_COMMUNICATION = ("nccl", "rccl", "c10d")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cuda_runtime", "cuda_driver")
#: A copy from pageable memory that takes the host longer than this has blocked it. One to pageable
#: memory always does.
_BLOCKING_COPY_NS = 30_000


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the driver by the host."""

    start_ns: int
    end_ns: int
    kind: CallKind
    name: str = ""
    #: The thread that called.
    thread: int | str = 0


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel or copy. `call` is the position of the call that launched it, if known."""

    start_ns: int
    end_ns: int
    kind: WorkKind = "kernel"
    stream: int = 0
    call: int | None = None
    name: str = ""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class StepTrace:
    """`steps` steps, from an idle device at `start_ns` to an idle device at `end_ns`.

    `calls` are those of the thread that trains and of the autograd threads that launch for it, in
    order and without overlap: at each moment the host does one thing. `inputs` are the times in
    which the host waited for the loader. `torch_calls` are those in which it was in a module, in
    backward or in an optimizer, in order. `marks` are the ends of the steps on the host.
    """

    start_ns: int
    end_ns: int
    marks: tuple[int, ...]
    calls: tuple[Call, ...]
    work: tuple[Work, ...]
    inputs: tuple[tuple[int, int], ...] = ()
    torch_calls: tuple[TorchCall, ...] = ()
    #: What was added to times of the host's clock.
    shift_ns: int = 0

    @property
    def steps(self) -> int:
        return max(1, len(self.marks))

    @property
    def step_ms(self) -> float:
        return (self.end_ns - self.start_ns) / self.steps / 1e6

    def steady_start(self) -> tuple[int, int]:
        """When the device had finished the first step, and how many steps follow. The first step
        begins on an idle device, which no other step does. From here to `end_ns`, the device
        finishes one step after the other."""
        first = [one.end_ns for one in self.work if self._is_of_first_step(one)]
        if self.steps == 1 or not first or max(first) >= self.end_ns:
            return self.start_ns, self.steps
        return max(first), self.steps - 1

    def _is_of_first_step(self, work: Work) -> bool:
        return work.call is not None and self.calls[work.call].start_ns < self.marks[0]

    def launches_per_step(self) -> float:
        return sum(call.kind == "launch" for call in self.calls) / self.steps

    def step_of(self, at_ns: int) -> int:
        """The number of the step in which the host was at a moment."""
        return sum(mark <= at_ns for mark in self.marks[:-1])


def read_trace(
    content: Mapping[str, Any],
    waits: Sequence[tuple[int, int]],
    marks: Sequence[int],
    inputs: Iterable[tuple[int, int]],
    torch_calls: Iterable[TorchCall] = (),
) -> StepTrace | None:
    """The steps in a trace file of PyTorch's profiler.

    The thread that trains must have waited for an idle device before the first step, a few times;
    `waits` says when these began and ended by the host's clock, which relates the two clocks.
    `marks`, `inputs` and `torch_calls` are by the host's clock. None if the trace lacks those
    waits, or shows no work: then the profiler records nothing here.
    """
    events = [event for event in content.get("traceEvents", ()) if event.get("ph") == "X"]
    host = sorted((event for event in events if event.get("cat") in _ON_HOST), key=_start_ns)
    device = [event for event in events if event.get("cat") in _ON_DEVICE]
    before_work = _waits_before_work(host)
    if not before_work or not device or not marks:
        return None
    waits = waits[-len(before_work) :]
    found = _matching(before_work, waits)
    shift_ns = _shift_ns(found, waits)
    moved = tuple((begin + shift_ns, end + shift_ns) for begin, end in inputs)
    inside = tuple(
        one._replace(start_ns=one.start_ns + shift_ns, end_ns=one.end_ns + shift_ns)
        for one in sorted(torch_calls)
    )
    trace = steps_between(
        host,
        device,
        found[-1].get("tid"),
        _end_ns(found[-1]),
        tuple(mark + shift_ns for mark in marks),
        moved,
        inside,
    )
    return None if trace is None else replace(trace, shift_ns=shift_ns)


def steps_between(
    host: list[Any],
    device: list[Any],
    thread: Any,
    start_ns: int,
    marks: tuple[int, ...],
    inputs: tuple[tuple[int, int], ...] = (),
    torch_calls: tuple[TorchCall, ...] = (),
) -> StepTrace | None:
    """The steps from `start_ns` to the last of `marks`; None if the device ran nothing in them.

    `host` are the calls of the driver, in order, and `device` what the device ran; `thread` trains.
    The steps end when the device has done what was launched in them.
    """
    end_ns = marks[-1]
    positions, calls = _calls(host, device, thread, start_ns, end_ns)
    # A script may do more after its last step, before it ends.
    launched_later = {_correlation(event) for event in host if _start_ns(event) >= end_ns}
    work = [
        _work(event, positions)
        for event in device
        if _start_ns(event) >= start_ns and _correlation(event) not in launched_later
    ]
    if not work:
        return None
    work.sort(key=lambda one: (one.start_ns, one.end_ns))
    end_ns = max(end_ns, max(one.end_ns for one in work))
    return StepTrace(start_ns, end_ns, marks, calls, tuple(work), inputs, torch_calls)


def _work(event: Mapping[str, Any], positions: Mapping[Any, int]) -> Work:
    return Work(
        _start_ns(event),
        _end_ns(event),
        _work_kind(event),
        int(event.get("args", {}).get("stream", 0)),
        positions.get(_correlation(event)),
        event["name"],
        int(event.get("args", {}).get("bytes", 0)),
    )


def _correlation(event: Mapping[str, Any]) -> Any:
    """What a call of the driver and the work that it launched have in common."""
    return event.get("args", {}).get("correlation")


def _waits_before_work(host: list[Any]) -> list[Any]:
    """The waits for an idle device of the first thread that has one, before it launches."""
    found: list[Any] = []
    for event in host:
        if found and event.get("tid") != found[0].get("tid"):
            continue
        if event["name"] == "cudaDeviceSynchronize":
            found.append(event)
        elif found and any(word in event["name"] for word in _LAUNCHES):
            break
    return found


def _matching(found: list[Any], waits: Sequence[tuple[int, int]]) -> list[Any]:
    """The events that are `waits`. The profiler may have waited before them, and the script may
    after them. Between the right ones, as much time has passed by both clocks."""
    count = len(waits)
    runs = [found[first : first + count] for first in range(len(found) - count + 1)]
    return min(runs, key=lambda run: _spread_ns(run, waits))


def _spread_ns(found: list[Any], waits: Sequence[tuple[int, int]]) -> int:
    shifts = [_middle_ns(event) - sum(wait) // 2 for event, wait in zip(found, waits, strict=True)]
    last = shifts[len(shifts) // 2 :]  # the profiler is slow at the first calls
    return max(last) - min(last)


def _shift_ns(found: list[Any], waits: Sequence[tuple[int, int]]) -> int:
    """What to add to the host's clock, by the shortest wait: the profiler may delay a wait by
    milliseconds, before or after the time that it records."""
    pairs = list(zip(found, waits, strict=True))
    event, wait = min(pairs, key=lambda pair: pair[1][1] - pair[1][0])
    return _middle_ns(event) - sum(wait) // 2


def _middle_ns(event: Mapping[str, Any]) -> int:
    return (_start_ns(event) + _end_ns(event)) // 2


def _calls(
    host: list[Any], device: list[Any], thread: Any, start_ns: int, end_ns: int
) -> tuple[dict[Any, int], tuple[Call, ...]]:
    """The calls of the threads that train, and the position of each by its correlation id. These
    are `thread` and those that launch kernels, as autograd's threads do."""
    copies = {
        _correlation(event): event["name"].lower()
        for event in device
        if event.get("cat") == "gpu_memcpy" and "pageable" in event["name"].lower()
    }
    launching = {event.get("tid") for event in host if "Launch" in event["name"]}
    threads = {thread, *launching}
    positions: dict[Any, int] = {}
    calls: list[Call] = []
    free_ns = start_ns
    for event in host:
        begin, end = _start_ns(event), _end_ns(event)
        correlation = _correlation(event)
        blocking = copies.get(correlation, "")
        if "htod" in blocking and end - begin <= _BLOCKING_COPY_NS:
            blocking = ""
        kind = _call_kind(event["name"], blocking)
        if kind is None or event.get("tid") not in threads or not start_ns <= begin < end_ns:
            continue
        # Two threads may call at once: at each moment the host does one thing.
        begin, end = max(begin, free_ns), max(end, free_ns)
        free_ns = end
        positions[correlation] = len(calls)
        calls.append(Call(begin, end, kind, event["name"], event.get("tid", 0)))
    return positions, tuple(calls)


def _call_kind(name: str, blocking: str) -> CallKind | None:
    """`blocking` is the name of a copy that blocked the host, in lower case. A copy to the host
    waits for the work before it: it is a wait."""
    if any(word in name for word in _LAUNCHES):
        return "launch" if not blocking else "copy" if "htod" in blocking else "wait"
    if "Synchronize" in name or name in _BLOCKING_COPIES:
        return "copy" if "htod" in blocking else "wait"
    if name.startswith(_MEMORY):
        return "memory"
    return None


def _work_kind(event: Mapping[str, Any]) -> WorkKind:
    name = event["name"].lower()
    if event.get("cat") == "gpu_memcpy" and "dtod" not in name:
        return "copy"
    return "communication" if name.startswith(_COMMUNICATION) else "kernel"


def _start_ns(event: Mapping[str, Any]) -> int:
    return round(float(event["ts"]) * 1000)


def _end_ns(event: Mapping[str, Any]) -> int:
    return round((float(event["ts"]) + float(event.get("dur", 0))) * 1000)


# --- what the host did ----------------------------------------------------------------------------

HostCause = Literal["input", "synchronization", "transfer", "host", "launch"]

_CAUSES: dict[CallKind, HostCause] = {
    "launch": "launch",
    "wait": "synchronization",
    "copy": "transfer",
    "memory": "synchronization",
}
#: Python between two calls counts as launching unless it takes longer than this, and than five
#: times the median, up to a limit: of few calls, the median says little. PyTorch's own code takes
#: longer: in modules it is mixed with the script's; what an optimizer does before its first launch
#: took up to 8 ms on an H200's host. In backward and in optimizers the script's own code is rare:
#: hooks, autograd functions, optimizers written by hand.
_LONG_PYTHON_NS: dict[TorchCallKind | None, int] = {
    None: 150_000,
    "forward": 1_000_000,
    "backward": 10_000_000,
    "optimizer": 10_000_000,
}
_MAX_USUAL_NS = 1_000_000


@dataclass(frozen=True, slots=True)
class HostSegment:
    """What the host did for some time. `call` is the position of the driver's call that it was in,
    if any. `inside` is where its Python code ran, if not in the script's own loop."""

    start_ns: int
    end_ns: int
    cause: HostCause
    call: int | None = None
    inside: TorchCallKind | None = None

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns


def host_segments(trace: StepTrace) -> list[HostSegment]:
    """The host's time from the trace's start to its end, without gaps and without overlap."""
    busy = [
        HostSegment(call.start_ns, call.end_ns, _CAUSES[call.kind], position)
        for position, call in enumerate(trace.calls)
    ]
    busy += [HostSegment(start, end, "input") for start, end in trace.inputs]
    busy.sort(key=lambda one: (one.start_ns, one.end_ns))
    found: list[HostSegment] = []
    at_ns = trace.start_ns
    for one in busy:
        start, end = max(one.start_ns, at_ns), min(max(one.end_ns, at_ns), trace.end_ns)
        start = min(start, trace.end_ns)
        if start > at_ns:
            found.append(HostSegment(at_ns, start, "host"))
        if end > start or one.call is not None:
            found.append(HostSegment(start, max(start, end), one.cause, one.call))
        at_ns = max(at_ns, end)
    if at_ns < trace.end_ns:
        found.append(HostSegment(at_ns, trace.end_ns, "host"))
    between = [one.ns for one in found if one.cause == "host"]
    usual_ns = min(5 * int(statistics.median(between)), _MAX_USUAL_NS) if between else 0
    pieces = _cut(found, _launching(trace))
    return [_short_python_is_launching(one, usual_ns) for one in pieces]


def _launching(trace: StepTrace) -> list[TorchCall]:
    """The calls of modules, backward and optimizers, without modules that launched nothing: those
    are transforms, or metrics on the host."""
    launches = [call.start_ns for call in trace.calls if call.kind == "launch"]
    return [
        one
        for one in trace.torch_calls
        if one.kind != "forward"
        or bisect_left(launches, one.start_ns) < bisect_left(launches, one.end_ns)
    ]


def _cut(segments: list[HostSegment], torch_calls: list[TorchCall]) -> Iterator[HostSegment]:
    """The segments, with Python cut where a call of a module, of backward or of an optimizer begins
    and ends."""
    first = 0
    for segment in segments:
        if segment.cause != "host":
            yield segment
            continue
        at_ns = segment.start_ns
        while first < len(torch_calls) and torch_calls[first].end_ns <= at_ns:
            first += 1
        for at in range(first, len(torch_calls)):
            call = torch_calls[at]
            start, end = max(call.start_ns, at_ns), min(call.end_ns, segment.end_ns)
            if start >= segment.end_ns:
                break
            if start > at_ns:
                yield HostSegment(at_ns, start, "host")
            if end > start:
                yield HostSegment(start, end, "host", inside=call.kind)
                at_ns = end
        if segment.end_ns > at_ns:
            yield HostSegment(at_ns, segment.end_ns, "host")


def _short_python_is_launching(segment: HostSegment, usual_ns: int) -> HostSegment:
    """`usual_ns` is how long Python between two calls may always take."""
    limit_ns = max(_LONG_PYTHON_NS[segment.inside], usual_ns)
    is_short = segment.cause == "host" and segment.ns <= limit_ns
    return replace(segment, cause="launch") if is_short else segment
