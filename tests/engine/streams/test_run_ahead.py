"""The run-ahead window: never more steps or bytes in flight than its limits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.device import Device
from headrace.engine import RunAhead
from headrace.fake import Costs, FakeDevice

FREE = Costs(kernel_us=0, query_us=0)


def test_the_host_waits_for_the_oldest_step() -> None:
    with FakeDevice(costs=FREE) as device:
        window = RunAhead(device, steps=3)
        for _ in range(10):
            window.admit()
            device.work(10.0)
            window.launched(device.current_stream())
            assert window.in_flight <= 3
        waits = device.ledger.statistics()["run_ahead"]
        assert waits.count == 7
        assert waits.max_ms == 10.0
        assert device.now_ms == 70.0  # three steps ahead of the device


def test_no_wait_if_the_device_is_faster() -> None:
    with FakeDevice(costs=FREE) as device:
        window = RunAhead(device, steps=1)
        for _ in range(10):
            window.admit()
            device.work(1.0)
            window.launched(device.current_stream())
            device.host_work(2.0)
        assert device.ledger.statistics().count == 0


def test_a_step_larger_than_the_window_runs_alone() -> None:
    with FakeDevice(costs=FREE) as device:
        window = RunAhead(device, steps=8, max_bytes=100)
        for nbytes in (50, 50, 1000, 10):
            window.admit(nbytes)
            device.work(1.0)
            window.launched(device.current_stream())
        assert window.in_flight == 1
        assert device.ledger.statistics()["run_ahead"].count == 3


def test_the_limit_holds_on_every_device(device: Device) -> None:
    window = RunAhead(device, steps=2)
    for _ in range(5):
        window.admit()
        window.launched(device.current_stream())
    assert window.in_flight <= 2


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(0, 5), st.floats(0, 5)), max_size=40),
    st.integers(1, 5),
    st.none() | st.integers(1, 120),
)
def test_limits_hold_for_any_steps(
    steps: list[tuple[int, float, float]], limit: int, max_bytes: int | None
) -> None:
    with FakeDevice(costs=FREE) as device:
        window = RunAhead(device, limit, max_bytes)
        ends: list[tuple[float, int]] = []
        for nbytes, device_ms, host_ms in steps:
            window.admit(nbytes)
            device.work(device_ms)
            window.launched(device.current_stream())
            device_end = device.current_stream().actor.time_ns
            ends.append((device_end, nbytes))
            flying = [size for end, size in ends if end > device.host().time_ns]
            assert len(flying) <= limit
            if max_bytes is not None and len(flying) > 1:
                assert sum(flying) <= max_bytes
            device.host_work(host_ms)


@pytest.mark.parametrize("steps", [1, 8])
def test_events_are_reused(steps: int) -> None:
    with FakeDevice(costs=FREE) as device:
        made = []
        original = device.event
        device.event = lambda **kwargs: made.append(1) or original(**kwargs)  # type: ignore[method-assign,func-returns-value]
        window = RunAhead(device, steps)
        for _ in range(100):
            window.admit()
            device.work(1.0)
            window.launched(device.current_stream())
        assert len(made) <= steps + 1
