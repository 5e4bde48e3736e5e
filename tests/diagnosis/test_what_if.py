"""A replay gives the traced time back, and predicts the changed loop's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.diagnosis.trace import Work
from headrace.diagnosis.what_if import (
    GRAPH,
    INSTANT_LOADER,
    NO_PYTHON,
    NO_WAITS,
    PIPELINE,
    RUN,
    Change,
    Replay,
)
from support.diagnosis.made_traces import MS, US, Loop, Machine

loops = st.builds(
    Loop,
    kernels=st.integers(3, 40),
    kernel=st.integers(5 * US, 500 * US),
    launch=st.integers(5 * US, 60 * US),
    between=st.integers(US, 20 * US),
    load=st.integers(20 * US, 6 * MS),
    logging=st.integers(0, 3 * MS),
    copy=st.sampled_from([0, 100 * US, 2 * MS]),
    pageable=st.booleans(),
    reads=st.integers(0, 3),
)


def steady_ms(loop: Loop) -> float:
    long, short = replace(loop, steps=24).run(), replace(loop, steps=8).run()
    return (long.end_ns - short.end_ns) / 16 / 1e6


@settings(max_examples=60, deadline=None)
@given(loops)
def test_a_replay_without_changes_gives_the_traced_time(loop: Loop) -> None:
    replay = Replay(loop.run())
    assert replay.holds, (replay.error, loop)
    assert replay.speedup(Change()) == pytest.approx(1.0, abs=0.01)


@settings(max_examples=60, deadline=None)
@given(loops)
def test_the_loop_without_its_waits_is_predicted(loop: Loop) -> None:
    loop = replace(loop, pageable=False)
    truth = steady_ms(loop) / steady_ms(replace(loop, reads=0))
    assert Replay(loop.run()).speedup(NO_WAITS) == pytest.approx(truth, rel=0.03)


@settings(max_examples=40, deadline=None)
@given(loops)
def test_an_instant_loader_is_predicted(loop: Loop) -> None:
    truth = steady_ms(loop) / steady_ms(replace(loop, load=0))
    assert Replay(loop.run()).speedup(INSTANT_LOADER) == pytest.approx(truth, rel=0.03)


def test_blocked_time_is_not_the_gain() -> None:
    """The device needs 4 of the 4.6 ms anyway: the wait blocks for 3.4 ms and costs 0.6."""
    loop = Loop(kernel=100 * US, reads=1)
    trace = loop.run()
    blocked_ms = sum(c.end_ns - c.start_ns for c in trace.calls if c.kind == "wait") / 8 / 1e6
    gain_ms = trace.step_ms * (1 - 1 / Replay(trace).speedup(NO_WAITS))
    truth_ms = steady_ms(loop) - steady_ms(replace(loop, reads=0))
    assert gain_ms == pytest.approx(truth_ms, abs=0.05)
    assert blocked_ms > 3 * gain_ms


def test_of_two_waits_in_a_row_one_alone_gains_nothing() -> None:
    trace = Loop(reads=2, kernel=20 * US).run()
    waits = [at for at, call in enumerate(trace.calls) if call.kind == "wait"]
    replay = Replay(trace)
    first, second, both = (
        replay.speedup(Change(without=frozenset(found)))
        for found in (waits[::2], waits[1::2], waits)
    )
    assert first == pytest.approx(1.0, abs=0.01)
    assert second == pytest.approx(1.0, abs=0.01)
    assert both > 1.05


def test_pipeline_and_graph() -> None:
    # 40 launches of 35 µs, 20 µs of work each: launching takes 1.4 ms, computing 0.8.
    loop = Loop(kernel=20 * US, launch=30 * US, reads=1, copy=500 * US, pageable=True)
    trace = loop.run()
    replay = Replay(trace)
    now, pipeline, graph = trace.step_ms, replay.speedup(PIPELINE), replay.speedup(GRAPH)
    assert now / pipeline == pytest.approx(1.45, rel=0.05)
    assert now / graph == pytest.approx(0.8 + 40 * 0.0004 + 0.15, rel=0.01)


def test_workers_load_beside_the_step() -> None:
    replay = Replay(Loop(load=8 * MS, kernels=20).run())
    # 2 ms of computing; one process loads a batch in 8 ms, eight of them one in 1 ms.
    assert replay.traced_ms / replay.speedup_with_workers(1) == pytest.approx(8.0, rel=0.05)
    assert replay.traced_ms / replay.speedup_with_workers(8) == pytest.approx(2.0, rel=0.05)


def test_a_trace_with_work_that_nobody_launched_predicts_nothing() -> None:
    trace = Loop().run()
    work = tuple(
        replace(one, call=None) if at % 5 == 0 else one for at, one in enumerate(trace.work)
    )
    assert not Replay(replace(trace, work=work)).holds


def test_python_between_launches_is_predicted() -> None:
    loop = Loop(logging=9 * MS)
    truth = steady_ms(loop) / steady_ms(replace(loop, logging=0))
    assert Replay(loop.run()).speedup(NO_PYTHON) == pytest.approx(truth, rel=0.03)


@pytest.mark.parametrize(
    ("launch", "between", "logging"), [(18 * US, 5 * US, 4 * MS), (36 * US, 6 * US, 4800 * US)]
)
def test_the_host_is_scaled_to_the_clean_step(launch: int, between: int, logging: int) -> None:
    """The profiler slows launches down; or the host was slower without it. Either way a change
    gains what it would gain in a trace of the clean loop."""
    traced = Loop(kernel=10 * US, launch=30 * US, between=5 * US, logging=4 * MS)
    clean = replace(traced, launch=launch, between=between, logging=logging)
    replay = Replay(traced.run(), steady_ms(clean))
    for change in (GRAPH, NO_PYTHON):
        truth = Replay(clean.run()).speedup(change)
        assert replay.speedup(change) == pytest.approx(truth, rel=0.03)


def test_a_graph_does_not_run_the_python_of_model_and_optimizer() -> None:
    """What the script itself does between them stays."""
    machine = Machine()
    for _ in range(8):
        machine.load(50 * US)
        with machine.inside("forward"):
            machine.python(4 * MS)
            for _ in range(10):
                machine.launch(50 * US)
                machine.python(5 * US)
        machine.python(2 * MS)
        with machine.inside("optimizer"):
            machine.python(3 * MS)
            machine.launch(500 * US)
        machine.step()
    replay = Replay(machine.trace())
    assert replay.holds
    ms = replay.traced_ms / replay.speedup(GRAPH)
    assert ms == pytest.approx(2.1, abs=0.2)  # the script's own 2 ms, and the loader


@pytest.mark.parametrize("change", [NO_WAITS, PIPELINE, GRAPH])
def test_work_that_was_launched_before_the_trace_takes_its_time(change: Change) -> None:
    """A recorded trace of one step begins while the device still works on the one before."""
    trace = Loop(kernels=40, reads=1, steps=1).run()
    earlier = tuple(
        Work(at * 100 * US, (at + 1) * 100 * US, name="of the step before") for at in range(20)
    )
    begins = earlier[-1].end_ns
    later = tuple(
        replace(one, start_ns=one.start_ns + begins, end_ns=one.end_ns + begins)
        for one in trace.work
    )
    waits = tuple(
        replace(call, end_ns=call.end_ns + begins) if call.kind == "wait" else call
        for call in trace.calls
    )
    moved = replace(
        trace,
        end_ns=trace.end_ns + begins,
        marks=(waits[-1].end_ns,),
        calls=waits,
        work=earlier + later,
    )
    replay = Replay(moved)
    assert replay.holds
    computing_ms = sum(one.end_ns - one.start_ns for one in moved.work) / 1e6
    assert replay.traced_ms / replay.speedup(change) >= 0.98 * computing_ms


def test_a_sped_up_script_still_waits_where_it_reads() -> None:
    """Without reads it is as fast as with the plan graph; each read costs one start of a graph."""
    loop = Loop(kernels=40, kernel=10 * US, launch=50 * US)
    without = Replay(loop.run())
    assert without.speedup(RUN) == pytest.approx(without.speedup(GRAPH), rel=0.01)
    reading = Replay(replace(loop, reads=1).run())
    assert 1.5 < reading.speedup(RUN) < reading.speedup(GRAPH)
    copying = Replay(replace(loop, copy=2 * MS, pageable=True).run())
    assert copying.speedup(RUN) == pytest.approx(copying.speedup(GRAPH), rel=0.01)
