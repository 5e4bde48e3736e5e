"""Traces as PyTorch's profiler writes them."""

from __future__ import annotations

from typing import Any

from headrace.diagnosis.breakdown import breakdown
from headrace.diagnosis.torch_calls import TorchCall
from headrace.diagnosis.trace import read_trace
from support.diagnosis.made_traces import US, Loop

THREAD, AUTOGRAD, LOADER = 100, 101, 102


def call(name: str, ts: float, dur: float, correlation: int, tid: int = THREAD) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": name,
        "ts": ts,
        "dur": dur,
        "tid": tid,
        "args": {"correlation": correlation},
    }


def work(name: str, ts: float, dur: float, correlation: int, cat: str = "kernel") -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": ts,
        "dur": dur,
        "args": {"correlation": correlation, "stream": 7},
    }


EVENTS = [
    {"ph": "M", "name": "process_name"},
    call("cudaDeviceSynchronize", 10.0, 2.0, 20),  # the profiler's own
    call("cudaMemcpyAsync", 15.0, 2.0, 21, LOADER),
    call("cudaDeviceSynchronize", 50.0, 2.0, 0),  # ours, three times
    call("cudaDeviceSynchronize", 70.0, 6.0, 22),
    call("cudaDeviceSynchronize", 100.0, 10.0, 1),
    call("cudaDeviceSynchronize", 115.0, 1.0, 23),  # the script's
    call("cudaMemcpyAsync", 130.0, 60.0, 2),
    work("Memcpy HtoD (Pageable -> Device)", 140.0, 45.0, 2, "gpu_memcpy"),
    call("cudaLaunchKernel", 200.0, 5.0, 3),
    work("gemm", 206.0, 20.0, 3),
    call("cudaLaunchKernel", 204.0, 8.0, 4, AUTOGRAD),  # overlaps the call before
    work("gemm_backward", 226.0, 30.0, 4),
    call("cudaEventRecord", 213.0, 1.0, 5),  # costs the host nothing worth naming
    call("cudaHostAlloc", 214.0, 900.0, 6, LOADER),  # a thread that does not train
    call("cudaStreamSynchronize", 215.0, 45.0, 7),
    call("cudaMemcpyAsync", 262.0, 20.0, 8),
    work("Memcpy DtoH (Device -> Pageable)", 264.0, 2.0, 8, "gpu_memcpy"),
    call("cudaLaunchKernel", 291.0, 3.0, 11),  # after the last step
    work("evaluation", 296.0, 400.0, 11),
    call("cudaDeviceSynchronize", 300.0, 10.0, 9),
    call("cudaDeviceSynchronize", 320.0, 10.0, 10),  # the profiler's own
]


def test_calls_and_work_are_read_and_joined() -> None:
    # The host's clock is 5,000 ns behind the profiler's, which delayed the first wait.
    waits = [(10_000, 50_000), (64_000, 72_000), (95_000, 105_000)]
    calls = [TorchCall(200_000, 205_000, "backward"), TorchCall(120_000, 190_000, "forward")]
    trace = read_trace({"traceEvents": EVENTS}, waits, [285_000], [(108_000, 118_000)], calls)
    assert trace is not None
    assert trace.torch_calls == ((125_000, 195_000, "forward"), (205_000, 210_000, "backward"))
    assert (trace.start_ns, trace.end_ns, trace.marks) == (110_000, 290_000, (290_000,))
    assert trace.inputs == ((113_000, 123_000),)
    assert [one.kind for one in trace.calls] == [
        *("wait", "copy", "launch"),
        *("launch", "wait", "wait"),  # a copy to pageable memory returns when it has ended
    ]
    assert (trace.calls[3].start_ns, trace.calls[3].end_ns) == (205_000, 212_000)
    assert [(one.kind, one.call) for one in trace.work] == [
        ("copy", 1),
        ("kernel", 2),
        ("kernel", 3),
        ("copy", 5),
    ]
    found = breakdown(trace)
    assert found.total_ns == 180_000
    # The profiler may have missed the first waits.
    assert read_trace({"traceEvents": EVENTS[4:]}, waits[:1] + waits, [285_000], []) is not None
    assert (found.ns["computing"], found.ns["transfer"] >= 45_000) == (50_000, True)


def test_a_trace_without_kernels_is_none() -> None:
    events = [one for one in EVENTS if one.get("cat") == "cuda_runtime"]
    assert read_trace({"traceEvents": events}, [(0, 0)], [1], []) is None
    assert read_trace({"traceEvents": EVENTS[7:14]}, [(0, 0)], [1], []) is None
    assert read_trace({}, [(0, 0)], [1], []) is None


def test_a_trace_comes_back_from_the_profilers_format() -> None:
    made = Loop(reads=1, copy=300 * US, pageable=True).run()
    start_us, shift_ns = 5000.0, 7_654_321
    waits = [start_us - 2000, start_us - 1900, start_us - 1500, start_us - 20]
    events = [call("cudaDeviceSynchronize", at, 5.0, -number) for number, at in enumerate(waits)]
    events[-1]["dur"] = 20.0
    for number, one in enumerate(made.calls):
        ts, dur = start_us + one.start_ns / 1000, (one.end_ns - one.start_ns) / 1000
        events.append(call(one.name, ts, dur, number))
    for one in made.work:
        name = "Memcpy HtoD (Pageable -> Device)" if one.kind == "copy" else "gemm"
        ts, dur = start_us + one.start_ns / 1000, (one.end_ns - one.start_ns) / 1000
        assert one.call is not None
        cat = "gpu_memcpy" if one.kind == "copy" else "kernel"
        events.append(work(name, ts, dur, one.call, cat))
    # By the host's clock, each wait takes a little longer than the profiler says.
    by_host = [
        (
            round(one["ts"] * 1000) - 2 * US - shift_ns,
            round((one["ts"] + one["dur"]) * 1000) + 2 * US - shift_ns,
        )
        for one in events[: len(waits)]
    ]
    marks = [mark + round(start_us * 1000) - shift_ns for mark in made.marks]
    found = read_trace({"traceEvents": events}, by_host, marks, [])
    assert found is not None
    assert found.shift_ns == shift_ns
    assert [one - found.start_ns for one in found.marks] == list(made.marks)
    assert [one.kind for one in found.calls] == [one.kind for one in made.calls]
    assert [one.call for one in found.work] == [one.call for one in made.work]
    assert found.end_ns - found.start_ns == made.end_ns
