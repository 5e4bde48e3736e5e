"""Trace files as PyTorch's profiler writes them, from made-up and from recorded traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from headrace.diagnosis.trace import Call, StepTrace, Work
from support.paths import FIXTURES

#: The profiler's clock says microseconds of today's date.
EPOCH_US = 1_763_500_000_000_000
THREAD, AUTOGRAD = 4711, 4712
READ = ("aten::item", "aten::_local_scalar_dense")
STACK = ("train.py(7): train", "torch/_tensor.py(30): wrapped", "train.py(3): log")

Event = dict[str, Any]


def span(name: str, start_ns: int, end_ns: int, cat: str, tid: int = THREAD, **args: Any) -> Event:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 1,
        "tid": tid,
        "ts": EPOCH_US + start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": args,
    }


def calls_and_work(trace: StepTrace, device: int = 0) -> list[Event]:
    """What the driver was called for, and what the device ran."""
    events = [
        span(call.name, call.start_ns, call.end_ns, "cuda_runtime", correlation=at)
        for at, call in enumerate(trace.calls)
    ]
    for one in trace.work:
        name, cat = "gemm", "kernel"
        if one.kind == "copy":
            name, cat = "Memcpy HtoD (Pageable -> Device)", "gpu_memcpy"
        elif one.kind == "communication":
            name = "ncclKernel_AllReduce"
        about = {"correlation": one.call, "stream": one.stream, "device": device}
        events.append(span(name, one.start_ns, one.end_ns, cat, one.stream, **about))
    return events


def loading(trace: StepTrace) -> list[Event]:
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    return [span(name, start, end, "user_annotation") for start, end in trace.inputs]


def profiler_steps(trace: StepTrace, first: int = 5) -> list[Event]:
    begins = (trace.start_ns, *trace.marks)
    return [
        span(f"ProfilerStep#{first + at}", start, end, "user_annotation")
        for at, (start, end) in enumerate(zip(begins, trace.marks, strict=False))
    ]


def optimizer_steps(trace: StepTrace, *names: str) -> list[Event]:
    """The calls of optimizers, one after the other, at the end of each step."""
    return [
        span(f"Optimizer.step#{name}.step", mark - 3000 * at - 2000, mark - 3000 * at, "cpu_op")
        for mark in trace.marks
        for at, name in enumerate(reversed(names or ("AdamW",)))
    ]


def reads(trace: StepTrace, *frames: str) -> list[Event]:
    """The operators around each wait, inside Python functions, the outermost first."""
    return [
        span(name, call.start_ns - 100 + at, call.end_ns + 100 - at, cat)
        for call in trace.calls
        if call.kind == "wait"
        for at, (name, cat) in enumerate(
            [
                *((frame, "python_function") for frame in frames),
                *((name, "cpu_op") for name in READ),
            ]
        )
    ]


def write_trace(path: Path, *events: list[Event], **facts: Any) -> Path:
    """A trace file; compressed if its name says so."""
    made = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]
    content = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "Made GPU"}],
        **facts,
        "traceEvents": [*made, *(event for some in events for event in some)],
    }
    text = json.dumps(content).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def recorded(name: str) -> StepTrace:
    """Steps of a script in benchmarks/inputs/slow_scripts.py, as an H200 ran them."""
    with gzip.open(FIXTURES / "traces" / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        values = json.load(file)
    return StepTrace(
        values["start_ns"],
        values["end_ns"],
        tuple(values["marks"]),
        tuple(Call(*one) for one in values["calls"]),
        tuple(Work(*one) for one in values["work"]),
        tuple((start, end) for start, end in values["inputs"]),
    )
