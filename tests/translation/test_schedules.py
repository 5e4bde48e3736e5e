"""The learning rates, step by step."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.translation.schedules import constant, inverse_sqrt, noam


def optimizer(lr: Any = 123.0) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(1))]}]
    return torch.optim.AdamW(groups, lr=lr)


def rates(made: torch.optim.Optimizer, schedule: Any, steps: int) -> list[float]:
    """The rate of each update, the first included."""
    found = []
    for _ in range(steps):
        (rate,) = {float(group["lr"]) for group in made.param_groups}
        found.append(rate)
        made.step()
        schedule.step()
    return found


class TestSchedules:
    def test_noam(self) -> None:
        made = optimizer()
        found = rates(made, noam(made, width=512, warmup=4), 20)
        expected = [512**-0.5 * min(s**-0.5, s * 4**-1.5) for s in range(1, 21)]
        assert found == pytest.approx(expected)
        assert max(found) == found[3]

    def test_inverse_sqrt(self) -> None:
        made = optimizer()
        found = rates(made, inverse_sqrt(made, warmup=4, peak=0.1), 16)
        assert found[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
        assert found[15] == pytest.approx(0.05)

    def test_constant(self) -> None:
        made = optimizer()
        assert rates(made, constant(made, warmup=2, peak=0.1), 5) == [0.05, 0.1, 0.1, 0.1, 0.1]
        made = optimizer()
        assert rates(made, constant(made, warmup=0, peak=0.1), 2) == [0.1, 0.1]

    def test_a_rate_on_the_device_stays_there(self) -> None:
        rate = torch.tensor(3.0)
        made = optimizer(rate)
        schedule = inverse_sqrt(made, warmup=2, peak=0.5)
        assert all(isinstance(group["lr"], Tensor) for group in made.param_groups)
        assert rates(made, schedule, 2) == pytest.approx([0.25, 0.5])

    @pytest.mark.parametrize(
        "make",
        [
            lambda made, warmup: noam(made, 512, warmup),
            lambda made, warmup: inverse_sqrt(made, warmup, 0.1),
            lambda made, warmup: constant(made, warmup, 0.1),
        ],
    )
    def test_the_state_can_be_loaded_into_another_schedule(self, make: Any) -> None:
        made = optimizer()
        schedule = make(made, 6)
        rates(made, schedule, 4)
        kept = copy.deepcopy((made.state_dict(), schedule.state_dict()))
        expected = rates(made, schedule, 8)
        for order in (1, -1):  # whichever is loaded first, and though it was made otherwise
            again = optimizer()
            resumed = make(again, 3)
            for part, state in [(again, kept[0]), (resumed, kept[1])][::order]:
                part.load_state_dict(state)
            assert rates(again, resumed, 8) == expected

    def test_it_pickles(self) -> None:
        schedule = pickle.loads(pickle.dumps(noam(optimizer(), 512, 10).lr_lambdas))[0]
        assert schedule(0) == pytest.approx(0.1)
