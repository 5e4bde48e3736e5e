"""A step of the user's own under `auto`: one graph where that is faster, else eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.engine import Engine
from headrace.fake import Costs, FakeDevice
from headrace.plan import Plan
from support.training.engines import data, loss, make_model

LAUNCH_BOUND, BUSY = Costs(kernel_us=2, launch_us=30), Costs(kernel_us=20, launch_us=0)


def trained(plan: Any, costs: Costs) -> tuple[Any, Any]:
    """The losses, and the report."""
    with FakeDevice(costs=costs) as device:
        model = make_model(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

        def step(batch: Any) -> torch.Tensor:
            optimizer.zero_grad()
            found = loss(model, batch)
            found.backward()
            optimizer.step()
            return found.detach()

        engine = Engine.from_step(step, plan=plan, device=device)
        losses = engine.epoch(data(60)).losses
        report = engine.graphs
        engine.close()
        return losses, report


@pytest.mark.parametrize(("costs", "pays"), [(LAUNCH_BOUND, True), (BUSY, False)])
def test_what_is_faster_is_kept(costs: Costs, pays: bool) -> None:
    losses, report = trained(Plan.preset("auto"), costs)
    assert (report.way == "whole step") is pays
    assert report.decision.endswith(": graphs are used") is pays
    assert report.memory_bytes > 0 or not pays
    assert losses == trained("pipeline", costs)[0]
