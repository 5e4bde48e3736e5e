"""Traces that somebody recorded: steps, causes, lines and ranks, against traces that are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.diagnosis.breakdown import breakdown
from headrace.diagnosis.recorded import diagnose_traces
from headrace.diagnosis.text import text_of
from headrace.diagnosis.trace import StepTrace
from headrace.diagnosis.what_if import NO_WAITS, Replay
from headrace.errors import ProgramError
from headrace.records import DiagnosisResult
from support.diagnosis.made_traces import MS, US, Loop, Machine
from support.diagnosis.trace_files import (
    AUTOGRAD,
    STACK,
    Event,
    calls_and_work,
    loading,
    optimizer_steps,
    profiler_steps,
    reads,
    span,
    write_trace,
)

LAUNCH_BOUND = Loop(kernel=5 * US)
SLOW_LOADER = Loop(load=4 * MS, kernel=20 * US)
LOGGING = Loop(reads=1, logging=2 * MS)
PAGEABLE = Loop(copy=3 * MS, pageable=True)
BUSY = Loop(kernel=15_400, load=0)
#: The host is so far ahead that it has launched all steps when the device is in the third.
FAR_AHEAD = Loop(kernel=60 * US, load=0)
TOKENISING = Loop(logging=6 * MS)


def diagnosed(tmp_path: Path, *events: list[Event]) -> DiagnosisResult:
    return diagnose_traces([str(write_trace(tmp_path / "trace.json", *events))])


@pytest.mark.parametrize(
    ("loop", "worst"),
    [
        (LAUNCH_BOUND, "launch"),
        (SLOW_LOADER, "input"),
        (LOGGING, "synchronization"),
        (TOKENISING, "host"),
        (PAGEABLE, "transfer"),
        (BUSY, None),
    ],
)
def test_parts_are_those_of_the_trace(tmp_path: Path, loop: Loop, worst: str | None) -> None:
    made = loop.run()
    result = diagnosed(tmp_path, calls_and_work(made), loading(made), profiler_steps(made))
    from_ns, steps = made.steady_start()
    step_ms = (max(one.end_ns for one in made.work) - from_ns) / steps / 1e6
    assert result.step_ms == pytest.approx(step_ms, rel=0.01)
    assert result.parts is not None
    for cause, ms in breakdown(made).scaled_to(step_ms).items():
        name = cause.replace(" ", "_")
        assert getattr(result.parts, name) == pytest.approx(ms, abs=0.02 * step_ms), name
    assert result.parts.total == pytest.approx(step_ms, rel=0.01)
    idle = {name: getattr(result.parts, name) for name in result.parts.__slots__[1:]}
    assert worst is None or max(idle, key=lambda name: idle[name]) == worst
    assert (result.steps, result.outcome) == (8, "complete")
    assert result.launches_per_step == pytest.approx(made.launches_per_step())
    assert (result.replay_error or 0.0) < 0.03
    assert {one.change for one in result.predictions} >= {"with the plan graph"}


def test_the_noise_is_that_of_the_steps(tmp_path: Path) -> None:
    machine = Machine()
    for at in range(8):
        machine.python(1 * MS if at % 2 else 2 * MS)
        machine.launch(10 * US)
        machine.step()
    made = machine.trace()
    result = diagnosed(tmp_path, calls_and_work(made), profiler_steps(made))
    # The deviation is half a millisecond, times 8/7 for a sample.
    assert result.noise_ms == pytest.approx(2 * 0.5 * (8 / 7) ** 0.5 / 8**0.5, rel=0.01)
    short = cut(made, 5)
    assert diagnosed(tmp_path, calls_and_work(short), profiler_steps(short)).noise_ms is None


def test_a_gain_is_that_of_a_replay(tmp_path: Path) -> None:
    made = LOGGING.run()
    result = diagnosed(tmp_path, calls_and_work(made), loading(made), profiler_steps(made))
    expected = Replay(made, result.step_ms).speedup(NO_WAITS)
    found = {one.change: one.speedup for one in result.predictions}
    assert found["without all waits"] == pytest.approx(expected, rel=0.01)
    assert expected > 1.1


def cut(made: StepTrace, step: int) -> StepTrace:
    """The trace as the profiler has it that begins with a step: without the calls before."""
    from_ns = made.marks[step - 1]
    first = next(at for at, call in enumerate(made.calls) if call.start_ns >= from_ns)
    work = [
        replace(one, call=None if one.call is None or one.call < first else one.call - first)
        for one in made.work
        if one.start_ns >= from_ns
    ]
    return replace(
        made,
        start_ns=from_ns,
        marks=made.marks[step:],
        calls=made.calls[first:],
        work=tuple(work),
        inputs=tuple(one for one in made.inputs if one[0] >= from_ns),
    )


@pytest.mark.parametrize(
    "loop", [BUSY, FAR_AHEAD, Loop(kernel=30 * US, logging=1 * MS), PAGEABLE, LOGGING]
)
def test_a_trace_that_begins_while_the_gpu_is_busy(tmp_path: Path, loop: Loop) -> None:
    made = replace(loop, steps=12).run()
    part = cut(made, 5)
    events = calls_and_work(part)
    for at, one in enumerate(part.work):  # the profiler knows the ids of calls it has not seen
        if one.call is None:
            events[len(part.calls) + at]["args"]["correlation"] = 100_000 + at
    result = diagnosed(tmp_path, events, loading(part), profiler_steps(part))
    expected = breakdown(made)
    assert result.parts is not None
    assert result.step_ms is not None
    assert result.steps == 7
    done = [
        max(one.end_ns for one in made.work if made.calls[one.call or 0].start_ns < mark)
        for mark in (made.marks[4], made.marks[-1])
    ]
    assert result.step_ms == pytest.approx((done[1] - done[0]) / 7 / 1e6, rel=0.02)
    computing = expected.ns["computing"] / expected.steps / 1e6
    assert result.parts.computing == pytest.approx(computing, rel=0.05)
    assert (result.replay_error or 0.0) < 0.03


def graphed() -> StepTrace:
    """Each step is one launch of a graph of 20 kernels."""
    machine = Machine()
    for _ in range(6):
        machine.load(1 * MS)
        start = machine.now
        machine.launch(40 * US, host=60 * US)
        call = len(machine.calls) - 1
        for _ in range(19):
            machine._run(start, 40 * US, 0, "kernel")
        machine.work[-19:] = [replace(one, call=call) for one in machine.work[-19:]]
        machine.calls[-1] = replace(machine.calls[-1], name="cudaGraphLaunch")
        machine.step()
    return machine.trace()


def test_a_graph_is_one_launch_of_many_kernels(tmp_path: Path) -> None:
    made = graphed()
    result = diagnosed(tmp_path, calls_and_work(made), loading(made), profiler_steps(made))
    assert result.launches_per_step == pytest.approx(1.0)
    assert result.parts is not None
    assert result.parts.computing == pytest.approx(0.8, rel=0.05)
    assert result.parts.input > 0.1
    assert (result.replay_error or 0.0) < 0.03


def test_nothing_is_predicted_where_much_has_no_known_cause(tmp_path: Path) -> None:
    made = LAUNCH_BOUND.run()
    events = calls_and_work(made)
    for event in events:
        if event.get("cat") == "kernel" and event["ts"] * 1000 > made.end_ns / 2:
            event["ts"] += made.end_ns / 1000  # waits for something
    result = diagnosed(tmp_path, events)
    assert result.predictions == ()
    assert any("does not show what the GPU waited for" in text for text in result.missing)


# --- what a step is -------------------------------------------------------------------------------


def test_only_steps_that_follow_each_other_are_joined(tmp_path: Path) -> None:
    made = LAUNCH_BOUND.run()
    steps = profiler_steps(made)
    steps[2]["name"] = "ProfilerStep#3"  # a cycle of the schedule ends before it
    result = diagnosed(tmp_path, calls_and_work(made), steps)
    assert result.steps == 5
    assert result.step_ms == pytest.approx(made.step_ms, rel=0.05)


def test_a_step_that_had_just_begun_does_not_count(tmp_path: Path) -> None:
    made = LAUNCH_BOUND.run()
    later = span("ProfilerStep#8", made.end_ns, made.end_ns + 40 * US, "user_annotation")
    result = diagnosed(tmp_path, calls_and_work(made), [*profiler_steps(made), later])
    assert result.steps == 8
    assert result.step_ms == pytest.approx(made.step_ms, rel=0.05)


def test_of_many_steps_the_last_are_diagnosed(tmp_path: Path) -> None:
    made = Loop(kernels=2, steps=50).run()
    for events in (profiler_steps(made), optimizer_steps(made)):
        result = diagnosed(tmp_path, calls_and_work(made), events)
        assert result.steps == 40
        count = 50 if events[0]["name"].startswith("ProfilerStep") else 49
        assert any(f"the trace has {count} steps" in note for note in result.notes)


@pytest.mark.parametrize("names", [("AdamW",), ("SGD", "Adam"), ("Adam", "Adam", "SGD")])
def test_optimizers_end_steps_where_the_profiler_was_not_told(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    made = LAUNCH_BOUND.run()
    result = diagnosed(tmp_path, calls_and_work(made), optimizer_steps(made, *names))
    assert result.steps == 7  # from the end of the first
    assert result.step_ms == pytest.approx(made.step_ms, rel=0.02)
    assert any("a step ends with Optimizer.step#" in note for note in result.notes)


def test_without_steps_the_whole_trace_is_one(tmp_path: Path) -> None:
    made = LOGGING.run()
    end = [span("cudaDeviceSynchronize", made.end_ns + 50, made.end_ns + 9 * MS, "cuda_runtime")]
    for events in ([], optimizer_steps(made)[:1], optimizer_steps(made, "A", "B")[:2]):
        result = diagnosed(tmp_path, calls_and_work(made), end, events)
        assert result.steps == 1
        assert result.verdict[0].endswith("all of it counts as one.")
        # Without the profiler's own wait at its end.
        assert result.step_ms == pytest.approx((made.end_ns - made.start_ns) / 1e6, rel=0.05)


def test_python_in_forward_and_backward_is_launching(tmp_path: Path) -> None:
    """Stretches of 0.6 ms: in the loop they are the script's own Python."""
    machine = Machine()
    for _ in range(5):
        for _ in range(6):
            machine.python(600 * US)
            for _ in range(5):
                machine.python(2 * US)
                machine.launch(20 * US)
        machine.step()
    made = machine.trace()
    forward = [
        {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": at, "tid": 4711, "ts": one["ts"] + 1}
        for at, one in enumerate(calls_and_work(made))
        if one["cat"] == "cuda_runtime" and at % 30 < 15
    ]
    calls = [one for one in calls_and_work(made) if one["cat"] == "cuda_runtime"]
    backward = [
        {**one, "name": "autograd::engine::evaluate_function: MmBackward0", "cat": "cpu_op"}
        for at, one in enumerate(calls)
        if at % 30 >= 15
    ]
    for one in backward:
        one["tid"] = AUTOGRAD
    plain = diagnosed(tmp_path, calls_and_work(made), profiler_steps(made))
    known = diagnosed(tmp_path, calls_and_work(made), profiler_steps(made), forward, backward)
    assert plain.parts is not None
    assert known.parts is not None
    assert plain.parts.host > 3.0
    # What is left comes before forward, and between forward and backward.
    assert known.parts.host == pytest.approx(1.2, rel=0.05)


# --- lines ----------------------------------------------------------------------------------------


def test_a_wait_has_its_function_if_the_trace_has_stacks(tmp_path: Path) -> None:
    made = LOGGING.run()
    events = calls_and_work(made), profiler_steps(made), reads(made, *STACK)
    result = diagnosed(tmp_path, *events)
    (line,) = result.lines
    assert (line.form, line.per_step) == ("item", 1.0)
    assert line.line is not None
    assert (line.line.file, line.line.line, line.line.function) == ("train.py", 3, "log")
    assert line.gain_ms is not None
    assert line.gain_ms > 0.5
    assert ".item() in log()" in text_of(result)


def test_long_python_has_its_function(tmp_path: Path) -> None:
    made = TOKENISING.run()
    functions = [
        span(name, 0, made.end_ns, "python_function")
        for name in ("train.py(7): train", "tokens.py(3): split", "re/__init__.py(9): sub")
    ]
    result = diagnosed(tmp_path, calls_and_work(made), profiler_steps(made), functions)
    (python,) = result.python_lines
    assert (python.line.file, python.line.function) == ("tokens.py", "split")
    assert python.ms == pytest.approx(6.0, rel=0.1)
    assert python.gain_ms is not None
    assert python.gain_ms > 1.0


def test_without_stacks_the_operator_says_what_waits(tmp_path: Path) -> None:
    made = LOGGING.run()
    result = diagnosed(tmp_path, calls_and_work(made), profiler_steps(made), reads(made))
    (line,) = result.lines
    assert (line.form, line.line) == ("item", None)
    assert any("with_stack=True" in text for text in result.missing)


def of_wait(*names: str) -> Callable[[StepTrace], list[Event]]:
    def events(made: StepTrace) -> list[Event]:
        return [
            span(name, call.start_ns - 50 + at, call.end_ns + 50 - at, "cpu_op")
            for call in made.calls
            if call.kind != "launch"
            for at, name in enumerate(names)
        ]

    return events


@pytest.mark.parametrize(
    ("loop", "names", "form"),
    [
        (LOGGING, ("aten::is_nonzero", "aten::item"), "branch"),
        (LOGGING, ("aten::index", "aten::nonzero"), "mask"),
        (LOGGING, ("aten::to", "aten::_to_copy", "aten::copy_"), "cpu"),
        (LOGGING, ("aten::made_up",), "other"),
        (LOGGING, (), "stream synchronize"),
        (PAGEABLE, ("aten::to", "aten::copy_"), "pageable copy"),
    ],
)
def test_waits_are_told_apart(
    tmp_path: Path, loop: Loop, names: tuple[str, ...], form: str
) -> None:
    made = loop.run()
    around = of_wait(*names)(made)
    result = diagnosed(tmp_path, calls_and_work(made), profiler_steps(made), around)
    assert [one.form for one in result.lines] == [form]
    assert result.lines[0].blocked_ms is not None
    assert not any("no times for the lines" in text for text in result.missing)


# --- ranks ----------------------------------------------------------------------------------------


def rank_trace(computing: int, communicating: int) -> StepTrace:
    machine = Machine()
    for _ in range(4):
        for _ in range(10):
            machine.launch(computing)
        machine.launch(communicating, kind="communication")
        machine.step()
    return machine.trace()


def test_of_ranks_the_one_for_which_others_wait_is_diagnosed(tmp_path: Path) -> None:
    slow, fast = rank_trace(300 * US, 100 * US), rank_trace(200 * US, 1100 * US)
    for rank, made in enumerate((fast, slow, fast)):
        events = (calls_and_work(made), profiler_steps(made))
        write_trace(tmp_path / f"{rank}.json", *events, distributedInfo={"rank": rank})
    result = diagnose_traces([str(tmp_path)])
    assert result.program.endswith("1.json")
    assert result.verdict[0].startswith("Of 3 ranks, rank 1 waits least for the others, 0.1 ms")
    assert result.verdict[1] == "Of its step, 1.0 ms more than on the others are computing."
    assert [one.name for one in result.ranks] == ["rank 0", "rank 1", "rank 2"]
    assert result.parts is not None
    assert result.parts.other_ranks == pytest.approx(0.1, rel=0.1)


def test_traces_without_ranks_go_by_their_names(tmp_path: Path) -> None:
    made = Loop(kernels=3, steps=3).run()
    for name in ("a.json", "b.json.gz"):
        write_trace(tmp_path / name, calls_and_work(made), profiler_steps(made))
    result = diagnose_traces([str(tmp_path / "a.json"), str(tmp_path / "b.json.gz")])
    assert result.verdict[0].startswith("None of 2 ranks waits much longer for the others")
    assert [one.name for one in result.ranks] == ["a.json", "b.json.gz"]


# --- what cannot be diagnosed ---------------------------------------------------------------------


def test_steps_in_which_the_gpu_does_nothing_are_an_error(tmp_path: Path) -> None:
    made = LAUNCH_BOUND.run()
    later = [
        span(f"ProfilerStep#{at}", made.end_ns + at * US, made.end_ns + at * US + US, "cpu_op")
        for at in (8, 9)
    ]
    with pytest.raises(ProgramError, match="the GPU ran nothing in its step"):
        diagnosed(tmp_path, calls_and_work(made), later)


def test_a_step_that_launches_nothing_is_an_error(tmp_path: Path) -> None:
    made = FAR_AHEAD.run()
    later = [span("ProfilerStep#8", made.marks[-1] + US, made.end_ns, "user_annotation")]
    with pytest.raises(ProgramError, match="nothing was launched in its step"):
        diagnosed(tmp_path, calls_and_work(made), later)
