"""The lines that the host ran while the device had nothing queued.

A thread looks at the frames of the one that trains, a thousand times a second, while the profiler
runs. A sample that falls into a long stretch of Python between two calls of the driver names the
line of the time before it. Time without a sample has no line.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

from headrace.diagnosis.breakdown import breakdown
from headrace.diagnosis.trace import StepTrace, host_segments
from headrace.diagnosis.waits import line_record, users_frames
from headrace.records import LineRecord

#: A line as code and line number; its text is read later.
Place = tuple[CodeType, int]

_INTERVAL_S = 0.001
#: While sampling, Python code must let the sampler run this often.
_SWITCH_S = 0.0005


@dataclass(frozen=True, slots=True)
class Sample:
    """The lines that a thread was at: the innermost one outside PyTorch and the standard library,
    and the user's own that led there, if that is another."""

    at_ns: int
    line: Place | LineRecord
    called_from: Place | LineRecord | None = None


@dataclass(frozen=True, slots=True)
class LineTime:
    """A line, how long the host was there per step, and its share of the idle time that Python
    between launches caused."""

    line: LineRecord
    called_from: LineRecord | None
    ms: float
    idle_share: float


@contextmanager
def sampled_lines() -> Iterator[list[Sample]]:
    """Sample the lines of this thread inside the block, from another thread."""
    samples: list[Sample] = []
    thread, stop = threading.get_ident(), threading.Event()

    def look() -> None:
        while not stop.wait(_INTERVAL_S):
            innermost, own = users_frames(sys._current_frames().get(thread))
            if innermost is None:
                continue
            line = innermost.f_code, innermost.f_lineno
            called_from = None
            if own is not None and own is not innermost:
                called_from = own.f_code, own.f_lineno
            samples.append(Sample(time.perf_counter_ns(), line, called_from))

    sampler = threading.Thread(target=look, name="headrace sampler", daemon=True)
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(min(before_s, _SWITCH_S))
    sampler.start()
    try:
        yield samples
    finally:
        stop.set()
        sampler.join()
        sys.setswitchinterval(before_s)


def python_lines(trace: StepTrace, samples: Sequence[Sample]) -> list[LineTime]:
    """The lines of the samples that fall into long stretches of Python, the longest first.

    A sample stands for the time since the one before it: a call of C code that keeps the
    interpreter's lock is sampled once, when it returns.
    """
    stretches = [
        one for one in host_segments(trace) if one.cause == "host" and one.end_ns <= trace.marks[-1]
    ]
    starts = [one.start_ns for one in stretches]
    by_python = breakdown(trace).by_python
    idle_ns = sum(by_python.values())
    ms: defaultdict[tuple[Any, Any], float] = defaultdict(float)
    idle_share = ms.copy()
    before_ns = trace.start_ns
    for sample in samples:
        moment_ns = sample.at_ns + trace.shift_ns
        at = bisect_right(starts, moment_ns) - 1
        if at >= 0 and moment_ns <= stretches[at].end_ns:
            key, stretch = (sample.line, sample.called_from), stretches[at]
            ns = moment_ns - max(before_ns, stretch.start_ns)
            ms[key] += ns / trace.steps / 1e6
            if idle_ns:
                exposed_ns = by_python.get(stretch.start_ns, 0)
                idle_share[key] += ns / stretch.ns * exposed_ns / idle_ns
        before_ns = moment_ns
    return [
        LineTime(
            _record(line),
            None if called_from is None else _record(called_from),
            ms[line, called_from],
            idle_share[line, called_from],
        )
        for line, called_from in sorted(ms, key=lambda key: -ms[key])
    ]


def _record(line: Place | LineRecord) -> LineRecord:
    return line if isinstance(line, LineRecord) else line_record(*line)
