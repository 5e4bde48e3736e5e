"""Samples of the thread that trains name the lines of long Python between launches."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from headrace.diagnosis.python_lines import Place, Sample, python_lines, sampled_lines
from headrace.diagnosis.trace import host_segments
from support.made_traces import MS, US, Loop


def logged() -> None:
    """Its two lines stand for the user's."""
    print()  # the first line
    print()  # the second line


FIRST: Place = (logged.__code__, logged.__code__.co_firstlineno + 2)
SECOND: Place = (logged.__code__, logged.__code__.co_firstlineno + 3)


def test_lines_share_the_stretches_in_which_they_were_seen() -> None:
    trace = replace(Loop(logging=9 * MS, reads=1).run(), shift_ns=5 * MS)
    stretches = [one for one in host_segments(trace) if one.cause == "host"][:-1]
    samples = []
    for one in stretches:
        moments = [one.start_ns - 20 * US, *range(one.start_ns + US, one.end_ns, 3 * MS)]
        places = [SECOND, FIRST, FIRST, SECOND]
        samples += [
            Sample(at_ns - trace.shift_ns, place)
            for at_ns, place in zip(moments, places, strict=True)
        ]
    first, second = python_lines(trace, samples)
    assert (first.line.text, second.line.text) == (
        "print()  # the first line",
        "print()  # the second line",
    )
    assert first.line.function == "logged"
    # Two of the three samples in a stretch of 9 ms; the one before it does not count.
    assert first.ms == pytest.approx(6.0 * len(stretches) / trace.steps, rel=0.01)
    assert first.idle_share == pytest.approx(2 * second.idle_share)
    assert 0.8 < first.idle_share + second.idle_share <= 1.0


def test_a_trace_without_long_python_has_no_lines() -> None:
    assert python_lines(Loop().run(), [Sample(100 * US, FIRST)]) == []


def test_the_line_that_runs_is_sampled() -> None:
    before_s = sys.getswitchinterval()
    with sampled_lines() as samples:
        while not samples:
            pass
    assert sys.getswitchinterval() == before_s
    code, line = samples[0].line
    assert code.co_name == "test_the_line_that_runs_is_sampled"
    assert line in range(code.co_firstlineno + 2, code.co_firstlineno + 5)
