"""The operators that the host called, from PyTorch's profiler without CUPTI.

Where CUPTI does not work, these stand for the calls that launch kernels.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

_CLOCK = "headrace clock"
_CLOCK_READINGS = 6
#: Operators that launch nothing, besides views.
_NO_LAUNCH = (
    *("aten::empty", "aten::new_empty", "aten::is_", "aten::result_type", "aten::_has_"),
    *("aten::resize_", "aten::set_", "aten::resolve_", "autograd::", "torch::"),
)
_AUTOGRAD = "autograd::engine::evaluate_function"


class HostOperator(NamedTuple):
    """An operator that launches work or waits for it, by `time.perf_counter_ns`. `call_ns` is when
    the outermost operator around it began, which the script has called."""

    start_ns: int
    end_ns: int
    name: str
    call_ns: int


class HostEvent(NamedTuple):
    """As the profiler has it, by a clock of its own."""

    name: str
    thread: int
    start_ns: int
    end_ns: int


@contextmanager
def profiled_operators() -> Iterator[list[HostOperator]]:
    """Run the block under the profiler, without CUPTI. When it has ended, the list has the
    operators of this thread and of autograd's, in order."""
    found: list[HostOperator] = []
    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    )
    profile.start()
    try:
        readings = [_read_clock() for _ in range(_CLOCK_READINGS)]
        yield found
    finally:
        profile.stop()
    raw: Any = profile.profiler
    events = [
        HostEvent(
            one.name(), one.start_thread_id(), one.start_ns(), one.start_ns() + one.duration_ns()
        )
        for one in raw.kineto_results.events()
    ]
    found += launching_operators(events, readings)


def _read_clock() -> tuple[int, int]:
    start_ns = time.perf_counter_ns()
    with torch.profiler.record_function(_CLOCK):
        pass
    return start_ns, time.perf_counter_ns()


def launching_operators(
    events: Iterable[HostEvent], readings: list[tuple[int, int]]
) -> list[HostOperator]:
    """The innermost operators that are no views. `readings` are when the clock was read."""
    events = sorted(events, key=lambda one: (one.thread, one.start_ns, -one.end_ns))
    clocks = [one for one in events if one.name == _CLOCK]
    if len(clocks) != len(readings):
        return []
    _, clock, reading = min(
        (end - start, clock, (start, end))
        for clock, (start, end) in zip(clocks, readings, strict=True)
    )
    shift_ns = sum(reading) // 2 - (clock.start_ns + clock.end_ns) // 2
    threads = {clock.thread} | {one.thread for one in events if one.name.startswith(_AUTOGRAD)}
    innermost: list[tuple[HostEvent, HostEvent]] = []
    outermost: HostEvent | None = None
    for one in events:
        if one.thread not in threads or not _is_operator(one.name):
            continue
        if outermost is None or not _is_inside(one, outermost):
            outermost = one
        if _launches(one.name):
            if innermost and _is_inside(one, innermost[-1][0]):
                innermost.pop()
            innermost.append((one, outermost))
    return sorted(
        HostOperator(
            one.start_ns + shift_ns, one.end_ns + shift_ns, one.name, call.start_ns + shift_ns
        )
        for one, call in innermost
    )


def _is_inside(one: HostEvent, outer: HostEvent) -> bool:
    return one.thread == outer.thread and one.end_ns <= outer.end_ns


def _is_operator(name: str) -> bool:
    return "::" in name or name.startswith("triton_")


@cache
def _launches(name: str) -> bool:
    """Whether an operator launches anything."""
    if name.startswith("triton_"):
        return True
    if name.startswith(_NO_LAUNCH):
        return False
    schemas: list[Any] = torch._C._jit_get_schemas_for_operator(name)
    return not (schemas and all(map(_is_view, schemas)))


def _is_view(schema: Any) -> bool:
    alias = schema.returns[0].alias_info if schema.returns else None
    return alias is not None and not alias.is_write
