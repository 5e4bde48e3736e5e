"""What a recorded trace says: the diagnosis of steps that somebody else has profiled.

The steps are those of the trace's annotations. They take the place of all three windows: their
times are those under the profiler, and each wait is found by the operator, and with stacks by the
Python function, in which the trace has it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import headrace
from headrace.diagnosis.explanation import explain, groups_by_step
from headrace.diagnosis.forms import FORMS, Form, form_of
from headrace.diagnosis.loaders import LoaderFacts
from headrace.diagnosis.python_lines import LineTime, Sample, python_lines
from headrace.diagnosis.ranks import figures_of, of_ranks
from headrace.diagnosis.session import Measurements, Observations
from headrace.diagnosis.steps import find_period
from headrace.diagnosis.torch_calls import TorchCall, TorchCallKind
from headrace.diagnosis.trace import Call, StepTrace, host_segments, steps_between
from headrace.diagnosis.trace_file import (
    FORWARD,
    HostSpan,
    TraceFile,
    around,
    read_trace_file,
    trace_paths,
)
from headrace.diagnosis.waits import Wait
from headrace.errors import ProgramError
from headrace.records import DiagnosisResult, Environment, LineRecord

_STEP = "ProfilerStep#"
_OPTIMIZER = "Optimizer.step#"
_LOADER = "enumerate(DataLoader)#"
_BACKWARD = "autograd::engine::evaluate_function"
_MODULE = "nn.Module: "
#: `train.py(12): evaluate` and `<built-in method item of Tensor object at 0x7f…>`.
_FUNCTION = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<name>.+)")
#: The operation of a call of the driver that no operator of PyTorch's made.
_EXPLICIT = {
    "cudaDeviceSynchronize": "torch.cuda.synchronize",
    "cudaStreamSynchronize": "Stream.synchronize",
    "cudaEventSynchronize": "Event.synchronize",
}
_COPIES = ("aten::to", "aten::_to_copy", "aten::copy_")
#: Long stretches of Python are looked at this often.
_SAMPLE_NS = 200_000
#: Of a trace with more steps, the last ones are diagnosed.
_MAX_STEPS = 40


def diagnose_traces(given: Sequence[str], command: str = "") -> DiagnosisResult:
    """The diagnosis of a trace; of several ranks' traces, that of the rank for which the others
    wait. `given` are files and folders. Raises `ProgramError` for a file that is no such trace."""
    found = [_diagnose(read_trace_file(path), command) for path in trace_paths(given)]
    if len(found) == 1:
        return replace(found[0], ranks=())
    ranks = [one.ranks[0].rank for one in found]
    if None in ranks or len(set(ranks)) < len(ranks):
        found = [replace(one, ranks=(replace(one.ranks[0], rank=None),)) for one in found]
    found.sort(key=lambda one: (one.ranks[0].rank or 0, one.program))
    return of_ranks(found)


def _diagnose(file: TraceFile, command: str) -> DiagnosisResult:
    steps = _steps(file)
    seen = Observations(steps=len(steps.marks), calls=len(steps.marks), is_recorded=True)
    for note in (*file.notes, *steps.notes):
        seen.note(note)
    inputs = file.named(steps.thread, _LOADER)
    trace = steps_between(
        file.host,
        _launched_in(file, steps),
        steps.thread,
        steps.start_ns,
        steps.marks,
        tuple((one.start_ns, one.end_ns) for one in _outermost(inputs)),
        tuple(_torch_calls(file, steps)),
    )
    if trace is None:
        raise ProgramError(
            f"{file.path}: the GPU ran nothing in {_count(steps)}; expected steps that train on it"
        )
    if not any(call.kind == "launch" for call in trace.calls):
        raise ProgramError(
            f"{file.path}: nothing was launched in {_count(steps)}; expected cudaLaunchKernel or "
            "cudaGraphLaunch in them"
        )
    seen.measured = _measured(file, steps, trace)
    if any("SingleProcess" in one.name for one in inputs):
        seen.measured.loader = LoaderFacts(workers=0, pins=True, batch_tensors=0)
    environment = Environment(
        command=command, headrace=headrace.__version__, device_name=file.device_name
    )
    result = explain(seen, file.path, None, environment)
    if steps.is_whole:
        first = (
            f"The trace has no {_STEP}N and no repeated {_OPTIMIZER} that would say what a step "
            "is: all of it counts as one."
        )
        result = replace(result, verdict=(first, *result.verdict))
    figures = replace(figures_of(file.rank, result), host=Path(file.path).name)
    return replace(result, ranks=(figures,))


def _count(steps: _Steps) -> str:
    return f"its {len(steps.marks)} steps" if len(steps.marks) > 1 else "its step"


def _launched_in(file: TraceFile, steps: _Steps) -> list[dict[str, Any]]:
    """What the device ran, without what it still had to do when the steps began. A single step has
    it: the device was not idle meanwhile."""
    if len(steps.marks) == 1:
        return file.device
    from_us = steps.start_ns / 1000
    launched = {call["args"].get("correlation"): call["ts"] for call in file.host}
    known = [(launched.get(work["args"].get("correlation")), work) for work in file.device]
    inside = (work["ts"] for at_us, work in known if at_us is not None and at_us >= from_us)
    first_us = min(inside, default=from_us)
    return [
        work
        for at_us, work in known
        if (work["ts"] >= first_us if at_us is None else at_us >= from_us)
    ]


def _measured(file: TraceFile, steps: _Steps, trace: StepTrace) -> Measurements:
    waits = _waits(file, trace)
    from_ns, count = trace.steady_start()
    to_ns = trace.end_ns
    if from_ns > trace.start_ns:  # from where the device has finished a step to the same
        to_ns = max(one.end_ns for one in trace.work)
    marks = (trace.start_ns, *trace.marks)
    measured = Measurements(
        window="profiled",
        clean_ns=[end - start for start, end in pairwise(marks)],
        clean_total_ns=round((to_ns - from_ns) / count * trace.steps),
        trace=trace,
        waits=waits,
        is_complete=True,
    )
    if file.has_stacks:
        measured.python_lines = _python_lines(file, steps.thread, trace)
    elif any(waits):
        measured.missing.append(
            "no lines: the trace has no Python stacks; record it with with_stack=True"
        )
    return measured


# --- steps ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Steps:
    """When the steps began and ended, in which thread, and how that is known."""

    thread: Any
    start_ns: int
    marks: tuple[int, ...]
    notes: tuple[str, ...]
    is_whole: bool = False


def _steps(file: TraceFile) -> _Steps:
    slow = "the times are those under the profiler, which slows the host down, not the GPU"
    if file.has_stacks:
        slow += "; with stacks even more, and a place is where its function begins"
    of_step = _longest_row(
        [
            (thread, one)
            for thread in file.spans
            for one in {one.name: one for one in file.named(thread, _STEP)}.values()
        ]
    )
    while len(of_step) > 1 and not _launches_in(file, of_step[-1][1]):
        of_step.pop()  # the profiler ended when this step had just begun
    if of_step:
        notes = [slow] if len(of_step) <= _MAX_STEPS else [_last(len(of_step)), slow]
        thread, first = of_step[-_MAX_STEPS:][0]
        marks = tuple(one.end_ns for _, one in of_step[-_MAX_STEPS:])
        return _Steps(thread, first.start_ns, marks, tuple(notes))
    for thread in file.spans:
        called = _outermost(file.named(thread, _OPTIMIZER))
        ends = _step_ends(called)
        if len(ends) > 1:
            notes = [f"the trace has no {_STEP}N: a step ends with {called[-1].name}", slow]
            if len(ends) > _MAX_STEPS + 1:
                notes.insert(0, _last(len(ends) - 1))
            first_ns, *marks_ns = ends[-_MAX_STEPS - 1 :]
            return _Steps(thread, first_ns, tuple(marks_ns), tuple(notes))
    return _whole(file, slow)


def _launches_in(file: TraceFile, step: HostSpan) -> bool:
    return any(
        "Launch" in call["name"] and step.start_ns <= call["ts"] * 1000 < step.end_ns
        for call in file.host
    )


def _last(steps: int) -> str:
    return f"the trace has {steps} steps, of which the last {_MAX_STEPS} are diagnosed"


def _longest_row(found: list[tuple[Any, HostSpan]]) -> list[tuple[Any, HostSpan]]:
    """The most steps that follow each other, by their numbers: a file may have several cycles of
    the profiler's schedule."""
    rows: list[list[tuple[Any, HostSpan]]] = []
    for one in found:
        before = rows[-1][-1] if rows else None
        if before is not None and before[0] == one[0] and _number(one[1]) == _number(before[1]) + 1:
            rows[-1].append(one)
        else:
            rows.append([one])
    return max(rows, key=len, default=[])


def _number(step: HostSpan) -> int:
    digits = step.name.removeprefix(_STEP)
    return int(digits) if digits.isdecimal() else -1


def _step_ends(called: list[HostSpan]) -> list[int]:
    """When steps end, from the optimizers' calls: each, or each round of several optimizers."""
    names = [one.name for one in called]
    period = find_period(names)
    if period is None:
        return [one.end_ns for one in called] if len(set(names)) == 1 else []
    ends = [one.end_ns for one in called if one.name == period.last]
    return ends[period.count - 1 :: period.count]


def _whole(file: TraceFile, slow: str) -> _Steps:
    """The whole trace as one step, without the wait with which the profiler ends."""
    launching = [call for call in file.host if "Launch" in call["name"]]
    threads = [call["tid"] for call in launching or file.host]
    thread = max(set(threads), key=threads.count)
    calls = [call for call in file.host if call["tid"] == thread]
    while len(calls) > 1 and "DeviceSynchronize" in calls[-1]["name"]:
        calls.pop()
    begins = [one.start_ns for one in file.spans.get(thread, ())]
    start_ns = min([*begins, round(calls[0]["ts"] * 1000)])
    end_ns = round((calls[-1]["ts"] + calls[-1]["dur"]) * 1000) + 1
    return _Steps(thread, start_ns, (end_ns,), (slow,), is_whole=True)


def _outermost(spans: Iterable[HostSpan]) -> list[HostSpan]:
    found: list[HostSpan] = []
    for one in spans:
        if not found or one.start_ns >= found[-1].end_ns:
            found.append(one)
    return found


def _torch_calls(file: TraceFile, steps: _Steps) -> Iterator[TorchCall]:
    """When the host was in its model, in backward and in optimizers. A model without stacks is
    known by its operators that have one in backward: from the first to the last of them in a row.
    """
    found: list[tuple[int, int, TorchCallKind | None]] = []
    modules = _outermost(file.named(steps.thread, _MODULE))
    for thread, spans in file.spans.items():
        for one in spans:
            if one.name.startswith(_BACKWARD):
                found.append((one.start_ns, one.end_ns, "backward"))
            elif thread == steps.thread and one.name.startswith("Optimizer."):
                found.append((one.start_ns, one.end_ns, "optimizer"))
            elif thread == steps.thread and one.name.startswith(_LOADER):
                found.append((one.start_ns, one.end_ns, None))
            elif thread == steps.thread and one.name == FORWARD and not modules:
                found.append((one.start_ns, one.start_ns, "forward"))
    found += [(one.start_ns, one.end_ns, "forward") for one in modules]
    found += [(mark, mark, None) for mark in steps.marks]
    found.sort(key=lambda one: one[:2])
    start_ns, end_ns, kind = found[0]
    for begin_ns, stop_ns, other in found[1:]:
        if other == kind and not (other == "forward" and modules):
            end_ns = max(end_ns, stop_ns)
        elif begin_ns >= end_ns:
            if kind is not None and end_ns > start_ns:
                yield TorchCall(start_ns, end_ns, kind)
            start_ns, end_ns, kind = begin_ns, stop_ns, other
    if kind is not None and end_ns > start_ns:
        yield TorchCall(start_ns, end_ns, kind)


# --- lines ----------------------------------------------------------------------------------------


def _waits(file: TraceFile, trace: StepTrace) -> list[list[Wait]]:
    """The waits of each step."""
    groups = groups_by_step(trace)
    first_calls = [trace.calls[group[0]] for step in groups for group in step]
    inside: dict[int, tuple[str, ...]] = {}
    for thread in {call.thread for call in first_calls}:
        moments = sorted(call.start_ns for call in first_calls if call.thread == thread)
        chains = around(file.spans.get(thread, []), moments)
        inside.update(zip(moments, chains, strict=True))
    return [
        [
            _wait(
                trace.calls[group[0]],
                inside[trace.calls[group[0]].start_ns],
                is_only_copy=all(trace.calls[at].kind == "copy" for at in group),
            )
            for group in step
        ]
        for step in groups
    ]


def _wait(call: Call, chain: Sequence[str], *, is_only_copy: bool) -> Wait:
    """`chain` is what the host was in, the outermost first."""
    at, line = _users_function(chain)
    operators = [name for name in chain[at + 1 :] if name.startswith("aten::")]
    functions = [
        (Path(found["file"]).stem, found["name"])
        for found in map(_FUNCTION.fullmatch, reversed(chain[at + 1 :]))
        if found is not None
    ]
    operation = "copy from pageable memory" if call.kind == "copy" else ""
    form = _form(call, operation, operators, functions)
    if line is not None:
        line = replace(line, text=f"{form.title} in {line.function}()")
    return Wait(form, line, None, operation if is_only_copy else "")


def _form(
    call: Call, operation: str, operators: list[str], functions: list[tuple[str, str]]
) -> Form:
    form = form_of("", functions, None)
    if form.name not in ("inside PyTorch", "other"):
        return form
    if operation:
        return form_of(operation, (), None)
    for operator in operators:
        by_operator = form_of(operator, (), None)
        if by_operator.name != "other":
            return by_operator
    if operators and all(name in _COPIES for name in operators):
        return FORMS["cpu"]
    if not operators and call.name in _EXPLICIT:
        return form_of(_EXPLICIT[call.name], (), None)
    if operators:
        return replace(FORMS["other"], title=operators[0].removeprefix("aten::") + "()")
    return replace(form, title=call.name) if form.name == "other" and call.name else form


def _users_function(chain: Sequence[str]) -> tuple[int, LineRecord | None]:
    """The innermost Python function outside PyTorch and the standard library, and its position.
    The profiler names a file from the folder on in which Python finds it."""
    for at in range(len(chain) - 1, -1, -1):
        found = _FUNCTION.fullmatch(chain[at])
        if found is not None and _is_users(found["file"]):
            file, line, name = found["file"], int(found["line"]), found["name"]
            return at, LineRecord(file, line, name, f"{name}()")
    return -1, None


def _is_users(file: str) -> bool:
    if file.startswith("<"):
        return False
    for folder in ("site-packages/", "dist-packages/"):
        file = file.rpartition(folder)[2]
    package = Path(file).parts[0].removesuffix(".py")
    return not (
        package in sys.stdlib_module_names
        or package in ("torch", "headrace")
        or re.match(r"/.*/lib/python3\.\d+/", file)
    )


def _python_lines(file: TraceFile, thread: Any, trace: StepTrace) -> list[LineTime]:
    """The functions that ran in long stretches of Python."""
    moments = [
        at_ns
        for segment in host_segments(trace)
        if segment.cause == "host"
        for at_ns in _moments(segment.start_ns, segment.end_ns)
    ]
    chains = around(file.spans.get(thread, []), moments)
    found = (
        (at_ns, _users_function(chain)[1]) for at_ns, chain in zip(moments, chains, strict=True)
    )
    samples = [Sample(at_ns, line) for at_ns, line in found if line is not None]
    return python_lines(trace, samples)


def _moments(start_ns: int, end_ns: int) -> Iterable[int]:
    count = max(1, round((end_ns - start_ns) / _SAMPLE_NS))
    return (start_ns + (end_ns - start_ns) * (at + 1) // (count + 1) for at in range(count))
