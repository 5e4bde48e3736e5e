"""Which schedulers an engine takes. (tests/foreign has timm's and transformers'.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from headrace.engine import Engine
from headrace.errors import StepError

DATA = [(torch.ones(2, 3), torch.zeros(2, 1))] * 4


def loss(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Own:
    """A scheduler that is none of PyTorch's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] /= 2

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


@pytest.mark.parametrize(("every", "rate"), [("step", 0.1 / 16), ("epoch", 0.1 / 2)])
def test_one_of_your_own(every: Any, rate: float) -> None:
    model, optimizer = parts()
    engine = Engine(model, optimizer, loss, scheduler=Own(optimizer), scheduler_every=every)
    engine.epoch(DATA)
    assert optimizer.param_groups[0]["lr"] == rate
    engine.load_state_dict(engine.state_dict())


def test_one_that_lacks_its_state() -> None:
    class Bare:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def step(self) -> None: ...

    model, optimizer = parts()
    with pytest.raises(StepError, match=r"a Bare without state_dict, load_state_dict\(\)"):
        Engine(model, optimizer, loss, scheduler=Bare(optimizer))  # type: ignore[arg-type]


def test_one_whose_step_wants_something_else() -> None:
    class Fed(Own):
        def step(self, temperature: float) -> None: ...  # type: ignore[override]

    model, optimizer = parts()
    with pytest.raises(StepError, match=r"Fed.step\(\) cannot be called without temperature"):
        Engine(model, optimizer, loss, scheduler=Fed(optimizer))


def test_a_plateau_of_a_metric_that_is_to_rise() -> None:
    """The engine gives it the mean loss: it would lower the rate whenever training goes well."""
    model, optimizer = parts()
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, mode="max")
    with pytest.raises(StepError, match="ReduceLROnPlateau was made with mode='max'"):
        Engine(model, optimizer, loss, scheduler=plateau, scheduler_every="epoch")


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.ConstantLR(optimizer, 0.5, 2),
                lr_scheduler.ExponentialLR(optimizer, 0.9),
            ],
            [2],
        ),
        lambda optimizer: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        ),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=4),
    ],
)
def test_pytorchs_give_the_rates_of_a_plain_loop(make: Any) -> None:
    _, optimizer = parts()
    scheduler, expected = make(optimizer), []
    for _ in DATA:
        optimizer.step()
        scheduler.step()
        expected.append(optimizer.param_groups[0]["lr"])
    model, optimizer = parts()
    engine = Engine(model, optimizer, loss, scheduler=make(optimizer))
    assert [optimizer.param_groups[0]["lr"] for _ in engine.steps(DATA)] == expected
