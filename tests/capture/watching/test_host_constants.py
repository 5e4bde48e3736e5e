"""What a forward makes on the host and copies to the device is read from there by a graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import headrace as hr
from headrace.capture.watching.host_constants import HostConstants
from headrace.device import Device, host_copy, host_wait
from headrace.fake import FakeDevice
from headrace.source_lines import Site, users_line
from support.graphs.sped_up import Made, batch, compare, fused


class Moved(nn.Module):
    """Adds values that it makes on the host to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) + self.shift(x).to(x.device)
        return out

    def shift(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Identity(Moved):
    """As in PointNet."""

    def shift(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.arange(4).astype(np.float32)).view(1, 4).repeat(len(x), 1)


class Steps(Moved):
    def shift(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(x)).view(-1, 1).float()


class InPlace(Moved):
    """Writes to the values on the device, which must not reach the next replay."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = torch.tensor([1.0, 2.0, 3.0, 4.0]).to(x.device)
        shift += 1
        into = torch.zeros(4, device=x.device)
        into.copy_(torch.tensor([5, 6, 7, 8]))
        out: torch.Tensor = self.linear(x) * shift + into
        return out


def made(device: Device, model: nn.Module) -> Made:
    model.to(device.torch_device)
    optimizer = fused(model)

    def step(at: int) -> Any:
        loss = model(batch(device, at, 3 + at % 2)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return (model, optimizer), step


@pytest.mark.parametrize("kind", [Identity, Steps, InPlace])
def test_the_same_values_in_each_call(capturing: Device, kind: type[nn.Module]) -> None:
    report = compare(capturing, lambda device: made(device, kind()), 12)
    assert (report.parts[0].why, report.parts[0].replays) == (None, 8)


_COUNTER = [0]


class Counting(Moved):
    def shift(self, x: torch.Tensor) -> torch.Tensor:
        _COUNTER[0] += 1
        return torch.full((1, 4), float(_COUNTER[0]))


class Drawing(Moved):
    def shift(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rand(1, 4)


class Large(Moved):
    def shift(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones(20_000, 4).to(x.device)[: len(x)]


class Reading(Moved):
    def shift(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach().cpu().clone()


@pytest.mark.parametrize("kind", [Counting, Drawing, Large, Reading])
def test_other_values_in_each_call(capturing: Device, kind: type[nn.Module]) -> None:
    def build(device: Device) -> Made:
        _COUNTER[0] = 0
        return made(device, kind())

    report = compare(capturing, build, 16)
    assert report.parts[0].replays == 0
    assert report.parts[0].why is not None


def test_a_value_that_changes_later_is_found_by_a_check(capturing: Device, tmp_path: Path) -> None:
    stored = tmp_path / "number"

    class Scheduled(Moved):
        def shift(self, x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(np.full((1, 4), float(stored.read_text()), np.float32))

    stored.write_text("1")
    (model, optimizer), step = made(capturing, Scheduled())
    with hr.speed_up(model, optimizer, plan="graph", device=capturing) as handle:
        for at in range(14):
            step(2 * at)
        assert handle.report().parts[0].captures == 1
        stored.write_text("2")
        for at in range(40):
            step(2 * at)
        assert handle.report().parts[0].captures == 2


@pytest.mark.parametrize("waits_by_itself", [False, True])
def test_a_copy_is_excused_with_its_wait(waits_by_itself: bool) -> None:
    """CUDA reports the wait of a copy when the user's call returns, after the copy was noted."""
    with FakeDevice() as device:
        constants, source = HostConstants(device), torch.ones(3)
        constants.note(source, source.to(device.torch_device))
        site = users_line()
    site = Site(site.file, site.line - 1)
    met = [host_copy(site), host_wait(site)]
    other = [host_wait(site)] if waits_by_itself else []
    assert constants.excuse([*met, *other]) == other
    assert len(constants.values) == 1


def test_what_is_copied_without_a_wait_is_no_constant() -> None:
    with FakeDevice() as device:
        constants, source = HostConstants(device), torch.ones(3)
        constants.note(source, source.to(device.torch_device))
    assert constants.excuse([]) == []
    assert constants.values == []
