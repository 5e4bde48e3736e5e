"""Monitoring as a callback of Lightning's Trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import headrace as hr

pytest.importorskip("lightning")


def train(steps: int) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(1)
    for _ in range(steps):
        optimizer.step()


@pytest.mark.parametrize("fails", [False, True])
def test_the_loggers_get_the_figures_of_a_fit(fails: bool) -> None:
    logged: list[Any] = []
    logger = SimpleNamespace(log_metrics=lambda values, step: logged.append((values, step)))
    trainer: Any = SimpleNamespace(loggers=[logger, logger], global_step=40)
    callback, module = hr.LightningMonitor(), SimpleNamespace()
    assert callback.latest is None
    callback.on_train_start(trainer, module)
    train(40)
    if fails:
        callback.on_exception(trainer, module, ValueError())
    else:
        callback.on_train_end(trainer, module)
    train(40)  # of another loop
    assert [step for _, step in logged] == [40, 40]
    assert logged[0][0]["steps/step_ms"] > 0
    assert callback.latest is not None
    assert callback.latest.steps == 30
