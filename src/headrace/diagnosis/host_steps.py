"""What the host did in some steps, noted without a profiler of the device."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from headrace.device import HostOperator
from headrace.diagnosis.segments import Edge, Key
from headrace.diagnosis.torch_calls import TorchCall

#: How much longer the device is to stay busy than the host needed for a segment.
_MARGIN, _MARGIN_NS = 1.5, 100_000
_MAX_DELAY_NS = 300_000_000


@dataclass(frozen=True, slots=True)
class HostSteps:
    """What the host did in some steps, by `time.perf_counter_ns`. `communication_ns` is how long
    each segment of communication took the device."""

    start_ns: int
    marks: tuple[int, ...]
    edges: tuple[Edge, ...]
    waits: tuple[tuple[int, int], ...]
    waited_ns: tuple[int, ...]
    inputs: tuple[tuple[int, int], ...]
    torch_calls: tuple[TorchCall, ...]
    operators: tuple[HostOperator, ...]
    communication_ns: Mapping[Key, float] = field(default_factory=dict)

    def edge_at(self, at_ns: int) -> int:
        """The position of the segment in which the host was at a moment."""
        return max(0, bisect_right(self.edges, at_ns, key=lambda edge: edge.at_ns) - 1)

    def waiting(self) -> dict[HostOperator, int]:
        """The operators in which the host waited, and when that was told: after the script's call
        had returned. So, of the operators of that call, it was the longest."""
        found: dict[HostOperator, int] = {}
        for at_ns in self.waited_ns:
            end = bisect_right(self.operators, at_ns, key=lambda one: one.start_ns)
            if end == 0:
                continue
            call_ns = self.operators[end - 1].call_ns
            begin = bisect_left(self.operators, call_ns, hi=end, key=lambda one: one.start_ns)
            called = [one for one in self.operators[begin:end] if one not in found]
            if called:
                found[max(called, key=lambda one: one.end_ns - one.start_ns)] = at_ns
        return found

    def after_wait_ns(self) -> dict[Key, float]:
        """How long the host goes on after a wait inside an operation until that is told, by the
        segment in which it waits."""
        found: defaultdict[Key, list[int]] = defaultdict(list)
        for one, at_ns in self.waiting().items():
            found[self.edges[self.edge_at(one.start_ns)].key].append(at_ns - one.end_ns)
        return {key: max(0.0, statistics.median(ns)) for key, ns in found.items()}

    def delays(self) -> dict[Key, int]:
        """How long the device must be busy for the host to launch each segment meanwhile."""
        longest: dict[Key, int] = {}
        for edge, after in pairwise(self.edges):
            ns = round((after.at_ns - edge.at_ns) * _MARGIN) + _MARGIN_NS
            longest[edge.key] = min(_MAX_DELAY_NS, max(ns, longest.get(edge.key, 0)))
        return longest
