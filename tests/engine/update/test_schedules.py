"""Which schedulers an engine accepts. (Those of timm and transformers are in tests/frameworks.)"""

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


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class UserScheduler:
    """A scheduler that is not derived from PyTorch's."""

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
def test_a_users_own_scheduler_is_stepped(every: Any, rate: float) -> None:
    model, optimizer = model_and_optimizer()
    engine = Engine(
        model, optimizer, loss, scheduler=UserScheduler(optimizer), scheduler_every=every
    )
    engine.epoch(DATA)
    assert optimizer.param_groups[0]["lr"] == rate
    engine.load_state_dict(engine.state_dict())


def test_a_scheduler_without_state_dict_is_refused() -> None:
    class Bare:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def step(self) -> None: ...

    model, optimizer = model_and_optimizer()
    with pytest.raises(StepError, match=r"a Bare without state_dict, load_state_dict\(\)"):
        Engine(model, optimizer, loss, scheduler=Bare(optimizer))  # type: ignore[arg-type]


def test_a_scheduler_whose_step_needs_another_argument_is_refused() -> None:
    class Fed(UserScheduler):
        def step(self, temperature: float) -> None: ...  # type: ignore[override]

    model, optimizer = model_and_optimizer()
    with pytest.raises(StepError, match=r"Fed.step\(\) cannot be called without temperature"):
        Engine(model, optimizer, loss, scheduler=Fed(optimizer))


def test_a_plateau_scheduler_with_mode_max_is_refused() -> None:
    """The engine gives it the mean loss, so it would lower the rate when training goes well."""
    model, optimizer = model_and_optimizer()
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
def test_pytorch_schedulers_give_the_rates_of_a_plain_loop(make: Any) -> None:
    _, optimizer = model_and_optimizer()
    scheduler, expected = make(optimizer), []
    for _ in DATA:
        optimizer.step()
        scheduler.step()
        expected.append(optimizer.param_groups[0]["lr"])
    model, optimizer = model_and_optimizer()
    engine = Engine(model, optimizer, loss, scheduler=make(optimizer))
    assert [optimizer.param_groups[0]["lr"] for _ in engine.steps(DATA)] == expected
