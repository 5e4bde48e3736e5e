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
from collections.abc import Mapping, Sequence
from itertools import pairwise
from time import perf_counter_ns
from typing import NamedTuple

import torch

from headrace.device import Device, Event

#: How a segment is called: what it begins with, and how many such ones came before it in its step.
Key = tuple[str, int]

WAIT, GRAPH = "wait", "graph"
PAGEABLE_COPY, PINNED_COPY, TO_HOST = "pageable copy", "pinned copy", "copy to host"
#: How much longer the device stays busy than the host needed for a segment.
_MARGIN, _MARGIN_NS = 1.5, 100_000
_UNKNOWN_NS = 1_000_000
_MAX_DELAY_NS = 300_000_000
#: Events in turn that tell what the measuring itself takes.
_NOTHINGS = 8


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

    def _is_watched(self) -> bool:
        return threading.get_ident() == self._thread and not self._device.is_capturing()

    @abstractmethod
    def _begin(self, key: Key) -> None: ...

    @abstractmethod
    def _pause(self, key: Key) -> None: ...

    @abstractmethod
    def _resume(self) -> None: ...

    @abstractmethod
    def _waited(self, key: Key) -> None: ...


class Edge(NamedTuple):
    """When a segment began."""

    at_ns: int
    key: Key


class HostEdges(Edges):
    """Notes when segments began and the host waited, by `time.perf_counter_ns`. Of waits inside an
    operation, `waited_ns` has when the host went on."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.edges: list[Edge] = []
        self.waits: list[tuple[int, int]] = []
        self.waited_ns: list[int] = []

    def _begin(self, key: Key) -> None:
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


def delays(edges: Sequence[Edge]) -> dict[Key, int]:
    """How long the device must be busy for the host to launch each segment meanwhile."""
    longest: dict[Key, int] = {}
    for edge, after in pairwise(edges):
        ns = round((after.at_ns - edge.at_ns) * _MARGIN) + _MARGIN_NS
        longest[edge.key] = min(_MAX_DELAY_NS, max(ns, longest.get(edge.key, 0)))
    return longest


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
    """Measures what the device's work on each segment takes."""

    def __init__(self, device: Device, delays: Mapping[Key, int]) -> None:
        super().__init__(device)
        self._delays = delays
        self._open: tuple[Key, Event] | None = None
        self._paused: Key | None = None
        self._segments: defaultdict[Key, list[_Segment]] = defaultdict(list)
        self._nothing: list[_Segment] = []

    def measure_nothing(self) -> None:
        """Measure what two events take that have nothing between them, or only a wait."""
        nothing = torch.zeros((), device=self._device.torch_device)
        for _ in range(_NOTHINGS):
            self.edge("nothing")
            bool(nothing)  # deliberately: the watch tells that this has waited
            self.edge("nothing")
        self.end_step()
        self._nothing = [one for found in self._segments.values() for one in found]
        self._segments.clear()

    def work_ns(self) -> dict[Key, float]:
        """Nanoseconds of each segment's work, on an idle device. The mean of those segments that
        were launched in time; if there is none, the shortest."""
        self._open = None  # a segment that has not ended
        self._device.synchronize("diagnose")
        nothing_ns = {is_wait: self._nothing_ns(is_wait) for is_wait in (False, True)}
        found: dict[Key, float] = {}
        for key, segments in self._segments.items():
            measured = [(one.is_dense, one.ns - nothing_ns[one.ends_by_wait]) for one in segments]
            dense = [ns for is_dense, ns in measured if is_dense]
            ns = statistics.fmean(dense) if dense else min(ns for _, ns in measured)
            found[key] = max(0.0, ns)
        return found

    def late_share(self) -> float:
        """The share of the segments that were not launched in time."""
        all_segments = [one for segments in self._segments.values() for one in segments]
        return statistics.fmean(not one.is_dense for one in all_segments) if all_segments else 0.0

    def _nothing_ns(self, ends_by_wait: bool) -> float:
        found = [one.ns for one in self._nothing if one.ends_by_wait == ends_by_wait]
        return statistics.median(found) if found else 0.0

    def _begin(self, key: Key) -> None:
        self._close()
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
        # had needed with the wait.
        is_dense = ends_by_wait or not begins.query()
        ends = self._device.event(timing=True)
        ends.record()
        self._segments[key].append(_Segment(begins, ends, is_dense, ends_by_wait))

    def _start(self, key: Key) -> None:
        begins = self._device.event(timing=True)
        self._device.delay(self._delays.get(key, _UNKNOWN_NS))
        begins.record()
        self._open, self._paused = (key, begins), None
