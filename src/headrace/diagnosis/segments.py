"""Steps cut into segments, and how long the device works on each, without a profiler.

A segment begins where a module, backward, an optimizer or a copy begins or ends, and after each
host wait. `HostEdges` notes when. `DeviceEdges` then has the device stay busy at the start of each
segment until the host has launched all of it: so the time between two events around the segment is
what its work takes, without the time in which the device waits for launches.
"""

from __future__ import annotations

import os
import statistics
import threading
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Mapping
from time import perf_counter_ns
from typing import Any, NamedTuple

from headrace.device import Device, Event, cuda_namespace

#: How a segment is called: what it begins with, and how many such ones came before it in its step.
Key = tuple[str, int]

WAIT, GRAPH, COMMUNICATION = "wait", "graph", "communication"
PAGEABLE_COPY, PINNED_COPY, TO_HOST = "pageable copy", "pinned copy", "copy to host"
#: How long the device stays busy before a segment of which nothing is known.
_UNKNOWN_NS = 1_000_000


class Edges(ABC):
    """Is told where segments begin, in the thread and on the stream on which it was made."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._stream = _current_stream()
        self._counts: Counter[str] = Counter()

    def edge(self, kind: str, *, from_autograd: bool = False) -> None:
        """A segment begins, and the one before it ends. Autograd's thread may say so while the
        thread that trains waits for it."""
        if self._is_watched(from_autograd):
            self._begin(self._key(kind))

    def pause(self, kind: str = WAIT) -> None:
        """The host begins to wait; what it launches afterwards belongs to the same segment."""
        if self._is_watched():
            self._pause(self._key(kind))

    def waited(self) -> None:
        """The host has waited inside an operation, which nobody had announced."""
        if self._is_watched():
            self._waited(self._key(WAIT))

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

    def _is_watched(self, from_autograd: bool = False) -> bool:
        is_this = from_autograd or threading.get_ident() == self._thread
        return is_this and not self._device.is_capturing() and _current_stream() == self._stream

    @abstractmethod
    def _begin(self, key: Key) -> None: ...

    @abstractmethod
    def _pause(self, key: Key) -> None: ...

    @abstractmethod
    def _resume(self) -> None: ...

    @abstractmethod
    def _waited(self, key: Key) -> None: ...


def _current_stream() -> Any:
    cuda: Any = cuda_namespace()
    return cuda.current_stream() if cuda.is_initialized() else None


class Edge(NamedTuple):
    """When a segment began."""

    at_ns: int
    key: Key


class HostEdges(Edges):
    """Notes when segments began and the host waited, by `time.perf_counter_ns`. Of waits inside an
    operation, `waited_ns` has when the host went on.

    Events around communication tell how long it takes the device. It is measured here, where
    nothing delays a rank: in communication, each waits for the slowest."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.edges: list[Edge] = []
        self.waits: list[tuple[int, int]] = []
        self.waited_ns: list[int] = []
        self._communication: list[tuple[Key, Event, Event]] = []
        self._open: tuple[Key, Event] | None = None

    def communication_ns(self) -> dict[Key, float]:
        """Nanoseconds of each segment of communication, with waiting for other ranks. The device
        must be idle."""
        found: defaultdict[Key, list[float]] = defaultdict(list)
        for key, begins, ends in self._communication:
            found[key].append(begins.elapsed_ms(ends) * 1e6)
        return {key: statistics.fmean(ns) for key, ns in found.items()}

    def _begin(self, key: Key) -> None:
        if self._open is not None:
            ends, opened = self._device.event(timing=True), self._open
            ends.record()
            self._communication.append((*opened, ends))
            self._open = None
        if key[0] == COMMUNICATION:
            self._open = key, self._device.event(timing=True)
            self._open[1].record()
        self.edges.append(Edge(perf_counter_ns(), key))

    def _pause(self, key: Key) -> None:
        self._begin(key)
        if key[0] == WAIT:
            self.waits.append((self.edges[-1].at_ns, 0))

    def _resume(self) -> None:
        if self.waits and self.edges and self.edges[-1].key[0] == WAIT:
            self.waits[-1] = self.waits[-1][0], perf_counter_ns()

    def _waited(self, key: Key) -> None:
        self._begin(key)
        self.waited_ns.append(self.edges[-1].at_ns)


class _Segment(NamedTuple):
    """What the device did between two events. `is_dense`: whether it had been given all of that
    before it began. If it `ends_by_wait`, the host has waited for the end before it was noted."""

    begins: Event
    ends: Event
    is_dense: bool
    ends_by_wait: bool

    @property
    def ns(self) -> float:
        return self.begins.elapsed_ms(self.ends) * 1e6


class DeviceEdges(Edges):
    """Measures what the device's work on each segment takes, except communication."""

    def __init__(
        self, device: Device, delays: Mapping[Key, int], after_wait_ns: Mapping[Key, float]
    ) -> None:
        """`after_wait_ns` is how long the host needs to tell that a segment has ended by a wait."""
        super().__init__(device)
        self._delays, self._after_wait_ns = delays, after_wait_ns
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
            dense = [self._ns(key, one) for one in segments if one.is_dense]
            ns = statistics.fmean(dense) if dense else min(self._ns(key, one) for one in segments)
            found[key] = max(0.0, ns - nothing_ns)
        return found

    def _ns(self, key: Key, segment: _Segment) -> float:
        return segment.ns - (self._after_wait_ns.get(key, 0.0) if segment.ends_by_wait else 0.0)

    def late_share(self) -> float:
        """The share of the segments' time in those that were not launched in time. The device's
        queue is full after about a thousand launches."""
        all_segments = [one for segments in self._segments.values() for one in segments]
        late_ns = sum(one.ns for one in all_segments if not one.is_dense)
        return late_ns / (sum(one.ns for one in all_segments) or 1.0)

    def _nothing_ns(self) -> float:
        """What two events take that have nothing between them."""
        for _ in range(8):
            self._start(("nothing", 0))
            self._close()
        self._open = None
        self._device.synchronize("diagnose")
        return statistics.median(one.ns for one in self._segments.pop(("nothing", 0)))

    def _begin(self, key: Key) -> None:
        self._close()
        self._open = None
        if key[0] != COMMUNICATION:
            self._start(key)

    def _pause(self, key: Key) -> None:
        self._close()
        self._open, self._paused = None, key

    def _resume(self) -> None:
        if self._open is None and self._paused is not None:
            self._start(self._paused)

    def _waited(self, key: Key) -> None:
        self._close(ends_by_wait=True)
        self._start(key)

    def _close(self, *, ends_by_wait: bool = False) -> None:
        if self._open is None:
            return
        key, begins = self._open
        # After a wait, the device has done everything. It was kept busy for longer than the host
        # had needed with the wait. A copy from pageable memory waits without saying so.
        is_dense = ends_by_wait or key[0] == PAGEABLE_COPY or not begins.query()
        ends = self._device.event(timing=True)
        ends.record()
        self._segments[key].append(_Segment(begins, ends, is_dense, ends_by_wait))

    def _start(self, key: Key) -> None:
        begins = self._device.event(timing=True)
        self._device.delay(self._delays.get(key, _UNKNOWN_NS))
        begins.record()
        self._open, self._paused = (key, begins), None
