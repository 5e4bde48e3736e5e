"""Reads a trace file of PyTorch's profiler, whoever recorded it.

A file may have a million events, most of which say nothing about the GPU. So each is looked at
while the JSON is parsed, and of most only name, thread and times are kept, or nothing.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from headrace.errors import ProgramError
from headrace.schema import require_regular_file

#: Names of categories up to PyTorch 1.11.
_OLD_CATEGORIES = {
    "runtime": "cuda_runtime",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    "operator": "cpu_op",
    "python": "python_function",
}
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cuda_runtime", "cuda_driver")
_SPANS = ("cpu_op", "user_annotation", "python_function")
_ARGUMENTS = ("correlation", "stream", "device", "bytes")
#: An operator of the forward pass that has one in backward.
FORWARD = "fwdbwd"
_EXPECTED = "expected a trace that torch.profiler has written (`prof.export_chrome_trace`)"
_WITH_CUDA = "record it with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"


class HostSpan(NamedTuple):
    """What the host did: an operator, a block of `record_function`, or a Python function."""

    start_ns: int
    end_ns: int
    name: str


@dataclass(frozen=True, slots=True)
class TraceFile:
    """The events of one process and one device. `host` has the calls of the driver in order,
    `device` what the device ran, `spans` what each thread of the host did, outermost first."""

    path: str
    host: list[dict[str, Any]]
    device: list[dict[str, Any]]
    spans: dict[Any, list[HostSpan]]
    rank: int | None = None
    device_name: str = ""
    has_stacks: bool = False
    notes: list[str] = field(default_factory=list)

    def named(self, thread: Any, *prefixes: str) -> list[HostSpan]:
        """A thread's spans whose names begin so."""
        return [one for one in self.spans.get(thread, ()) if one.name.startswith(prefixes)]


def is_trace(path: str) -> bool:
    """Whether a path on the command line is a trace or a folder of traces, and no program."""
    if Path(path).is_dir():
        return not Path(path, "__main__.py").is_file()
    return path.endswith((".json", ".json.gz"))


def trace_paths(given: Iterable[str]) -> list[Path]:
    """The files given, and those in the folders given."""
    found: list[Path] = []
    for path in map(Path, given):
        if not path.is_dir():
            found.append(path)
            continue
        inside = [*path.glob("*.json"), *path.glob("*.json.gz")]
        if not inside:
            raise ProgramError(f"{path}: has no *.json and no *.json.gz; {_EXPECTED}")
        found += sorted(inside)
    return found


def read_trace_file(path: Path) -> TraceFile:
    """The trace in a file. Raises `ProgramError` if it is none, or says nothing about a GPU."""
    content = _content(path)
    events, facts = content, {}
    if isinstance(content, dict):
        events = content.get("traceEvents")
        facts = content
    if str(facts.get("kind", "")).startswith("headrace"):
        raise ProgramError(
            f"{path}: is a result of Headrace, not a trace: `headrace report` shows it"
        )
    if not isinstance(events, list):
        names = ", ".join(map(repr, list(facts)[:5])) or type(content).__name__
        what = "without a list of traceEvents" if "traceEvents" in facts else "without traceEvents"
        raise ProgramError(f"{path}: is JSON {what} (it has {names}); {_EXPECTED}")
    kept = [event for event in events if isinstance(event, _Event)]
    found = Counter(event.category for event in kept)
    if not kept:
        raise ProgramError(f"{path}: none of its {len(events)} events is PyTorch's; {_EXPECTED}")
    _require_gpu(path, found)
    return _trace_file(path, kept, facts)


@dataclass(slots=True)
class _Event:
    """An event that counts. `arguments` has those of a call or of work."""

    category: str
    name: str
    thread: Any
    start_us: float
    us: float
    arguments: dict[str, Any] | None = None

    def values(self, from_us: float) -> dict[str, Any]:
        """As in the file, by a clock that begins with the trace: a float has no nanoseconds of
        today's date."""
        return {
            "cat": self.category,
            "name": self.name,
            "tid": self.thread,
            "ts": self.start_us - from_us,
            "dur": self.us,
            "args": self.arguments,
        }


def _content(path: Path) -> Any:
    require_regular_file(path, ProgramError)
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_gzip else path.open("rb") as file:
            text = file.read().decode("utf-8-sig", "replace")
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise ProgramError(f"{path}: is cut off or damaged ({problem}); {_EXPECTED}") from problem
    except OSError as problem:
        raise ProgramError(f"{path}: cannot be read ({problem.strerror})") from problem
    if not text.strip():
        raise ProgramError(f"{path}: is empty; {_EXPECTED}")
    try:
        return json.loads(text, object_hook=lambda values: _kept(path, values))
    except ProgramError:
        raise
    except json.JSONDecodeError as problem:
        is_cut_off = not text[problem.pos :].strip() or not text.rstrip().endswith(("}", "]"))
        what = "is cut off" if is_cut_off and text.lstrip()[:1] in ("{", "[") else "is not JSON"
        raise ProgramError(
            f"{path}:{problem.lineno}: {what} ({problem.msg}, character {problem.pos:,} of "
            f"{len(text):,}); {_EXPECTED}"
        ) from problem
    except (ValueError, RecursionError) as problem:
        raise ProgramError(f"{path}: cannot be read as JSON ({problem})") from problem


def _kept(path: Path, values: dict[str, Any]) -> Any:
    """An object of the file as it is kept: events as `_Event` if they count, else as None."""
    if "ph" not in values:
        return values
    category = str(values.get("cat", "")).lower()
    category = _OLD_CATEGORIES.get(category, category)
    if values["ph"] == "s" and category == FORWARD:
        arguments = None
    elif values["ph"] != "X" or category not in (*_ON_DEVICE, *_ON_HOST, *_SPANS):
        return None
    elif category in _SPANS:
        arguments = None
    else:
        given = values.get("args")
        given = given if isinstance(given, dict) else {}
        arguments = {
            name: int(given[name])
            for name in _ARGUMENTS
            if isinstance(given.get(name), int | str) and str(given[name]).isdecimal()
        }
    try:
        start_us, us = float(values["ts"]), max(0.0, float(values.get("dur", 0)))
    except (KeyError, TypeError, ValueError) as problem:
        raise ProgramError(
            f"{path}: event {values.get('name')!r} has ts = {values.get('ts')!r} and dur = "
            f"{values.get('dur')!r}; expected microseconds"
        ) from problem
    if not math.isfinite(start_us + us):
        raise ProgramError(f"{path}: event {values.get('name')!r} has no finite time")
    name = FORWARD if category == FORWARD else sys.intern(str(values.get("name", "")))
    thread = values.get("tid")
    thread = thread if isinstance(thread, int | str) else 0
    return _Event(category, name, thread, start_us, us, arguments)


def _require_gpu(path: Path, found: Counter[str]) -> None:
    operators = found["cpu_op"] + found["user_annotation"]
    if not any(found[category] for category in _ON_DEVICE):
        raise ProgramError(
            f"{path}: has no kernel of a GPU, only the CPU's {operators:,} operators and "
            f"annotations: nothing says what a GPU waited for. If the training ran on one, "
            f"{_WITH_CUDA}, where CUPTI works"
        )
    if not any(found[category] for category in _ON_HOST):
        kernels = sum(found[category] for category in _ON_DEVICE)
        raise ProgramError(
            f"{path}: has {kernels:,} kernels and copies of a GPU, but no calls that launched them "
            f"(cudaLaunchKernel): why the GPU was idle is not known. Expected both: {_WITH_CUDA}"
        )


def _trace_file(path: Path, kept: list[_Event], facts: dict[str, Any]) -> TraceFile:
    from_us = min(event.start_us for event in kept)
    host = [event.values(from_us) for event in kept if event.category in _ON_HOST]
    host.sort(key=lambda event: event["ts"])
    device = [event.values(from_us) for event in kept if event.category in _ON_DEVICE]
    _rename(host, device)
    correlations = {call["args"].get("correlation") for call in host} - {None}
    joined = sum(work["args"].get("correlation") in correlations for work in device)
    if not joined:
        raise ProgramError(
            f"{path}: has {len(device):,} kernels and copies of a GPU and {len(host):,} calls of "
            "the driver, and no correlation id that both have; expected the file as torch.profiler "
            "wrote it"
        )
    notes = []
    by_device = Counter(work["args"].get("device") for work in device)
    busiest = by_device.most_common(1)[0][0]
    if len(by_device) > 1:
        notes.append(
            f"the trace has {len(by_device)} GPUs; this is number {busiest}, with "
            f"{by_device[busiest]:,} of {len(device):,} kernels and copies"
        )
        device = [work for work in device if work["args"].get("device") == busiest]
    spans: dict[Any, list[HostSpan]] = {}
    for event in kept:
        if event.category in _SPANS or event.category == FORWARD:
            start_ns = round((event.start_us - from_us) * 1000)
            end_ns = start_ns + round(event.us * 1000)
            spans.setdefault(event.thread, []).append(HostSpan(start_ns, end_ns, event.name))
    for of_thread in spans.values():
        of_thread.sort(key=lambda one: (one.start_ns, -one.end_ns))
    return TraceFile(
        str(path),
        host,
        device,
        spans,
        _rank(facts),
        _device_name(facts, busiest),
        any(event.category == "python_function" for event in kept),
        notes,
    )


def _rename(host: list[dict[str, Any]], device: list[dict[str, Any]]) -> None:
    """Give what ROCm's calls and copies are called the names that CUDA's have."""
    blocking = set()
    for call in host:
        if call["name"].startswith("hip"):
            call["name"] = f"cuda{call['name'][3:]}"
            if call["name"] == "cudaMemcpyWithStream":
                blocking.add(call["args"].get("correlation"))
    for work in device:
        if work["cat"] == "gpu_memcpy" and "Host" in work["name"]:
            memory = "Pageable" if work["args"].get("correlation") in blocking else "Pinned"
            work["name"] = work["name"].replace("Host", memory)


def _rank(facts: dict[str, Any]) -> int | None:
    info = facts.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    return rank if isinstance(rank, int) else None


def _device_name(facts: dict[str, Any], device: Any) -> str:
    properties = facts.get("deviceProperties")
    for one in properties if isinstance(properties, list) else ():
        if isinstance(one, dict) and one.get("id") == device:
            return str(one.get("name", ""))
    return ""


def around(spans: list[HostSpan], moments: Iterable[int]) -> Iterator[tuple[str, ...]]:
    """What a thread was in at each moment, the outermost first. Both must be in order."""
    open_spans: list[HostSpan] = []
    at = 0
    for moment in moments:
        while at < len(spans) and spans[at].start_ns <= moment:
            while open_spans and open_spans[-1].end_ns <= spans[at].start_ns:
                open_spans.pop()
            open_spans.append(spans[at])
            at += 1
        yield tuple(one.name for one in open_spans if one.end_ns > moment)
