"""Samples of the thread that trains name the lines of long Python between launches."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from headrace.diagnosis.python_lines import Place, Sample, python_lines, sampled_lines
from headrace.diagnosis.trace import host_segments
from support.diagnosis.made_traces import MS, US, Loop


def logged() -> None:
    """Its two lines stand for the user's."""
    print()  # the first line
    print()  # the second line


FIRST: Place = (logged.__code__, logged.__code__.co_firstlineno + 2)
SECOND: Place = (logged.__code__, logged.__code__.co_firstlineno + 3)


def test_a_sample_stands_for_the_time_since_the_one_before() -> None:
    trace = replace(Loop(logging=9 * MS).run(), shift_ns=5 * MS)
    stretches = [one for one in host_segments(trace) if one.cause == "host"]
    samples = []
    for one in stretches:
        # A call of 6 ms, a line of 2 ms; the last millisecond has no sample.
        moments = (one.start_ns - 20 * US, one.start_ns + 6 * MS, one.start_ns + 8 * MS)
        samples += [
            Sample(at_ns - trace.shift_ns, place)
            for at_ns, place in zip(moments, (SECOND, FIRST, SECOND), strict=True)
        ]
    first, second = python_lines(trace, samples)
    assert [one.line.text for one in (first, second)] == [
        "print()  # the first line",
        "print()  # the second line",
    ]
    assert first.line.function == "logged"
    within = sum(one.end_ns <= trace.marks[-1] for one in stretches) / trace.steps
    assert (first.ms, second.ms) == (pytest.approx(6 * within), pytest.approx(2 * within))
    assert first.idle_share == pytest.approx(3 * second.idle_share)
    assert first.idle_share + second.idle_share == pytest.approx(8 / 9, rel=0.02)


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
