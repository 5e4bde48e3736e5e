"""What a step shows besides numbers, and what is called how often."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headrace.device import Device
from headrace.engine import Engine, Progress
from headrace.errors import StepError
from headrace.fake import FakeDevice

DATA = [torch.full((2, 3), float(at + 1)) for at in range(12)]


def made(device: Device, **options: Any) -> Engine:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(device.torch_device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    return Engine(model, optimizer, loss, device=device, **options)


def loss(model: Any, batch: torch.Tensor) -> dict[str, Any]:
    predicted = model(batch)
    shown = {"predicted": predicted, "inputs": batch, "weight": model.weight}
    return {"loss": predicted.square().mean(), "outputs": shown}


def outputs_of_a_plain_loop(device: Device) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(device.torch_device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    found = []
    for batch in DATA:
        returned = loss(model, batch.to(device.torch_device))
        found.append({name: one.detach().clone() for name, one in returned["outputs"].items()})
        returned["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("plan", ["baseline", "pipeline", "streams4", "graph"])
def test_outputs_are_those_of_their_batch(device: Device, plan: str) -> None:
    expected = outputs_of_a_plain_loop(device)
    engine, found = made(device, plan=plan), []
    engine.on_outputs = lambda step, outputs: found.append((step, outputs))
    arrived = [entry for progress in engine.steps(DATA) for entry in progress.arrived]
    assert [step for step, _ in found] == list(range(len(DATA)))
    assert all(same(one, other) for (_, one), other in zip(found, expected, strict=True))
    assert [entry.outputs for entry in arrived] == [outputs for _, outputs in found]
    assert all(device.holds(one) and not one.requires_grad for one in found[-1][1].values())
    assert "outputs" not in arrived[0].values


def test_outputs_of_an_evaluation(device: Device) -> None:
    engine, found = made(device), []
    engine.evaluate(DATA, on_outputs=lambda step, outputs: found.append(outputs["predicted"]))
    with torch.no_grad():
        expected = [engine.model(batch.to(device.torch_device)) for batch in DATA]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("plan", ["pipeline", "graph"])
def test_outputs_of_a_step_of_ones_own(device: Device, plan: str) -> None:
    model = nn.Linear(3, 2).to(device.torch_device)

    def step(batch: torch.Tensor) -> dict[str, Any]:
        with torch.no_grad():
            shown = model(batch)
        return {"loss": shown.mean(), "outputs": [shown]}

    engine = Engine.from_step(step, device=device, plan=plan)
    found: list[torch.Tensor] = []
    engine.on_outputs = lambda step, outputs: found.append(outputs[0])
    engine.epoch(DATA)
    with torch.no_grad():
        expected = [model(batch.to(device.torch_device)) for batch in DATA]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert engine.updates == len(DATA)


@pytest.mark.parametrize("plan", ["pipeline", "graph"])
def test_outputs_in_memory_that_the_step_writes_again(device: Device, plan: str) -> None:
    buffer = torch.zeros(2, 3, device=device.torch_device)

    def step(batch: torch.Tensor) -> dict[str, Any]:
        buffer.copy_(batch)
        return {"loss": batch.mean(), "outputs": buffer}

    engine = Engine.from_step(step, device=device, plan=plan)
    found: list[torch.Tensor] = []
    engine.on_outputs = lambda step, outputs: found.append(outputs)
    engine.epoch(DATA)
    assert [one[0, 0].item() for one in found] == [batch[0, 0].item() for batch in DATA]


def test_outputs_of_a_halved_batch(fake_device: FakeDevice) -> None:
    found: list[Any] = []
    expected = outputs_of_a_plain_loop(fake_device)[0]
    calls: list[int] = []

    def fails_once(model: Any, batch: torch.Tensor) -> Any:
        calls.append(len(batch))
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no")
        return loss(model, batch)

    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(fake_device.torch_device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    engine = Engine(model, optimizer, fails_once, device=fake_device, on_oom="halve")
    engine.on_outputs = lambda step, outputs: found.append(outputs)
    engine.epoch(DATA[:1])
    assert calls == [2, 1, 1]
    assert torch.equal(found[0]["predicted"], expected["predicted"])


# --- on_update ------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_on_update_every_n_updates(device: Device, accumulate: int) -> None:
    engine = made(device, accumulate=accumulate, on_update_every=3)
    seen: list[tuple[int, int]] = []

    def note(progress: Progress) -> None:
        seen.append((progress.batches, engine.updates))

    engine.on_update = note
    engine.epoch(DATA)
    engine.epoch(DATA[:5])
    updates = [(3, 3), (6, 6), (9, 9), (12, 12), (3, 15)] if accumulate == 1 else []
    updates = updates or [(6, 3), (12, 6), (5, 9)]  # the last one is that of a partial group
    assert seen == updates


def test_on_update_every_must_be_a_whole_number(fake_device: FakeDevice) -> None:
    with pytest.raises(StepError, match="on_update_every"):
        made(fake_device, on_update_every=0).epoch(DATA)


# --- lr -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["baseline", "pipeline", "streams4", "graph"])
def test_a_learning_rate_by_update(device: Device, plan: str) -> None:
    def get_lr(update: int) -> float:
        return 0.01 / (1 + update)

    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(device.torch_device)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0, fused=True)
    expected = []
    for update, batch in enumerate(DATA):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(update)
        value = loss(model, batch.to(device.torch_device))["loss"]
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        expected.append(value.item())
    engine = made(device, plan=plan, lr=get_lr)
    first = list(engine.epoch(DATA[:7]).losses)
    state = engine.state_dict()
    again = made(device, plan=plan, lr=get_lr)
    again.load_state_dict(state)
    assert first + list(again.epoch(DATA[7:]).losses) == expected
    if plan == "graph" and device.captures:
        assert engine.graphs is not None
        assert engine.graphs.replays > 2


def test_rates_of_several_groups(fake_device: FakeDevice) -> None:
    model = nn.Linear(3, 2).to(fake_device.torch_device)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    engine = Engine(
        model, optimizer, loss, device=fake_device, lr=lambda update: [0.1 * update, 0.2]
    )
    engine.epoch(DATA[:3])
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.3), 0.2]


@pytest.mark.parametrize(
    ("lr", "message"),
    [
        (0.1, "lr is 0.1: expected a function of the update"),
        (lambda update: [0.1, 0.2], r"returned \[0.1, 0.2\] for update 0: expected a number"),
        (lambda update: -1, "returned -1 for update 0"),
        (lambda update: float("nan"), "returned nan for update 0"),
        (lambda update: None, "returned None for update 0"),
        (lambda update: 0.1 if update < 2 else "x", "returned 'x' for update 2"),
    ],
)
def test_a_wrong_learning_rate_is_named(fake_device: FakeDevice, lr: Any, message: str) -> None:
    with pytest.raises(StepError, match=message):
        made(fake_device, lr=lr).epoch(DATA)


def test_a_rate_and_a_scheduler(fake_device: FakeDevice) -> None:
    model = nn.Linear(3, 2).to(fake_device.torch_device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(StepError, match="both lr and scheduler"):
        Engine(model, optimizer, loss, device=fake_device, lr=lambda n: 0.1, scheduler=scheduler)
