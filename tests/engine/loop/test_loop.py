"""Every value reaches the caller's loop once and in order, however the loop ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.device import Device
from headrace.errors import NonFiniteError
from headrace.fake import FakeDevice
from headrace.plan import PRESETS, Plan

PLANS = [name for name in PRESETS if name != "max"]
BLOCKING_COPIES = Plan.preset("pipeline").replace(prefetch_depth=0)


class BoomError(Exception):
    pass


def data(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(2, 4, generator=generator) for _ in range(count)]


def new(device: Device, plan: str | Plan = "pipeline", **options: Any) -> hr.Engine:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).to(device.torch_device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    return hr.Engine(
        model, optimizer, lambda m, b: m(b).square().mean(), plan=plan, device=device, **options
    )


class Values:
    """What `on_values` was given."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []

    def __call__(self, step: int, values: dict[str, float]) -> None:
        self.steps.append(step)
        self.losses.append(values["loss"])


@pytest.mark.parametrize("plan", [*PLANS, BLOCKING_COPIES], ids=[*PLANS, "blocking copies"])
@pytest.mark.parametrize("count", [1, 3, 10, 27])
def test_the_loop_sees_every_value(device: Device, plan: str | Plan, count: int) -> None:
    values, in_on_step = Values(), []
    engine = new(device, plan, on_values=values)
    engine.on_step = lambda info: in_on_step.extend(entry.step for entry in info.arrived)
    in_the_loop = [e.step for info in engine.steps(data(count)) for e in info.arrived]
    assert in_the_loop == in_on_step == values.steps == list(range(count))
    assert engine.last_result is not None
    assert values.losses == list(engine.last_result.losses)


@settings(max_examples=50)
@given(
    plan=st.sampled_from([*PLANS, BLOCKING_COPIES]),
    count=st.integers(0, 23),
    accumulate=st.integers(1, 4),
    deferred_every=st.integers(1, 7),
    ends=st.sampled_from(["at its end", "by a break", "by the loader", "by the loss", "max_steps"]),
    at=st.integers(0, 22),
)
def test_each_value_is_handed_out_once(
    plan: str | Plan, count: int, accumulate: int, deferred_every: int, ends: str, at: int
) -> None:
    """However the loop ends, in order, and the same as in `last_result`."""
    plan = Plan.of(plan).replace(deferred_every=deferred_every)

    def loader() -> Iterator[torch.Tensor]:
        for index, batch in enumerate(data(count)):
            if ends == "by the loader" and index == at:
                raise BoomError
            yield batch.fill_(float("nan")) if ends == "by the loss" and index == at else batch

    values = Values()
    in_the_loop: list[int] = []
    with FakeDevice() as device:
        engine = new(device, plan, accumulate=accumulate, on_values=values, on_nonfinite="stop")
        max_steps = at if ends == "max_steps" else None
        try:
            for info in engine.steps(loader(), max_steps=max_steps):
                in_the_loop += [entry.step for entry in info.arrived]
                if ends == "by a break" and info.batch == at:
                    break
        except (BoomError, NonFiniteError):
            assert ends.startswith("by the l")
            assert at < count
    assert engine.last_result is not None
    assert values.steps == list(range(len(values.steps)))
    assert in_the_loop == values.steps[: len(in_the_loop)]
    if ends != "by the loss":  # a bad loss ends the run before it is handed out
        assert values.losses == list(engine.last_result.losses)
        expected = {"by a break": at + 1, "by the loader": at, "max_steps": at * accumulate}
        assert len(values.steps) == min(count, expected.get(ends, count))
    if ends in ("at its end", "max_steps"):
        assert in_the_loop == values.steps


def test_the_last_progress_counts_the_update_of_a_partial_group(device: Device) -> None:
    engine = new(device, accumulate=4)
    updates = [info.updates for info in engine.steps(data(6))]
    assert updates == [0, 0, 0, 1, 1, 2]


def test_a_bad_loss_among_the_last_values_reaches_on_error(device: Device) -> None:
    batches, problems = data(5), []
    batches[4].fill_(float("nan"))
    engine = new(device, on_nonfinite="stop", on_error=problems.append)
    with pytest.raises(NonFiniteError, match="batch 5 of epoch 1"):
        engine.epoch(batches)
    assert [type(problem) for problem in problems] == [NonFiniteError]


def test_a_users_own_step_reports_its_values_too(device: Device) -> None:
    values = Values()
    model = torch.nn.Linear(4, 1).to(device.torch_device)
    engine = hr.Engine.from_step(
        lambda batch: model(batch).mean().detach(), device=device, on_values=values
    )
    seen = [entry.step for info in engine.steps(data(13)) for entry in info.arrived]
    assert seen == values.steps == list(range(13))
