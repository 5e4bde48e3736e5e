"""A step reports values from before its update, and counts its updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headrace as hr
from headrace.device import Device
from support.training.engines import EAGER, data, loss, make_engine, make_model


@pytest.mark.parametrize("on_nonfinite", ["report", "skip"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("plan", [*EAGER, "graph"])
def test_a_metric_that_is_a_view_of_a_weight_has_the_value_before_the_update(
    device: Device, plan: str, accumulate: int, on_nonfinite: str
) -> None:
    before: list[tuple[float, float]] = []

    def with_weights(model: Any, batch: Any) -> dict[str, torch.Tensor]:
        weight = model[0].weight
        return {"loss": loss(model, batch), "view": weight[0, 0], "detached": weight.detach()[1, 1]}

    def watched(model: Any, batch: Any) -> dict[str, torch.Tensor]:
        values = with_weights(model, batch)
        before.append((float(values["view"].detach()), float(values["detached"])))
        return values

    options = {"accumulate": accumulate, "on_nonfinite": on_nonfinite}
    make_engine(device, "baseline", loss=watched, **options).epoch(data(8))
    seen: list[tuple[float, float]] = []
    make_engine(
        device,
        plan,
        loss=with_weights,
        on_values=lambda step, values: seen.append((values["view"], values["detached"])),
        **options,
    ).epoch(data(8))
    assert seen == before


def test_a_loss_computed_with_gradients_is_not_copied(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is new memory, which no update changes."""
    copies: list[torch.Tensor] = []
    clone = torch.Tensor.clone

    def counted(self: torch.Tensor, **options: Any) -> torch.Tensor:
        copies.append(self)
        return clone(self, **options)

    engine = make_engine(device, model=make_model(device, 0.0))
    engine.epoch(data(4))
    monkeypatch.setattr(torch.Tensor, "clone", counted)
    engine.epoch(data(4))
    assert not copies


def test_a_users_own_step_counts_each_batch_as_an_update(device: Device) -> None:
    model = make_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        return value.detach()

    engine = hr.Engine.from_step(step, device=device)
    seen = [(progress.batches, progress.updates) for progress in engine.steps(data(3))]
    assert seen == [(1, 1), (2, 2), (3, 3)]
