"""A small model, its batches, and engines that train it."""

from __future__ import annotations

import math
from typing import Any

import torch

from headrace.device import Device
from headrace.engine import Engine

EAGER = ["baseline", "interval", "event", "streams4", "pipeline"]


def data(count: int = 23, rows: int = 5) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, 8, generator=generator),
            torch.randint(0, 3, (rows,), generator=generator),
        )
        for _ in range(count)
    ]


def make_model(device: Device, dropout: float = 0.1) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.ReLU(),
        torch.nn.Dropout(dropout),
        torch.nn.Linear(16, 3),
    ).to(device.torch_device)


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_engine(device: Device, plan: Any = "pipeline", **options: Any) -> Engine:
    model = options.pop("model", None) or make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return Engine(model, optimizer, options.pop("loss", loss), plan=plan, device=device, **options)


def weights(engine: Engine) -> list[torch.Tensor]:
    return [parameter.detach().clone().cpu() for parameter in engine.model.parameters()]


def plain_loop(device: Device, batches: list[Any], epochs: int = 1) -> tuple[list[float], Any]:
    """The usual training loop, to compare the engine with. Returns losses and weights."""
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    losses = []
    for _ in range(epochs):
        for batch in batches:
            moved = tuple(part.to(device.torch_device) for part in batch)
            value = loss(model, moved)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def bad_batches(count: int, *bad: int) -> list[Any]:
    """Batches of which those numbered `bad` contain NaN."""
    made = data(count)
    for at in bad:
        made[at] = (made[at][0].clone().index_fill_(1, torch.tensor([0]), math.nan), made[at][1])
    return made
