"""The speed of a device: copies in both directions, kernel launches, and whether copies overlap."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from headrace.device import Device, Stream

_COPY_BYTES = 256 << 20
_REPEATS = 5
_LAUNCHES = 2_000


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Measured speeds of a device. Bandwidths are in gigabytes (10^9 bytes) per second.

    `overlap_share` is the part of a copy's time during which another stream computed: 1 if they
    ran at once, 0 if they took turns. `launch_us` is the host time to launch a small kernel:
    without CUDA graphs a step of n kernels takes at least n times as long.
    """

    pinned_to_device_gb_per_s: float
    device_to_pinned_gb_per_s: float
    pageable_to_device_gb_per_s: float
    overlap_share: float
    launch_us: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def measure_speed(device: Device) -> DeviceSpeed:
    """Measure an accelerator. This takes about two seconds and half a gigabyte."""
    buffer = device.pinned.take(_COPY_BYTES)
    pinned = buffer.view((_COPY_BYTES,), torch.uint8)
    pinned.fill_(1)
    pageable = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cpu")
    on_device = device.empty((_COPY_BYTES,), torch.uint8)
    to_device = _median_ms(device, lambda: device.copy(on_device, pinned))
    to_host = _median_ms(device, lambda: device.copy(pinned, on_device))
    # Not `device.copy`: it warns about copies from pageable memory.
    from_pageable = _median_ms(device, lambda: on_device.copy_(pageable, non_blocking=True))
    result = DeviceSpeed(
        pinned_to_device_gb_per_s=_COPY_BYTES / to_device / 1e6,
        device_to_pinned_gb_per_s=_COPY_BYTES / to_host / 1e6,
        pageable_to_device_gb_per_s=_COPY_BYTES / from_pageable / 1e6,
        overlap_share=_overlap_share(device, on_device, pinned, to_device),
        launch_us=_launch_us(device),
    )
    buffer.release()
    return result


def _median_ms(device: Device, work: Callable[[], object]) -> float:
    """Device time of `work`: the median of several runs, after one to warm up."""
    work()
    times = []
    for _ in range(_REPEATS):
        start, end = device.event(timing=True), device.event(timing=True)
        start.record()
        work()
        end.record()
        device.wait(end, "measurement")
        times.append(start.elapsed_ms(end))
    return statistics.median(times)


def _overlap_share(
    device: Device, on_device: torch.Tensor, pinned: torch.Tensor, copy_ms: float
) -> float:
    """The share of a copy that overlaps a computation of about the same length."""
    compute, transfer = device.current_stream(), device.stream("transfer")
    matrix = torch.randn(2048, 2048, device=device.torch_device)
    once_ms = _median_ms(device, lambda: torch.mm(matrix, matrix))
    rounds = max(1, round(copy_ms / once_ms))

    def multiply() -> None:
        for _ in range(rounds):
            torch.mm(matrix, matrix)

    def both() -> None:
        _beside(device, compute, transfer, lambda: device.copy(on_device, pinned))
        multiply()
        compute.wait_stream(transfer)

    compute_ms, both_ms = _median_ms(device, multiply), _median_ms(device, both)
    saved_ms = compute_ms + copy_ms - both_ms
    return max(0.0, min(1.0, saved_ms / min(compute_ms, copy_ms)))


def _beside(device: Device, compute: Stream, other: Stream, work: Callable[[], object]) -> None:
    other.wait_stream(compute)
    with device.use(other):
        work()


def _launch_us(device: Device) -> float:
    small = torch.ones(32, device=device.torch_device)
    for _ in range(100):
        small.add_(1)
    device.synchronize("measurement")
    start = time.perf_counter()
    for _ in range(_LAUNCHES):
        small.add_(1)
    elapsed = time.perf_counter() - start
    device.synchronize("measurement")
    return elapsed / _LAUNCHES * 1e6
