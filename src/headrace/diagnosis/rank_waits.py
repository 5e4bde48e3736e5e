"""One of several ranks: which it is, how long it waits for the others, and where its host is."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch.distributed as dist

from headrace.diagnosis.collectives import watching_collectives
from headrace.diagnosis.python_lines import Sample
from headrace.diagnosis.waits import line_record
from headrace.parallel import is_launched
from headrace.records import HostLine, LineRecord
from headrace.source_lines import short_path

_MAX_LINES = 8


def this_rank() -> tuple[int, int]:
    """The number of this process and how many there are: as the script's process group knows, or as
    torchrun said."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if is_launched():
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def has_ranks() -> bool:
    """Whether this process trains with others, which must all take as many steps."""
    return is_launched() or this_rank()[1] > 1


class CollectiveWaits:
    """How long this thread was in backward and in collectives without using the CPU. On the CPU,
    where collectives block, this is how long it waited for other ranks."""

    def __init__(self) -> None:
        self.ns = 0
        self._thread = threading.get_ident()
        self._since: list[tuple[int, int]] = []

    def edge(self, kind: str) -> None:
        """A call of PyTorch's begins, or has ended: `TorchCalls` tells."""
        if kind == "backward":
            self._begin()
        elif kind == "after backward":
            self._end()

    def watching(self) -> AbstractContextManager[None]:
        """Watch the functions of `torch.distributed` inside the block."""
        return watching_collectives(self._begin, self._end)

    def _begin(self) -> None:
        if threading.get_ident() == self._thread:
            self._since.append((time.perf_counter_ns(), time.thread_time_ns()))

    def _end(self) -> None:
        if threading.get_ident() == self._thread and self._since:
            start_ns, start_cpu_ns = self._since.pop()
            used_ns = time.thread_time_ns() - start_cpu_ns
            if not self._since:  # the outermost
                self.ns += max(0, time.perf_counter_ns() - start_ns - used_ns)


def host_lines(samples: Sequence[Sample], steps: int) -> tuple[HostLine, ...]:
    """The lines where the host was for longest, per step. A sample stands for the time since the
    one before it."""
    ns: defaultdict[Any, int] = defaultdict(int)
    for before, sample in pairwise(samples):
        ns[sample.called_from or sample.line] += sample.at_ns - before.at_ns
    longest = sorted(ns, key=lambda place: -ns[place])[:_MAX_LINES]
    found = [(_record(place), ns[place] / max(1, steps) / 1e6) for place in longest]
    return tuple(HostLine(replace(line, file=short_path(line.file)), ms) for line, ms in found)


def _record(place: Any) -> LineRecord:
    return place if isinstance(place, LineRecord) else line_record(*place)
