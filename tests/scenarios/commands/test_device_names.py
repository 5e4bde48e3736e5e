"""Whatever takes a device takes its name, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.errors import DeviceNotFoundError

PARTS: dict[str, Callable[[Any], Any]] = {
    "DeferredScalars": hr.DeferredScalars,
    "Monitor": hr.Monitor,
    "Prefetcher": lambda device: hr.Prefetcher([], device),
    "RunAhead": lambda device: hr.RunAhead(device, 2),
    "StreamManager": hr.StreamManager,
    "Watchdog": lambda device: hr.Watchdog(device, 60),
    "prefetch": lambda device: hr.prefetch([], device),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["cpu", "auto", torch.device("cpu")])
def test_a_name_or_a_torch_device(part: str, name: Any) -> None:
    assert PARTS[part](name) is not None


@pytest.mark.parametrize("part", PARTS)
def test_one_that_is_not_here(part: str) -> None:
    with pytest.raises(DeviceNotFoundError, match=r"no device 'cuda:77' on this machine; here: "):
        PARTS[part]("cuda:77")


def test_values_come_back_through_a_device_by_name() -> None:
    deferred = hr.DeferredScalars("cpu", every=2)
    for step in range(3):
        deferred.push(step, torch.tensor(float(step)))
    assert [entry.values["loss"] for entry in deferred.drain()] == [0.0, 1.0, 2.0]


def test_streams_are_made_by_name() -> None:
    with hr.StreamManager("cpu", 2) as manager:
        event = manager.create_event()
        manager.record_event(event, "transfer")
        manager.wait_event("forward", event)
        assert str(manager.device) == "cpu"


def test_steps_are_bounded_on_a_device_by_name() -> None:
    window, device = hr.RunAhead("cpu", 2), hr.open_device("cpu")
    for _ in range(5):
        window.admit()
        window.launched(device.current_stream())
    assert window.in_flight <= 2
