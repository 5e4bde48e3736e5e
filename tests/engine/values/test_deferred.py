"""Deferred values arrive in order, each exactly once. Only `drain` waits for them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.device import Device
from headrace.engine import DeferredScalars, DeferredValues
from headrace.errors import DeferredError
from headrace.fake import Costs, FakeDevice


def on(device: Device, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((), value, device=device.torch_device, dtype=dtype)


def steps(entries: list[DeferredValues]) -> list[int]:
    return [entry.step for entry in entries]


@pytest.mark.parametrize("every", [1, 3, 10])
def test_in_order_exactly_once(device: Device, every: int) -> None:
    deferred = DeferredScalars(device, every)
    found: list[DeferredValues] = []
    for step in range(25):
        deferred.push(step, on(device, step / 7))
        found += deferred.ready()
    found += deferred.drain()
    assert steps(found) == list(range(25))
    assert [entry.values["loss"] for entry in found] == [
        torch.tensor(step / 7).item() for step in range(25)
    ]
    assert deferred.drain() == []
    assert deferred.pending == 0
    deferred.close()
    assert device.pinned.lent == 0


def test_tensors_and_python_numbers_together(device: Device) -> None:
    deferred = DeferredScalars(device, 2)
    deferred.push(0, {"loss": on(device, 1.5), "weight": 30, "accuracy": on(device, 0.25)})
    (entry,) = deferred.drain()
    assert entry.values == {"loss": 1.5, "weight": 30.0, "accuracy": 0.25}
    assert list(entry.values) == ["loss", "weight", "accuracy"]


def test_numbers_alone_never_touch_the_device() -> None:
    with FakeDevice() as device:
        deferred = DeferredScalars(device, 3)
        for step in range(4):
            deferred.push(step, float(step))
        assert steps(deferred.drain()) == [0, 1, 2, 3]
        assert device.timeline().spans == ()


def test_keys_may_change(device: Device) -> None:
    deferred = DeferredScalars(device, 4)
    given_values: list[dict[str, Any]] = [
        {"loss": on(device, 1.0)},
        {"loss": on(device, 2.0), "extra": on(device, 5.0)},
        {"other": on(device, 3.0, torch.float64)},
        {"loss": on(device, 4.0)},
        {},
    ]
    for step, values in enumerate(given_values):
        deferred.push(step, values)
    assert [entry.values for entry in deferred.drain()] == [
        {"loss": 1.0},
        {"loss": 2.0, "extra": 5.0},
        {"other": 3.0},
        {"loss": 4.0},
        {},
    ]


def test_the_order_of_keys_may_change(device: Device) -> None:
    deferred = DeferredScalars(device, 4)
    deferred.push(0, {"loss": on(device, 1.0), "accuracy": on(device, 0.5)})
    deferred.push(1, {"accuracy": on(device, 0.5), "loss": on(device, 1.0)})
    for entry in deferred.drain():
        assert entry.values == {"loss": 1.0, "accuracy": 0.5}


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float64, 0.1),
        (torch.int64, 2**52 + 1),
        (torch.bfloat16, 3.140625),
        (torch.float16, 65504.0),
        (torch.bool, 1.0),
    ],
)
def test_numbers_are_exact(device: Device, dtype: torch.dtype, value: float) -> None:
    deferred = DeferredScalars(device)
    deferred.push(0, on(device, value, dtype))
    assert deferred.drain()[0].values["loss"] == value


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_comes_with_its_step(device: Device, bad: float) -> None:
    deferred = DeferredScalars(device, 4)
    for step in range(9):
        deferred.push(step, {"loss": on(device, bad if step == 6 else 1.0), "a": on(device, 1.0)})
    found = {entry.step: entry.non_finite for entry in deferred.drain() if entry.non_finite}
    assert found == {6: ("loss",)}


def test_ready_never_blocks_and_drain_is_in_the_ledger() -> None:
    with FakeDevice(costs=Costs(kernel_us=0, query_us=0, copy_us=0)) as device:
        deferred = DeferredScalars(device, 2)
        device.work(50.0)
        for step in range(4):
            deferred.push(step, on(device, step))
        assert deferred.ready() == []
        assert device.ledger.statistics().count == 0
        assert steps(deferred.drain()) == [0, 1, 2, 3]
        assert device.ledger.statistics()["losses"].total_ms == pytest.approx(50.0, abs=0.01)


def test_memory_is_bounded() -> None:
    with FakeDevice(costs=Costs(kernel_us=1000)) as device:
        deferred = DeferredScalars(device, 2)
        for step in range(200):  # the host is far ahead of the device, and nobody reads
            deferred.push(step, on(device, step))
        assert device.pinned.held_bytes <= 6 * 512
        assert device.memory().peak_allocated < 200
        assert device.ledger.statistics()["deferred_full"].count > 0
        assert steps(deferred.drain()) == list(range(200))


def test_the_tensor_may_be_overwritten_at_once(device: Device) -> None:
    deferred, loss = DeferredScalars(device, 3), on(device, 0.0)
    for step in range(7):
        loss.fill_(step)
        deferred.push(step, loss)
    assert [entry.values["loss"] for entry in deferred.drain()] == [float(s) for s in range(7)]


def test_a_loss_in_a_graph_is_not_kept_alive(device: Device) -> None:
    weight = torch.ones(3, device=device.torch_device, requires_grad=True)
    deferred = DeferredScalars(device)
    deferred.push(0, (weight * 2).sum())
    assert deferred.drain()[0].values["loss"] == 6.0


def test_wrong_arguments_are_refused(device: Device) -> None:
    with pytest.raises(DeferredError, match=r"'loss' has shape \(2,\): expected a single number"):
        DeferredScalars(device).push(0, torch.ones(2, device=device.torch_device))
    for every in (0, -1, 1.5, True):
        with pytest.raises(DeferredError, match="every = "):
            DeferredScalars(device, every)  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from(["push", "other", "ready", "flush"]), max_size=60),
    st.integers(1, 5),
    st.floats(0, 100),
)
def test_any_order_of_calls_loses_nothing(calls: list[str], every: int, kernel_us: float) -> None:
    with FakeDevice(costs=Costs(kernel_us=kernel_us)) as device:
        deferred, found, pushed = DeferredScalars(device, every), [], 0
        for call in calls:
            if call == "push":
                deferred.push(pushed, on(device, pushed))
            elif call == "other":
                deferred.push(pushed, {"a": on(device, pushed), "b": on(device, 1.0)})
            elif call == "ready":
                found += deferred.ready()
            else:
                deferred.flush()
            pushed += call in ("push", "other")
        assert deferred.pending + len(found) == pushed
        found += deferred.drain()
    assert steps(found) == list(range(pushed))
    assert [next(iter(entry.values.values())) for entry in found] == [
        float(n) for n in range(pushed)
    ]
