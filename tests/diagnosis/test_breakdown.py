"""A step's time is divided without a remainder, and idle time is charged to what caused it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.diagnosis.breakdown import CAUSES, Breakdown, breakdown
from headrace.diagnosis.torch_calls import TorchCall, TorchCallKind
from headrace.diagnosis.trace import Call, StepTrace, Work, host_segments
from support.diagnosis.made_traces import MS, US, Loop, Machine

PLAIN = Loop()


def worst(found: Breakdown) -> str:
    return max((cause for cause in CAUSES if cause != "computing"), key=lambda c: found.ns[c])


@pytest.mark.parametrize(
    ("loop", "cause"),
    [
        (replace(PLAIN, reads=1, kernel=20 * US), "synchronization"),
        (replace(PLAIN, reads=3, launch=30 * US, kernel=50 * US), "synchronization"),
        (replace(PLAIN, load=9 * MS), "input"),
        (replace(PLAIN, load=9 * MS, reads=1), "input"),
        (replace(PLAIN, kernel=5 * US, launch=30 * US), "launch"),
        (replace(PLAIN, kernel=5 * US, launch=30 * US, reads=1), "launch"),
        (replace(PLAIN, logging=9 * MS), "host"),
        (replace(PLAIN, copy=3 * MS, pageable=True), "transfer"),
        (replace(PLAIN, copy=9 * MS), "transfer"),
    ],
)
def test_idle_time_goes_to_its_cause(loop: Loop, cause: str) -> None:
    found = breakdown(loop.run())
    assert worst(found) == cause, found.ns


def test_the_lead_that_a_blocking_copy_costs_is_not_its_waits() -> None:
    """As `to` copies from pageable memory: the driver blocks, then PyTorch waits for the rest."""
    machine = Machine()
    for _ in range(4):
        machine.copy_pageable(2 * MS, left=15 * US)
        machine.wait()
        for _ in range(60):
            machine.launch(2 * US)
        for _ in range(10):
            machine.launch(500 * US)
        machine.step()
    found = breakdown(machine.trace())
    assert found.share("launch") < 0.01
    assert found.share("transfer") == pytest.approx(2.5 / 7.6, abs=0.02)


def test_a_loop_that_keeps_the_device_busy_computes() -> None:
    found = breakdown(PLAIN.run())
    assert found.share("computing") > 0.99
    # The first of the 8 steps begins on an idle device.
    assert (found.steps, found.ns["computing"]) == (7, 7 * 40 * 100 * US)


def test_each_wait_has_the_idle_time_that_it_exposed() -> None:
    trace = replace(PLAIN, reads=2).run()
    found = breakdown(trace)
    waits = [at for at, call in enumerate(trace.calls) if call.kind == "wait"]
    exposed = [found.by_call.get(at, 0) for at in waits]
    # The first of the two blocks; the last step's wait has nothing after it.
    assert all(exposed[0:-2:2])
    assert not any(exposed[1::2])
    assert sum(exposed) == found.ns["synchronization"]


def test_work_that_was_launched_in_time_but_started_late_is_unattributed() -> None:
    calls = (Call(0, 5 * US, "launch"), Call(5 * US, 10 * US, "launch"))
    work = (Work(8 * US, 20 * US, call=0), Work(80 * US, 90 * US, call=1))
    found = breakdown(StepTrace(0, 90 * US, (90 * US,), calls, work))
    assert found.ns["unattributed"] == 60 * US
    assert found.total_ns == 90 * US


def test_work_that_starts_long_after_its_launch_waits_for_something_unknown() -> None:
    """Although the GPU was idle already when the host launched it."""
    calls = (Call(0, 5 * US, "launch"), Call(30 * US, 40 * US, "launch"))
    work = (Work(8 * US, 20 * US, call=0), Work(2 * MS, 3 * MS, call=1))
    found = breakdown(StepTrace(0, 3 * MS, (3 * MS,), calls, work))
    assert found.ns["unattributed"] == 2 * MS - 40 * US
    assert found.ns["launch"] == (8 + 20) * US


def test_long_python_between_few_calls_is_no_launching() -> None:
    machine = Machine()
    for _ in range(4):
        machine.python(40 * MS)
        machine.launch(20 * US)
        machine.step()
    assert breakdown(machine.trace()).share("host") > 0.99


def test_a_wait_is_charged_until_the_host_has_its_lead_again() -> None:
    """A copy that follows the wait puts the host ahead for a moment. It still launches anew."""
    machine = Machine()
    for _ in range(8):
        machine.launch(150 * US, kind="copy")
        for _ in range(60):
            machine.launch(2 * US)
        for _ in range(8):
            machine.launch(500 * US)
        machine.wait()
        machine.step()
    found = breakdown(machine.trace())
    assert worst(found) == "synchronization"
    assert found.ns["launch"] < 0.1 * found.ns["synchronization"]


def test_the_device_keeps_its_time_and_the_host_is_scaled() -> None:
    found = breakdown(Loop(load=9 * MS).run())
    slow_ms = found.total_ns / found.steps / 1e6
    parts = found.scaled_to(0.8 * slow_ms)
    assert parts["computing"] == pytest.approx(4.0)
    assert parts["input"] == pytest.approx(0.8 * slow_ms - 4.0, rel=0.05)


def test_communication_alone_is_other_ranks() -> None:
    calls = (Call(0, US, "launch"), Call(US, 2 * US, "launch"))
    work = (Work(2 * US, 9 * US, call=0), Work(5 * US, 29 * US, "communication", 1, 1))
    found = breakdown(StepTrace(0, 29 * US, (29 * US,), calls, work))
    assert found.ns["other ranks"] == 20 * US


@st.composite
def traces(draw: st.DrawFn) -> StepTrace:
    """Anything: calls in order, work that nothing explains, overlapping streams."""
    spans = st.tuples(st.integers(0, 400), st.integers(0, 60))
    calls, at = [], 0
    for gap, ns in draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)):
        kind = draw(st.sampled_from(["launch", "wait", "copy", "memory"]))
        calls.append(Call((at + gap) * US, (at + gap + ns) * US, kind))
        at += gap + ns
    work = [
        Work(
            start * US,
            (start + ns) * US,
            draw(st.sampled_from(["kernel", "copy", "communication"])),
            draw(st.integers(0, 2)),
            draw(st.one_of(st.none(), st.integers(0, len(calls) - 1))) if calls else None,
        )
        for start, ns in draw(st.lists(spans, max_size=15))
    ]
    inputs = tuple(
        (start * US, (start + ns) * US) for start, ns in draw(st.lists(spans, max_size=4))
    )
    end = draw(st.integers(1, 500)) * US
    marks = tuple(sorted(draw(st.lists(st.integers(0, end), min_size=1, max_size=4))))
    work.sort(key=lambda one: (one.start_ns, one.end_ns))
    edges = sorted(draw(st.sets(st.integers(0, end), max_size=8)))
    kinds: tuple[TorchCallKind, ...] = ("forward", "backward", "optimizer")
    inside = tuple(
        TorchCall(start, stop, draw(st.sampled_from(kinds)))
        for start, stop in zip(edges[::2], edges[1::2], strict=False)
    )
    return StepTrace(0, end, marks, tuple(calls), tuple(work), inputs, inside)


@settings(max_examples=200, deadline=None)
@given(traces())
def test_the_parts_add_up_and_none_is_negative(trace: StepTrace) -> None:
    found = breakdown(trace)
    from_ns, steps = trace.steady_start()
    assert (found.total_ns, found.steps) == (trace.end_ns - from_ns, steps)
    assert min(found.ns.values()) >= 0
    assert sum(found.scaled_to(2.0).values()) == pytest.approx(2.0)
    assert all(trace.calls[call].kind != "launch" for call in found.by_call)
    segments = host_segments(trace)
    assert sum(one.ns for one in segments) == trace.end_ns - trace.start_ns
    assert all(one.end_ns == other.start_ns for one, other in pairwise(segments))


def test_python_of_backward_and_optimizers_is_launching() -> None:
    """Also a part of a stretch; in a module, if it takes less than a millisecond; in the others,
    less than ten. A module that launches nothing is the script's own."""
    machine = Machine()
    for _ in range(4):
        with machine.inside("forward"):
            for python in (*[5 * US] * 10, 600 * US, 2 * MS):
                machine.python(python)
                machine.launch(20 * US)
        machine.python(400 * US)
        with machine.inside("backward"):
            machine.python(300 * US)
            machine.launch(20 * US)
            machine.python(200 * US)
        machine.python(50 * US)
        with machine.inside("optimizer"):
            machine.python(3 * MS)
            machine.launch(20 * US)
            machine.python(11 * MS)
            machine.launch(20 * US)
        with machine.inside("forward"):
            machine.python(700 * US)
        machine.step()
    trace = machine.trace()
    pieces = [(one.ns // US, one.cause, one.inside) for one in host_segments(trace)]
    python = [one for one in pieces if one[0] > 10]
    assert python[: len(python) // 4] == [
        (600, "launch", "forward"),
        (2000, "host", "forward"),
        (400, "host", None),
        (300, "launch", "backward"),
        (200, "launch", "backward"),
        (50, "launch", None),
        (3000, "launch", "optimizer"),
        (11000, "host", "optimizer"),
        (700, "host", None),
    ]
    found = breakdown(trace)
    assert found.ns["host"] == pytest.approx(3 * 14.1 * MS, rel=0.1)
    assert found.ns["launch"] > 3 * 4 * MS
