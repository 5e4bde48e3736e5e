"""A torchvision model, trained by hand and by the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr
from frameworks.training import EAGER, assert_same, loss_of, needs, seeded, weights
from headrace.fake import FakeDevice

models = needs("torchvision.models")

EPOCHS = 2


def images() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(14, 3, 32, 32, generator=draw)
    labels = torch.randint(0, 5, (14,), generator=draw)
    return DataLoader(TensorDataset(features, labels), batch_size=4, shuffle=True)


def parts() -> tuple[torch.nn.Module, Any, Any]:
    """As in torchvision's reference script, small: SGD, and a scheduler that goes by epochs."""
    seeded(0)
    model = models.resnet18(num_classes=5, width_per_group=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)


def by_hand() -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer, scheduler = parts()
    model.train()
    losses, loader = [], images()
    seeded(5)
    for _ in range(EPOCHS):
        for batch in loader:
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
    return losses, weights(model)


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], dict[str, torch.Tensor]]:
    return by_hand()


def check(expected: Any, plan: str, device: hr.Device) -> None:
    model, optimizer, scheduler = parts()
    engine = hr.Engine(
        model.to(device.torch_device),
        optimizer,
        loss_of,
        scheduler=scheduler,
        scheduler_every="epoch",
        plan=plan,
        device=device,
    )
    loader = images()
    seeded(5)
    assert [one for _ in range(EPOCHS) for one in engine.epoch(loader).losses] == expected[0]
    assert_same(weights(model), expected[1])


@pytest.mark.parametrize("plan", EAGER)
def test_the_same_as_by_hand(expected: Any, plan: str) -> None:
    check(expected, plan, hr.open_device("cpu"))


@pytest.mark.parametrize("plan", ["streams4", "pipeline"])
def test_on_a_device(expected: Any, plan: str) -> None:
    with FakeDevice() as device:
        check(expected, plan, device)
