"""Trace files of every age and kind, and files that are none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from headrace.diagnosis.trace_file import (
    HostSpan,
    around,
    is_trace,
    read_trace_file,
    trace_paths,
)
from headrace.errors import ProgramError
from support.diagnosis.made_traces import US, Loop
from support.diagnosis.trace_files import (
    AUTOGRAD,
    calls_and_work,
    profiler_steps,
    reads,
    span,
    write_trace,
)

TRACE = Loop(kernels=3, reads=1, steps=2).run()


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_events_are_read_by_what_they_say_of_the_gpu(tmp_path: Path, name: str) -> None:
    path = write_trace(
        tmp_path / name,
        calls_and_work(TRACE),
        profiler_steps(TRACE),
        reads(TRACE, "train.py(3): log"),
        [span("aten::mm", 0, 10, "cpu_op", AUTOGRAD), span("overhead", 0, 10, "overhead")],
        [span("ProfilerStep#5", 0, 10, "gpu_user_annotation")],
        [{"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 1.0, "tid": 1}],
        distributedInfo={"rank": 3, "world_size": 8},
    )
    file = read_trace_file(path)
    assert (len(file.host), len(file.device)) == (len(TRACE.calls), len(TRACE.work))
    assert (file.rank, file.device_name, file.has_stacks) == (3, "Made GPU", True)
    assert len(file.named(4711, "ProfilerStep#")) == 2
    assert [one.name for one in file.spans[AUTOGRAD]] == ["aten::mm"]
    # Microseconds of today's date have no room for nanoseconds; those of the trace do.
    first = file.host[0]
    assert (first["ts"] - file.host[1]["ts"]) == pytest.approx(-15.0, abs=0.3)
    assert min(call["ts"] for call in file.host) < 100


def test_names_of_old_versions_and_of_rocm(tmp_path: Path) -> None:
    made = [
        span("hipLaunchKernel", 0, 5 * US, "Runtime", correlation=1),
        span("gemm", 10 * US, 20 * US, "Kernel", correlation=1, stream=7),
        span("hipMemcpyWithStream", 10 * US, 90 * US, "Runtime", correlation=2),
        span("Memcpy HtoD (Host -> Device)", 20 * US, 80 * US, "Memcpy", correlation=2, stream=7),
        span("hipMemcpyAsync", 90 * US, 91 * US, "cuda_runtime", correlation=3),
        span("Memcpy DtoH (Device -> Host)", 95 * US, 96 * US, "Memcpy", correlation=3, stream=7),
        span("aten::mm", 0, 6 * US, "Operator"),
    ]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(made))  # a list of events is a trace, too
    file = read_trace_file(path)
    assert [call["name"] for call in file.host] == [
        *("cudaLaunchKernel", "cudaMemcpyWithStream", "cudaMemcpyAsync"),
    ]
    assert [work["name"] for work in file.device] == [
        *("gemm", "Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pinned)"),
    ]
    assert (file.rank, file.device_name) == (None, "")


def test_the_busiest_of_several_gpus_is_read(tmp_path: Path) -> None:
    other = [span("gemm", 0, 5, "kernel", correlation=0, device=0, stream=7)]
    file = read_trace_file(write_trace(tmp_path / "t.json", calls_and_work(TRACE, 1), other))
    assert len(file.device) == len(TRACE.work)
    assert file.notes == ["the trace has 2 GPUs; this is number 1, with 6 of 7 kernels and copies"]


CALLS = [one for one in calls_and_work(TRACE) if one["cat"] == "cuda_runtime"]
WORK = [one for one in calls_and_work(TRACE) if one["cat"] == "kernel"]
WHOLE = json.dumps({"traceEvents": [*CALLS, *WORK]}).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (WHOLE[:-400], "is cut off"),
        (gzip.compress(WHOLE)[:-40], "is cut off or damaged (Compressed file ended"),
        (gzip.compress(WHOLE)[:60] + b"xx" * 90, "is cut off or damaged"),
        (b"", "t.json: is empty"),
        (b'{"traceEvents": {}}', "JSON without a list of traceEvents"),
        (
            json.dumps([{**one, "args": {"correlation": {}}} for one in [*CALLS, *WORK]]).encode(),
            "no correlation id that both have",
        ),
        (b"print('hello')", "t.json:1: is not JSON"),
        (b'{"nodes": [], "schema": 2}', "JSON without traceEvents (it has 'nodes', 'schema')"),
        (b"[]", "none of its 0 events is PyTorch's"),
        (b"3", "JSON without traceEvents (it has int)"),
        (b'{"traceEvents": [{"ph": "X", "name": "main", "ts": 1}]}', "none of its 1 events"),
        (b'{"kind": "headrace diagnosis", "version": 1}', "`headrace report` shows it"),
        (
            json.dumps([span("aten::mm", 0, 9, "cpu_op")]).encode(),
            "has no kernel of a GPU, only the CPU's 1 operators",
        ),
        (json.dumps(CALLS).encode(), "has no kernel of a GPU"),
        (json.dumps(WORK).encode(), "has 6 kernels and copies of a GPU, but no calls that"),
        (
            json.dumps([*CALLS, {**WORK[0], "args": {"stream": 7}}]).encode(),
            "no correlation id that both have",
        ),
        (json.dumps([{**WORK[0], "ts": "soon"}]).encode(), "event 'gemm' has ts = 'soon'"),
        (b'[{"ph": "X", "cat": "kernel", "name": "k", "ts": NaN}]', "'k' has no finite time"),
    ],
)
def test_what_is_no_trace_of_a_gpu_is_an_error(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(ProgramError) as failed:
        read_trace_file(path)
    assert words in str(failed.value)
    assert str(failed.value).startswith(str(path))


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"none\.json"):
        read_trace_file(tmp_path / "none.json")


def test_traces_are_told_from_programs(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").touch()
    assert is_trace("trace.json")
    assert is_trace("worker0.pt.trace.json.gz")
    assert is_trace(str(tmp_path))
    assert not is_trace(str(tmp_path / "package"))
    assert not is_trace("train.py")


def test_a_folder_stands_for_its_traces(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"has no \*\.json and no \*\.json\.gz"):
        trace_paths([str(tmp_path)])
    for name in ("b.json", "a.json.gz", "notes.txt"):
        (tmp_path / name).touch()
    found = trace_paths([str(tmp_path), "c.json"])
    assert [path.name for path in found] == ["a.json.gz", "b.json", "c.json"]


def test_what_a_thread_was_in_at_each_moment() -> None:
    spans = [
        HostSpan(0, 100, "a"),
        HostSpan(10, 50, "b"),
        HostSpan(20, 30, "c"),
        HostSpan(60, 70, "d"),
    ]
    assert list(around(spans, [5, 25, 40, 55, 65, 100])) == [
        *(("a",), ("a", "b", "c"), ("a", "b"), ("a",), ("a", "d"), ()),
    ]
