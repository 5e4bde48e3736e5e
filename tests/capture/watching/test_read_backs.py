"""What a forward reads back is remembered if it is the same in each call, and never when it is old.

`nn.TransformerEncoder` reads its mask back to see whether it is causal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.device import Device
from support.graphs.sped_up import Made, batch, compare, fused


class Reading(nn.Module):
    """Decides by a number that it reads from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.mask = nn.Buffer(torch.tril(torch.ones(4, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.linear(x))
        return hidden * 2 if bool(self.number(hidden) > 0.5) else hidden @ self.mask

    def number(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class OfItsMask(Reading):
    """As in PyTorch's Transformer."""

    def number(self, hidden: torch.Tensor) -> torch.Tensor:
        causal = torch.ones(4, 4, device=hidden.device).tril()
        return (self.mask == causal).all().float()


class OfHostValues(Reading):
    def number(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tensor([1.0, 2.0]).to(hidden.device).sum() / 3


def made(device: Device, model: nn.Module, before: Callable[[int], object] = bool) -> Made:
    model.to(device.torch_device)
    optimizer = fused(model)

    def step(at: int) -> Any:
        before(at)
        loss = model(batch(device, at)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return (model, optimizer), step


@pytest.mark.parametrize("kind", [OfItsMask, OfHostValues])
def test_what_is_the_same_is_remembered(capturing: Device, kind: type[Reading]) -> None:
    report = compare(capturing, lambda device: made(device, kind()), 12)
    assert (report.parts[0].why, report.parts[0].replays) == (None, 9)


def test_a_mask_that_is_made_by_the_first_call(capturing: Device) -> None:
    """As in a public language model: the layers find the mask by its content."""

    class Late(nn.Module):
        mask: torch.Tensor | None = None

        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.mask is None or len(self.mask) != len(x):
                self.mask = torch.log(torch.tril(torch.ones(len(x), len(x)))).to(x.device)
            out: torch.Tensor = self.encoder(x[:, None], mask=self.mask)
            return out

    report = compare(capturing, lambda device: made(device, Late()), 8)
    assert (report.parts[0].why, report.parts[0].replays) == (None, 5)


def test_a_tensor_that_is_written_to(capturing: Device) -> None:
    def build(device: Device) -> Made:
        model = OfItsMask()
        return made(device, model, lambda at: model.mask.fill_(1.0) if at == 5 else None)

    report = compare(capturing, build, 10)
    assert (report.parts[0].why, report.parts[0].captures) == (None, 2)


def test_a_write_that_leaves_no_trace_is_found_by_a_check(capturing: Device) -> None:
    (model, optimizer), step = made(capturing, OfItsMask())
    with hr.speed_up(model, optimizer, device=capturing) as handle:
        for at in range(6):
            step(at)
        model.mask.data.fill_(1.0)  # type: ignore[union-attr]
        for at in range(6, 20):
            step(at)
        part = handle.report().parts[0]
    assert (part.captures, part.eager["checked again"]) == (2, 1)


class OfItsInput(Reading):
    def number(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.detach().abs().sum()


class OfItsWeight(Reading):
    def number(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear.weight.detach().abs().sum() * 100


class OfStatistics(Reading):
    """Batch normalization writes them in each call."""

    def number(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.norm.running_var is not None
        return self.norm.running_var.sum()


class OfDraws(Reading):
    def number(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.ones(4, device=hidden.device).bernoulli_(0.9).sum()


class OfWhatItWrites(Reading):
    def number(self, hidden: torch.Tensor) -> torch.Tensor:
        count = torch.zeros(1, device=hidden.device)
        count.add_(hidden.detach().abs().sum())
        return count


@pytest.mark.parametrize("kind", [OfItsInput, OfItsWeight, OfStatistics, OfDraws, OfWhatItWrites])
def test_what_may_differ_is_not_remembered(capturing: Device, kind: type[Reading]) -> None:
    report = compare(capturing, lambda device: made(device, kind()), 10)
    assert report.parts[0].replays == 0
    assert report.parts[0].why is not None
