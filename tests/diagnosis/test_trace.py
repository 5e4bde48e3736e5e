"""Traces as PyTorch's profiler writes them."""

from __future__ import annotations

from typing import Any

from headrace.diagnosis.breakdown import breakdown
from headrace.diagnosis.trace import read_trace

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
    trace = read_trace({"traceEvents": EVENTS}, waits, [285_000], [(108_000, 118_000)])
    assert trace is not None
    assert (trace.start_ns, trace.end_ns, trace.marks) == (110_000, 290_000, (290_000,))
    assert trace.inputs == ((113_000, 123_000),)
    assert [one.kind for one in trace.calls] == [
        *("wait", "copy", "launch"),
        *("launch", "wait", "launch"),
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
