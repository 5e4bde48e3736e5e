"""CPU time and memory used by this process, its children and the whole machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

_SCAN_EVERY_S = 1.0
_MAX_SCAN_SHARE = 0.002  # of a core


@dataclass(frozen=True, slots=True)
class HostCounters:
    """CPU seconds so far, and bytes of memory in use now.

    CPU seconds count from some moment in the past: use the difference of two readings.
    `machine_s` is the time of all cores together, `machine_busy_s` the part that was used.
    `memory_bytes` is of the whole machine, `process_memory_bytes` of this process and its
    children; memory that they share is counted once for each.
    """

    process_s: float
    workers_s: float
    machine_busy_s: float
    machine_s: float
    memory_bytes: int
    process_memory_bytes: int


class HostCounterReader:
    """Reads `HostCounters` with psutil. Only one thread may use it at a time.

    psutil finds children by going through all processes of the machine, so this is done once a
    second, or less often if there are very many. Memory is read at the same times. The CPU time
    of a child that has ended stays in `workers_s`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._process = psutil.Process()
        self._children: dict[psutil.Process, float] = {}  # with the CPU seconds last read
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
        # `user` includes the time of guests.
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
        self._scan_at_s = now_s + max(_SCAN_EVERY_S, cost_s / _MAX_SCAN_SHARE)

    def _read_children(self) -> None:
        """Add the CPU time that the children used since the last reading."""
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
