"""What a pass costs besides its steps. It must not grow with the model: passes may be short."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace.capture.guards.obstacles import hooks_so_far, state_obstacle
from headrace.device import Device, open_device
from headrace.engine import Engine

PACKAGE = f"{Path(headrace.__file__).parent}/"
# What the fake device does is no cost of the engine.
IGNORED = (f"{PACKAGE}fake/", f"{PACKAGE}races/", f"{PACKAGE}source_lines.py")


def engine_of(layers: int, device: Device, plan: str, **options: Any) -> Engine:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(layers)]
    model = nn.Sequential(*blocks).to(device.torch_device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=device.asynchronous)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        found: torch.Tensor = model(batch).square().mean()
        return found

    return Engine(model, optimizer, loss, plan=plan, device=device, **options)


def calls_in(run: Callable[[], object]) -> int:
    """How many functions, C functions included, the package's own code calls."""
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        file = frame.f_code.co_filename
        is_own = file.startswith(PACKAGE) and not file.startswith(IGNORED)
        calls += is_own and event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


OPTIONS: list[dict[str, Any]] = [{}, {"clip_norm": 1.0, "on_error": repr}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("plan", ["baseline", "pipeline", "graph"])
def test_does_not_grow_with_the_model(device: Device, plan: str, options: dict[str, Any]) -> None:
    batches = [torch.ones(3, 4) for _ in range(8)]
    calls = []
    for layers in (2, 20):
        engine = engine_of(layers, device, plan, **options)
        for _ in range(2):
            engine.epoch(batches)
        if engine.graphs is not None:
            assert engine.graphs.why is None
        calls.append(calls_in(lambda: engine.epoch(batches[:1])))  # noqa: B023 - called at once
    few, many = calls
    assert many - few < 18, f"{few} calls with 2 layers, {many} with 20"


def test_a_look_for_hooks_is_no_new_hook() -> None:
    """Otherwise two engines in turns would look again in each pass. (Not on the fake device, which
    registers hooks of its own.)"""
    parts = engine_of(2, open_device("cpu"), "pipeline")._builder.parts
    assert parts is not None
    number = hooks_so_far()
    assert state_obstacle(parts.state) is None
    assert hooks_so_far() == number
    parts.model[0][0].weight.register_hook(lambda gradient: gradient)  # type: ignore[index, operator, union-attr]
    assert hooks_so_far() == number + 1
    assert "a hook of parameter '0.0.weight'" in str(state_obstacle(parts.state))


class Summing(nn.Module):
    """Adds up its inputs in a buffer, and fails then fails at a batch of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.total, torch.Tensor)
        self.total += x.detach().sum(0)
        if x.shape[0] == 1:
            raise ArithmeticError("one row")
        found: torch.Tensor = self.layer(x)
        return found


class TestWhatChangesBetweenPasses:
    def test_a_replaced_module_counts_in_the_norm(self, device: Device) -> None:
        batches = [torch.ones(3, 4) * at for at in range(1, 4)]
        engine = engine_of(2, device, "pipeline", clip_norm=1e-3)
        by_hand = engine_of(2, device, "pipeline")
        optimizer: Any = by_hand._builder.parts.optimizer  # type: ignore[union-attr]
        engine.epoch(batches)
        _train_by_hand(by_hand.model, optimizer, batches, device)
        for model in (engine.model, by_hand.model):
            torch.manual_seed(1)
            model[1] = nn.Linear(4, 4).to(device.torch_device)  # type: ignore[operator]
        engine._builder.parts.optimizer.add_param_group(  # type: ignore[union-attr]
            {"params": list(engine.model[1].parameters())}  # type: ignore[index]
        )
        optimizer.add_param_group({"params": list(by_hand.model[1].parameters())})  # type: ignore[index]
        engine.epoch(batches)
        _train_by_hand(by_hand.model, optimizer, batches, device)
        pairs = zip(engine.model.parameters(), by_hand.model.parameters(), strict=True)
        assert all(torch.equal(one.cpu(), other.cpu()) for one, other in pairs)

    def test_a_replaced_buffer_is_restored(self, device: Device) -> None:
        model = Summing().to(device.torch_device)
        stored = []
        engine = Engine(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda model, batch: model(batch).mean(),
            device=device,
            on_error=lambda problem: stored.append(model.total.tolist()),
        )
        engine.epoch([torch.ones(2, 4)] * 3)
        assert model.total.tolist() == [6.0] * 4
        model.total = torch.full((4,), 100.0).to(device.torch_device)
        with pytest.raises(ArithmeticError, match="one row"):
            engine.epoch([torch.ones(2, 4), torch.ones(1, 4)])
        assert stored == [[102.0] * 4]


def _train_by_hand(model: nn.Module, optimizer: Any, batches: list[Any], device: Device) -> None:
    for batch in batches:
        model(batch.to(device.torch_device)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
