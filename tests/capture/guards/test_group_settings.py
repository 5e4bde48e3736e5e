"""The settings of parameter groups, as graphs are kept by them."""

from __future__ import annotations

import gc

import torch

from headrace.capture.guards.group_settings import GroupSettings
from headrace.capture.state.state import StepState
from headrace.device import Device


def test_a_setting_at_the_address_of_another_is_another(fake_device: Device) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    state = StepState(fake_device, lambda: None, (), (optimizer,))
    settings, known = GroupSettings(), set()
    for count in range(1, 20):
        gc.collect()
        optimizer.param_groups[0]["mine"] = bytearray(1)
        known.add(settings.read(state))
        assert len(known) == count
    for count in range(20, 40):
        gc.collect()
        optimizer.param_groups[0]["mine"] = torch.ones(1, device=fake_device.torch_device)
        known.add(settings.read(state))
        assert len(known) == count
