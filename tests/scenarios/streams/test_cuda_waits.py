"""On CUDA: no host wait but the ledger's, seen by PyTorch's own means."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from headrace.device import Device, open_device
from support.training.engines import data, make_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def cuda() -> Device:
    return open_device("cuda")


def pinned(count: int) -> list[Any]:
    return [tuple(part.pin_memory() for part in batch) for batch in data(count)]


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0, "accumulate": 3, "ema_decay": 0.9}])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_implicit_synchronization(cuda: Device, precision: str, options: Any) -> None:
    engine = make_engine(cuda, "pipeline", precision=precision, **options)
    engine.epoch(pinned(3))
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = engine.epoch(pinned(40))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {w.reason for w in result.waits.reasons} <= {"data", "run_ahead", "losses"}


@pytest.mark.parametrize("plan", ["event", "streams4", "pipeline"])
def test_the_profiler_sees_no_more_waits_than_the_ledger(cuda: Device, plan: str) -> None:
    engine = make_engine(cuda, plan)
    engine.epoch(pinned(3))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        result = engine.epoch(pinned(40))
    calls = Counter(event.name for event in profile.events() if "Synchronize" in event.name)
    waits = result.waits
    assert calls["cudaEventSynchronize"] == waits.blocked - waits["data"].blocked
    assert calls["cudaStreamSynchronize"] == 0
    assert calls["cudaDeviceSynchronize"] <= 2  # the profiler's own, at its start and end
    if plan != "pipeline":
        assert waits["sync"].count == 4  # ceil(40 / 10)


def test_baseline_waits_for_every_batch(cuda: Device) -> None:
    assert make_engine(cuda, "baseline").epoch(pinned(40)).waits["sync"].count == 40
