"""Kernels and copies on a device as spans, from the records of PyTorch's profiler (Kineto)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from headrace.device.timeline import Kind, Span

_autograd: Any = torch.autograd  # its type stubs lack the private names used here
# A kernel that no model uses. The profiler numbers streams in its own way. So one marker is
# launched on each named stream in turn, and their order in the records maps numbers to names.
MARKER = "spin_kernel"
_LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")
# Records on the GPU's lanes that are not work: waits, and the user's own ranges.
_NO_WORK = ("cuda_sync", "gpu_user_annotation", "overhead")


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the profiler. `stream` is CUPTI's number of the stream."""

    name: str
    on_device: bool
    device: int
    stream: int
    start_ns: int
    end_ns: int
    activity: str = ""


class Records:
    """The profiler's records; `profiled` fills them when its block has ended."""

    def __init__(self) -> None:
        self.found: list[Record] = []


def is_profiling() -> bool:
    """Whether a profiler is running already: there can be only one."""
    return bool(_autograd._profiler_enabled())


@contextmanager
def profiled(*, graphs: bool) -> Iterator[Records]:
    """Run the block under the profiler. It records device activity only, since records of host
    operators would slow it down. `graphs`: whether any graph has been captured."""
    if graphs:
        # CUPTI must not shut down between a graph's capture and its replay.
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    records = Records()
    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA],
        acc_events=True,  # else PyTorch warns about several cycles; there is one
    )
    profile.start()
    try:
        yield records
    finally:
        profile.stop()
    raw: Any = profile.profiler
    if raw is not None and raw.kineto_results is not None:
        records.found = [_record(event) for event in raw.kineto_results.events()]


def _record(event: Any) -> Record:
    start_ns = event.start_ns()
    activity = getattr(event, "activity_type", None)
    return Record(
        name=event.name(),
        on_device=event.device_type() != _autograd.DeviceType.CPU,
        device=event.device_index(),
        stream=event.device_resource_id(),
        start_ns=start_ns,
        end_ns=start_ns + event.duration_ns(),
        activity="" if activity is None else str(activity()),
    )


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """What ran on a device in a block. `from_ns` is when it began, by the profiler's clock."""

    spans: list[Span]
    launches: int
    from_ns: int


def device_work(
    records: Sequence[Record], device: int, streams: Sequence[str]
) -> DeviceWork | None:
    """What ran on a device, after the markers on each of `streams`, in that order. None if the
    markers are missing: then the profiler records nothing here.
    """
    on_device = sorted(
        (
            record
            for record in records
            if record.on_device and record.device == device and record.activity not in _NO_WORK
        ),
        key=lambda record: record.start_ns,
    )
    markers = [record for record in on_device if MARKER in record.name][: len(streams)]
    if len(markers) < len(streams):
        return None
    names = {record.stream: name for record, name in zip(markers, streams, strict=True)}
    from_ns = markers[-1].end_ns
    launches = sum(
        not record.on_device and any(word in record.name for word in _LAUNCHES)
        for record in records
    )
    spans = [
        Span(
            names.get(record.stream, f"stream {record.stream}"),
            record.name,
            _kind(record),
            record.start_ns,
            record.end_ns,
        )
        for record in on_device
        if record.start_ns >= from_ns
    ]
    return DeviceWork(spans, launches - len(markers), from_ns)


def _kind(record: Record) -> Kind:
    return "copy" if record.name.lower().startswith(("memcpy", "copy")) else "kernel"
