"""Values handed on late: in order, each once, as `item()` gives them."""

from __future__ import annotations

from typing import Any

import torch

from headrace.device import Device
from headrace.integrations.late_values import LateValues


def test_values_arrive_in_order_each_once(device: Device) -> None:
    late, found = LateValues(device), []
    for at in range(7):
        value = torch.full((), at / 3, device=device.torch_device)
        late.push({"loss": value, "at": at}, found.append)
        late.deliver()
    late.drain()
    late.drain()
    late.close()
    exact = [torch.tensor(at / 3).item() for at in range(7)]
    assert found == [{"loss": one, "at": at} for at, one in enumerate(exact)]


def test_numbers_have_the_type_of_item(device: Device) -> None:
    values = [torch.tensor(3), torch.tensor([True]), torch.tensor(0.1, dtype=torch.float64)]
    late = LateValues(device)
    found: list[dict[str, Any]] = []
    named = {str(at): one.to(device.torch_device) for at, one in enumerate(values)}
    late.push(named | {"host": 2.5}, found.append)
    late.drain()
    late.close()
    expected = [*(one.item() for one in values), 2.5]
    assert list(found[0].values()) == expected
    assert [type(one) for one in found[0].values()] == [type(one) for one in expected]


def test_a_user_of_values_may_push_others(device: Device) -> None:
    late, found = LateValues(device), []
    late.push({"a": 1.0}, lambda values: late.push(values, found.append))
    late.drain()
    late.drain()
    late.close()
    assert found == [{"a": 1.0}]
