"""PyTorch's profiler as a device's eyes: its records of kernels and copies as spans."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from headrace.device.timeline import Kind, Span

_autograd: Any = torch.autograd  # whose stubs leave out what is asked of it here
# A kernel that nobody trains with; put on each known stream in turn, it tells by its place in the
# records which of the profiler's own stream numbers that is.
MARKER = "spin_kernel"
_LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")
# Records of GPU lanes that are no work: waits, and the user's own ranges.
_NO_WORK = ("cuda_sync", "gpu_user_annotation", "overhead")


@dataclass(frozen=True, slots=True)
class Record:
    """One of the profiler's, in the plainest form. `stream` is CUPTI's number for it."""

    name: str
    on_device: bool
    device: int
    stream: int
    start_ns: int
    end_ns: int
    activity: str = ""


class Records:
    """Filled when the block of `profiled` has ended."""

    def __init__(self) -> None:
        self.found: list[Record] = []


def is_profiling() -> bool:
    """Whether a profiler is at work already: there can be only one."""
    return bool(_autograd._profiler_enabled())


@contextmanager
def profiled(*, graphs: bool) -> Iterator[Records]:
    """Run the block under the profiler, device records alone: host operators would cost more.
    `graphs`: whether any have been captured."""
    if graphs:
        # It must not take itself down between a graph's capture and its replay.
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    records = Records()
    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA],
        acc_events=True,  # there is one cycle; without, PyTorch warns of others
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
class Seen:
    """A block's work. `from_ns`: when it began, by the profiler's clock."""

    spans: list[Span]
    launches: int
    from_ns: int


def seen(records: Sequence[Record], device: int, streams: Sequence[str]) -> Seen | None:
    """What the records say of a device. The first things that ran there are markers, one on each
    of `streams` in that order; None if they are not there, since then the profiler sees nothing.
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
    return Seen(spans, launches - len(markers), from_ns)


def _kind(record: Record) -> Kind:
    return "copy" if record.name.lower().startswith(("memcpy", "copy")) else "kernel"
