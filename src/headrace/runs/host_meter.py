"""What this process, its children and the whole machine have used so far: counters, to compare."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

_SCAN_EVERY_S = 1.0
_MOST_SCANNING = 0.002  # share of a core


@dataclass(frozen=True, slots=True)
class HostCounters:
    """Seconds of CPU time since some moment in the past, and bytes of memory now.

    `machine_s` is what all cores together could have given up to now, `machine_busy_s` what was
    taken of it. `memory_bytes` is in use on the whole machine, `process_memory_bytes` by this
    process and its children (memory that they share is counted for each of them).
    """

    process_s: float
    workers_s: float
    machine_busy_s: float
    machine_s: float
    memory_bytes: int
    process_memory_bytes: int


class HostMeter:
    """Reads the counters, by way of psutil. One thread at a time.

    To look for children takes a look at every process there is, so that is done once a second, or
    more seldom on a machine with very many; memory is read as often. A child that ends keeps its
    part in `workers_s`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._process = psutil.Process()
        self._children: dict[psutil.Process, float] = {}  # CPU seconds of each, when last read
        self._workers_s = 0.0
        self._scan_at_s = clock()
        self._memory_bytes = self._process_bytes = 0

    def read(self) -> HostCounters:
        now_s = self._clock()
        is_due = now_s >= self._scan_at_s
        if is_due:
            self._scan(now_s)
        self._read_children()
        if is_due:
            self._read_memory()
        machine = psutil.cpu_times()
        idle_s = machine.idle + getattr(machine, "iowait", 0.0)
        # Guests are in `user` already.
        total_s = (
            sum(machine) - getattr(machine, "guest", 0.0) - getattr(machine, "guest_nice", 0.0)
        )
        return HostCounters(
            process_s=time.process_time(),
            workers_s=self._workers_s,
            machine_busy_s=total_s - idle_s,
            machine_s=total_s,
            memory_bytes=self._memory_bytes,
            process_memory_bytes=self._process_bytes,
        )

    def _scan(self, now_s: float) -> None:
        began_s = time.thread_time()
        for child in self._process.children(recursive=True):
            self._children.setdefault(child, 0.0)
        cost_s = time.thread_time() - began_s
        self._scan_at_s = now_s + max(_SCAN_EVERY_S, cost_s / _MOST_SCANNING)

    def _read_children(self) -> None:
        """Add what the children used since they were last read."""
        for child, before_s in list(self._children.items()):
            try:
                times = child.cpu_times()
            except psutil.Error:  # it has ended
                del self._children[child]
                continue
            used_s = times.user + times.system
            self._workers_s += max(0.0, used_s - before_s)
            self._children[child] = used_s

    def _read_memory(self) -> None:
        machine = psutil.virtual_memory()
        self._memory_bytes = machine.total - machine.available
        self._process_bytes = self._process.memory_info().rss
        for child in self._children:
            with contextlib.suppress(psutil.Error):  # it has ended
                self._process_bytes += child.memory_info().rss
