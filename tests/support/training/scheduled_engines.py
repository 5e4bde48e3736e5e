"""Engines with a schedule and averaged weights, for tests that store and restore them."""

from __future__ import annotations

from typing import Any

import torch

from headrace.device import Device
from headrace.engine import Engine
from support.training.engines import data, loss, make_model, weights

BATCHES = data(13)


def make(device: Device, plan: str, **options: Any) -> Engine:
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    return Engine(
        model,
        optimizer,
        loss,
        plan=plan,
        device=device,
        scheduler=schedule,
        ema_decay=0.9,
        deterministic=True,
        **options,
    )


def uninterrupted(device: Device, plan: str, epochs: int, **options: Any) -> Any:
    torch.manual_seed(3)
    engine = make(device, plan, **options)
    torch.manual_seed(4)
    losses = [value for _ in range(epochs) for value in engine.epoch(BATCHES).losses]
    return losses, weights(engine), engine
