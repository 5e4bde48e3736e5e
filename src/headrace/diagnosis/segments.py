"""Steps cut into segments, and how long the device works on each, without a profiler.

A segment begins where a module, backward, an optimizer or a copy begins or ends, and after each
host wait. `HostEdges` notes when. `DeviceEdges` then has the device stay busy at the start of each
segment until the host has launched all of it: so the time between two events around the segment is
what its work takes, without the time in which the device waits for launches.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from time import perf_counter_ns
from types import FrameType
from typing import Any, NamedTuple

import torch

from headrace.device import Device, Event, cuda_namespace
from headrace.diagnosis.waits import watch_moments
from headrace.replacing import replaced
from headrace.source_lines import HEADRACE

#: How a segment is called: what it begins with, and how many such ones came before it in its step.
Key = tuple[str, int]

WAIT, PAGEABLE_COPY, PINNED_COPY, GRAPH = "wait", "pageable copy", "pinned copy", "graph"
#: How much longer the device stays busy than the host needed for a segment.
_MARGIN, _MARGIN_NS = 1.5, 100_000
_UNKNOWN_NS = 1_000_000
_MAX_DELAY_NS = 300_000_000
#: The driver takes a copy of so much memory that is not pinned, and the host goes on.
_STAGED_BYTES = 65_536
_OWN_FILES = (str(HEADRACE), warnings.__file__, threading.__file__)


class Edges(ABC):
    """Is told where segments begin, in the thread that made it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._counts: Counter[str] = Counter()

    def edge(self, kind: str) -> None:
        """A segment begins, and the one before it ends."""
        if self._is_watched():
            self._begin(self._key(kind))

    def pause(self, kind: str = WAIT) -> None:
        """The host begins to wait; what it launches afterwards belongs to the same segment."""
        if self._is_watched():
            self._pause(self._key(kind))

    def pause_hidden(self) -> None:
        """The host is about to wait inside an operation: nobody will say when it is over."""
        if self._is_watched():
            self._pause(self._key(WAIT))
            self._after_hidden()

    def resume(self) -> None:
        """The host has waited."""
        if self._is_watched():
            self._resume()

    def end_step(self) -> None:
        self._counts.clear()
        self.edge("step")

    def _key(self, kind: str) -> Key:
        self._counts[kind] += 1
        return kind, self._counts[kind] - 1

    def _is_watched(self) -> bool:
        return threading.get_ident() == self._thread and not self._device.is_capturing()

    @abstractmethod
    def _begin(self, key: Key) -> None: ...

    @abstractmethod
    def _pause(self, key: Key) -> None: ...

    @abstractmethod
    def _resume(self) -> None: ...

    @abstractmethod
    def _after_hidden(self) -> None:
        """A hidden wait follows."""


class Edge(NamedTuple):
    """When a segment began."""

    at_ns: int
    key: Key


class HostEdges(Edges):
    """Notes when segments began and the host waited, by `time.perf_counter_ns`. The end of a hidden
    wait is not known: it is 0."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.edges: list[Edge] = []
        self.waits: list[tuple[int, int]] = []

    def _begin(self, key: Key) -> None:
        self.edges.append(Edge(perf_counter_ns(), key))

    def _pause(self, key: Key) -> None:
        self._begin(key)
        if key[0] == WAIT:
            self.waits.append((self.edges[-1].at_ns, 0))

    def _resume(self) -> None:
        if self.waits and self.edges and self.edges[-1].key[0] == WAIT:
            self.waits[-1] = self.waits[-1][0], perf_counter_ns()

    def _after_hidden(self) -> None:
        """The operators know when it ended."""


def delays(edges: Sequence[Edge]) -> dict[Key, int]:
    """How long the device must be busy for the host to launch each segment meanwhile."""
    longest: dict[Key, int] = {}
    for edge, after in pairwise(edges):
        ns = round((after.at_ns - edge.at_ns) * _MARGIN) + _MARGIN_NS
        longest[edge.key] = min(_MAX_DELAY_NS, max(ns, longest.get(edge.key, 0)))
    return longest


class _Segment(NamedTuple):
    """What the device did between two events. `is_dense`: whether it had been given all of that
    before it began."""

    begins: Event
    ends: Event
    is_dense: bool


class DeviceEdges(Edges):
    """Measures what the device's work on each segment takes."""

    def __init__(self, device: Device, delays: Mapping[Key, int]) -> None:
        super().__init__(device)
        self._delays = delays
        self._open: tuple[Key, Event] | None = None
        self._paused: Key | None = None
        self._segments: defaultdict[Key, list[_Segment]] = defaultdict(list)

    def work_ns(self) -> dict[Key, float]:
        """Nanoseconds of each segment's work, on an idle device. The mean of those segments that
        were launched in time; if there is none, the shortest."""
        self._open = None  # a segment that has not ended
        nothing_ns = self._nothing_ns()
        found: dict[Key, float] = {}
        for key, segments in self._segments.items():
            dense = [_ns(one) for one in segments if one.is_dense]
            ns = statistics.fmean(dense) if dense else min(map(_ns, segments))
            found[key] = max(0.0, ns - nothing_ns)
        return found

    def late_share(self) -> float:
        """The share of the segments that were not launched in time."""
        all_segments = [one for segments in self._segments.values() for one in segments]
        return statistics.fmean(not one.is_dense for one in all_segments) if all_segments else 0.0

    def _nothing_ns(self) -> float:
        """What two events take that have nothing between them."""
        for _ in range(8):
            self._start(("nothing", 0))
            self._close()
        self._open = None
        self._device.synchronize("diagnose")
        return statistics.median(map(_ns, self._segments.pop(("nothing", 0))))

    def _begin(self, key: Key) -> None:
        self._close()
        self._start(key)

    def _pause(self, key: Key) -> None:
        self._close()
        self._open, self._paused = None, key

    def _resume(self) -> None:
        if self._open is None and self._paused is not None:
            self._start(self._paused)

    def _after_hidden(self) -> None:
        at_next_line(self.resume)

    def _close(self) -> None:
        if self._open is None:
            return
        key, begins = self._open
        ends, is_dense = self._device.event(timing=True), not begins.query()
        ends.record()
        self._segments[key].append(_Segment(begins, ends, is_dense))

    def _start(self, key: Key) -> None:
        begins = self._device.event(timing=True)
        self._device.delay(self._delays.get(key, _UNKNOWN_NS))
        begins.record()
        self._open, self._paused = (key, begins), None


def _ns(segment: _Segment) -> float:
    return segment.begins.elapsed_ms(segment.ends) * 1e6


def at_next_line(then: Callable[[], object]) -> None:
    """Call `then` when the code of this thread outside Headrace comes to its next line. It does
    nothing for a thread that runs no such code."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OWN_FILES):
            frames.append(frame)
        frame = frame.f_back
    before = sys.gettrace()
    traces = [frame.f_trace for frame in frames]

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename.startswith(_OWN_FILES):
            return None
        sys.settrace(before)
        for one, trace in zip(frames, traces, strict=True):
            one.f_trace = trace
        then()
        return None

    for frame in frames:
        frame.f_trace = look
    sys.settrace(look)


@contextmanager
def watching_edges(edges: Edges) -> Iterator[None]:
    """Tell `edges` of host waits, of copies to the device, and of graphs inside the block."""
    cuda: Any = cuda_namespace()
    with ExitStack() as stack:
        stack.enter_context(watch_moments(edges.pause, edges.resume, edges.pause_hidden))
        for name in ("to", "cuda", "copy_"):
            call = _around_copy(getattr(torch.Tensor, name), name == "copy_", edges)
            stack.enter_context(replaced(torch.Tensor, name, call))
        replay = cuda.CUDAGraph.replay
        stack.enter_context(replaced(cuda.CUDAGraph, "replay", _around_replay(replay, edges)))
        yield


def _around_copy(
    original: Callable[..., Any], is_into_self: bool, edges: Edges
) -> Callable[..., Any]:
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        source, target = (args[0] if args else None, self) if is_into_self else (self, None)
        if not (isinstance(source, torch.Tensor) and source.is_cpu):
            return original(self, *args, **kwargs)
        wanted = (target,) if is_into_self else (*args[:1], *kwargs.values())
        if not (original.__name__ == "cuda" or any(map(_is_on_device, wanted))):
            return original(self, *args, **kwargs)
        is_ahead = source.nbytes <= _STAGED_BYTES or source.is_pinned()
        edges.edge(PINNED_COPY if is_ahead else PAGEABLE_COPY)
        try:
            return original(self, *args, **kwargs)
        finally:
            edges.edge("after copy")

    return call


def _is_on_device(target: object) -> bool:
    """Whether an argument of `to` names a device other than the host, or is a tensor there."""
    if isinstance(target, torch.Tensor):
        return not target.is_cpu
    if isinstance(target, torch.device):
        return target.type != "cpu"
    if isinstance(target, str):
        return not target.startswith("cpu")
    return isinstance(target, int) and not isinstance(target, bool)


def _around_replay(replay: Callable[..., Any], edges: Edges) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        edges.edge(GRAPH)
        try:
            return replay(self, *args, **kwargs)
        finally:
            edges.edge("after graph")

    return call
