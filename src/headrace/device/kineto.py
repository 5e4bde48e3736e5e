"""Kernels and copies on a device as spans, from the activities that PyTorch's profiler records."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.device.timeline import Kind, Span

_autograd: Any = torch.autograd  # its type stubs lack the private names used here
# A kernel that no model uses. The profiler numbers streams in its own way. So one marker is
# launched on each named stream in turn, and their order in the activities maps numbers to names.
MARKER = "spin_kernel"
_LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")
# Activities on the GPU's lanes that are not work: waits, and the user's own ranges.
_NO_WORK = ("cuda_sync", "gpu_user_annotation", "overhead")


@dataclass(frozen=True, slots=True)
class Activity:
    """One kernel, copy or call of the driver, as Kineto (PyTorch's profiler) recorded it. `stream`
    is CUPTI's number of the stream."""

    name: str
    on_device: bool
    device: int
    stream: int
    start_ns: int
    end_ns: int
    activity_type: str = ""


def is_profiling() -> bool:
    """Whether a profiler is running already: there can be only one."""
    return bool(_autograd._profiler_enabled())


@contextmanager
def profiled(*, graphs: bool) -> Iterator[list[Activity]]:
    """Run the block under the profiler. When it has ended, the list has the device's activities and
    the calls that launched them. Host operators are left out, since recording them would slow the
    block down. `graphs`: whether any graph has been captured."""
    if graphs:
        # CUPTI must not shut down between a graph's capture and its replay.
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    activities: list[Activity] = []
    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA],
        acc_events=True,  # else PyTorch warns about several cycles; there is one
    )
    profile.start()
    try:
        yield activities
    finally:
        profile.stop()
    raw: Any = profile.profiler
    if raw is not None and raw.kineto_results is not None:
        activities += map(_activity, raw.kineto_results.events())


@contextmanager
def chrome_trace() -> Iterator[dict[str, Any]]:
    """Run the block under the profiler, without operators and stacks. When it has ended, the dict
    has its trace file: kernels, copies and the driver's calls, which share correlation ids."""
    content: dict[str, Any] = {}
    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    )
    profile.start()
    try:
        yield content
    finally:
        profile.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        content |= json.loads(path.read_text(encoding="utf-8", errors="replace"))


def _activity(event: Any) -> Activity:
    start_ns = event.start_ns()
    activity_type = getattr(event, "activity_type", None)
    return Activity(
        name=event.name(),
        on_device=event.device_type() != _autograd.DeviceType.CPU,
        device=event.device_index(),
        stream=event.device_resource_id(),
        start_ns=start_ns,
        end_ns=start_ns + event.duration_ns(),
        activity_type="" if activity_type is None else str(activity_type()),
    )


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """What ran on a device in a block. `from_ns` is when it began, by the profiler's clock."""

    spans: list[Span]
    launches: int
    from_ns: int


def device_work(
    activities: Sequence[Activity], device: int, streams: Sequence[str]
) -> DeviceWork | None:
    """What ran on a device, after the markers on each of `streams`, in that order. None if the
    markers are missing: then the profiler records nothing here.
    """
    on_device = sorted(
        (
            activity
            for activity in activities
            if activity.on_device
            and activity.device == device
            and activity.activity_type not in _NO_WORK
        ),
        key=lambda activity: activity.start_ns,
    )
    markers = [activity for activity in on_device if MARKER in activity.name][: len(streams)]
    if len(markers) < len(streams):
        return None
    names = {activity.stream: name for activity, name in zip(markers, streams, strict=True)}
    from_ns = markers[-1].end_ns
    launches = sum(
        not activity.on_device and any(word in activity.name for word in _LAUNCHES)
        for activity in activities
    )
    spans = [
        Span(
            names.get(activity.stream, f"stream {activity.stream}"),
            activity.name,
            _kind(activity),
            activity.start_ns,
            activity.end_ns,
        )
        for activity in on_device
        if activity.start_ns >= from_ns
    ]
    return DeviceWork(spans, launches - len(markers), from_ns)


def _kind(activity: Activity) -> Kind:
    return "copy" if activity.name.lower().startswith(("memcpy", "copy")) else "kernel"
