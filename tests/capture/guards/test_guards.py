"""The values that graphs freeze: settings of parameter groups, whatever their type."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from headrace.capture.guards.guards import Guards
from headrace.capture.state.state import StepState
from headrace.device import Device
from headrace.errors import CaptureError


def set_first(value: Any) -> None:
    value[0] = 0.5


SETTINGS: list[tuple[Any, Callable[[Any], object]]] = [
    ([0.9, 0.99], set_first),
    (([0.9], 1), lambda value: set_first(value[0])),
    (numpy.arange(3.0), set_first),
    (torch.ones(2), set_first),
    ({"a": 1}, lambda value: value.update(a=2)),
    ({1, 2}, lambda value: value.add(3)),
]


@pytest.mark.parametrize(("value", "change"), SETTINGS)
def test_a_setting_that_changes_in_place(
    fake_device: Device, value: Any, change: Callable[[Any], object]
) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "extra": value}], lr=0.1)
    state = StepState(fake_device, lambda batch: model(batch), (model,), (optimizer,))
    values = Guards(state)
    assert not values.check()  # the first look
    assert not values.check()
    if not isinstance(value, torch.Tensor):
        optimizer.param_groups[0]["extra"] = value = copy.deepcopy(value)
        assert not values.check()  # another object of equal value
    change(value)
    assert values.check()
    assert not values.check()


@pytest.mark.parametrize(("batches", "is_captured"), [(30, False), (150, True)])
def test_frequent_changes_count_no_more_after_a_long_time_without_any(
    fake_device: Device, batches: int, is_captured: bool
) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    state = StepState(fake_device, lambda batch: model(batch), (model,), (optimizer,))
    values, group = Guards(state), optimizer.param_groups[0]

    def train(epochs: int) -> None:
        for _ in range(epochs):
            for batch in range(batches):
                group["momentum"] = min(0.5 + 0.1 * batch, 0.7)  # changes in batches 0, 1 and 2
                values.check()

    if is_captured:
        train(epochs=5)
    else:
        with pytest.raises(CaptureError, match="momentum changes from step to step"):
            train(epochs=5)
