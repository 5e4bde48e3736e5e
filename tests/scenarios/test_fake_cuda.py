"""The engine on `fake_cuda()`: device/cuda.py itself, with its streams, events and graphs."""

from __future__ import annotations

import torch

import headrace as hr
from headrace.device import open_device
from headrace.testing import fake_cuda

PLANS = ("baseline", "interval", "event", "streams4", "pipeline", "graph")


def train(plan: str) -> hr.EpochResult:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).cuda()
    batches = [(torch.randn(3, 4), torch.randint(0, 2, (3,))) for _ in range(8)]
    engine = hr.Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        plan=plan,
        device=open_device("cuda"),
    )
    return engine.epoch(batches)


def test_every_plan_trains_the_same_without_a_race() -> None:
    losses = {}
    for plan in PLANS:
        with fake_cuda():
            result = train(plan)
        assert result.device == "cuda:0"
        losses[plan] = result.losses
        if plan == "graph":
            assert result.statistics.replays > 0
    assert all(losses[plan] == losses["baseline"] for plan in PLANS)
