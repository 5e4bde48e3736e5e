"""A captured function: what is captured once, what has a reason, and what is checked again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.device import Device
from support.training.engines import data, loss, make_model, same, weights

Loop = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def model(fake_device: Device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4).to(fake_device.torch_device)


class KeepsTheOld(torch.optim.SGD):
    """Puts a new tensor into its state at every step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.data.clone()
        return super().step(closure)


@pytest.mark.parametrize("way", ["engine", "graphed"])
def test_a_step_is_not_captured_over_and_over(
    fake_device: Device, model: nn.Module, way: str
) -> None:
    optimizer = KeepsTheOld(model.parameters(), lr=0.1, fused=True)
    if way == "engine":
        engine = hr.Engine(
            model, optimizer, lambda m, x: m(x).square().mean(), device=fake_device, plan="graph"
        )
        engine.epoch([torch.ones(4, 4)] * 20)
        report = engine.graphs
    else:

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            found: torch.Tensor = model(x).square().mean()
            found.backward()
            optimizer.step()
            return found.detach()

        graphed = hr.graphed(step, device=fake_device)
        for _ in range(20):
            graphed(torch.ones(4, 4, device=fake_device.torch_device))
        report = graphed.report()
    assert report is not None
    assert report.captures <= 3
    assert "KeepsTheOld puts a new tensor into its state at every step" in str(report.why)


@pytest.mark.parametrize(
    ("more", "named"),
    [(lambda i: {"path": [f"{i}.jpg"]}, "batch['path'][0]"), (lambda i: {"index": i}, "'index'")],
)
def test_a_batch_that_is_always_new_is_told_what_to_leave_out(
    fake_device: Device,
    model: nn.Module,
    more: Callable[[int], dict[str, Any]],
    named: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    engine = hr.Engine(
        model, optimizer, lambda m, b: m(b["x"]).square().mean(), device=fake_device, plan="graph"
    )
    with caplog.at_level(logging.WARNING, "headrace"):
        engine.epoch([{"x": torch.ones(4, 4)} | more(i) for i in range(40)])
    assert engine.graphs is not None
    assert engine.graphs.captures == 0
    assert named in str(engine.graphs.why)
    assert "leave it out of what the loader returns" in caplog.text


def by_model(model: nn.Module, optimizer: Any) -> Iterator[nn.Parameter]:
    return model.parameters()


def by_first_group(model: nn.Module, optimizer: Any) -> Any:
    return optimizer.param_groups[0]["params"]


def by_all_groups(model: nn.Module, optimizer: Any) -> Any:
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("parameters", [by_model, by_first_group, by_all_groups])
def test_a_step_that_takes_its_parameters_from_the_optimizer(
    fake_device: Device, model: nn.Module, parameters: Callable[[nn.Module, Any], Any]
) -> None:
    """It does not read the learning rate beside them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (i + 1))

    @hr.graphed(device=fake_device)
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        found: torch.Tensor = model(x).square().mean()
        found.backward()
        torch.nn.utils.clip_grad_norm_(parameters(model, optimizer), 1.0)
        optimizer.step()
        return found.detach()

    for _ in range(8):
        step(torch.ones(4, 4, device=fake_device.torch_device))
        scheduler.step()
    assert (step.report().why, step.report().captures) == (None, 1)
    assert step.report().replays >= 5


class Trainer:
    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer, self.global_step = model, optimizer, 0
        self.graphed: Any = None

    def update(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(x).square().mean()
        self.optimizer.zero_grad()
        found.backward()
        self.optimizer.step()
        return found.detach()


def _train(self: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = self.graphed(x)
    self.global_step += 1
    return found


@pytest.mark.parametrize("name", ["run_one", "step", "backward", "mean", "zero_grad"])
def test_a_counter_of_the_loop_in_the_step_s_object(
    fake_device: Device, model: nn.Module, name: str
) -> None:
    """Whatever the method is called that counts: the step does not call it."""
    kind = type("Fresh", (Trainer,), {name: _train})
    trainer: Any = kind(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
    trainer.graphed = hr.graphed(trainer.update, device=fake_device)
    for _ in range(6):
        getattr(trainer, name)(torch.ones(4, 4, device=fake_device.torch_device))
    report = trainer.graphed.report()
    assert (report.why, report.captures, report.replays >= 3) == (None, 1, True)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_checking_again_changes_nothing(fake_device: Device, accumulate: int) -> None:
    found = []
    for plan in (hr.Plan.preset("pipeline"), hr.Plan.preset("graph").replace(recheck=7)):
        torch.manual_seed(0)
        model = make_model(fake_device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        engine = hr.Engine(
            model,
            optimizer,
            loss,
            plan=plan,
            device=fake_device,
            accumulate=accumulate,
            clip_norm=0.5,
            deterministic=True,
        )
        torch.manual_seed(5)
        found.append((engine.epoch(data(24)).losses, weights(engine)))
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])
    report = engine.graphs
    assert report is not None
    assert (report.why, report.differed, report.captures) == (None, None, 1)
    assert report.rechecks >= 3
    assert report.replays + report.one_by_one == 24


def test_a_step_whose_checks_keep_differing_runs_eagerly(
    fake_device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    kept = {"time": 0}
    names = ["w_0"]
    scales = type("Scales", (), {"w_0": 1.0})()

    @hr.graphed(device=fake_device, recheck=1)
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * getattr(scales, names[0].replace("w", "w"))

    x = torch.ones(1, device=fake_device.torch_device)
    with caplog.at_level(logging.WARNING, "headrace"):
        for kept["time"] in range(24):
            scales.w_0 = float(kept["time"] // 4)
            step(x)
    report = step.report()
    assert "it changes while its graphs are in use: aten::mul" in str(report.why)
    assert "may have repeated the old value" in caplog.text


def test_no_graph_is_checked_if_the_plan_says_so(fake_device: Device) -> None:
    model = make_model(fake_device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    plan = hr.Plan.preset("graph").replace(recheck=0)
    engine = hr.Engine(model, optimizer, loss, plan=plan, device=fake_device)
    engine.epoch(data(16))
    assert engine.graphs is not None
    assert (engine.graphs.rechecks, engine.graphs.replays) == (0, 14)
