"""State that is carried from batch to batch: as in a plain loop, under every plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.checkpoint import load_checkpoint, save_checkpoint
from headrace.device import Device
from headrace.engine import Carry, Engine
from headrace.errors import StepError
from headrace.fake import FakeDevice

BATCH, TIME, WORDS, HIDDEN = 3, 4, 7, 5
Batch = dict[str, torch.Tensor]


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.recurrent = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
        self.output = nn.Linear(HIDDEN, WORDS)

    def forward(self, tokens: torch.Tensor, carried: Any) -> tuple[torch.Tensor, Any]:
        hidden, carried = self.recurrent(self.embedding(tokens), carried)
        return self.output(hidden), carried


def loss(model: Any, batch: Batch, carried: Any) -> tuple[torch.Tensor, Any]:
    logits, carried = model(batch["tokens"], carried)
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()), carried


def zeros(device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    one = torch.zeros(1, BATCH, HIDDEN, device=device.torch_device)
    return one, one.clone()


def batches(count: int) -> list[Batch]:
    torch.manual_seed(1)
    made = []
    for _ in range(count):
        words = torch.randint(WORDS, (BATCH, TIME + 1))
        ends = torch.rand(BATCH) < 0.3
        made.append({"tokens": words[:, :-1], "targets": words[:, 1:], "ends": ends})
    return made


def made(device: Device) -> tuple[LanguageModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = LanguageModel().to(device.torch_device)
    return model, torch.optim.SGD(model.parameters(), lr=0.3, fused=True)


def plain_losses(
    device: Device,
    data: list[Batch],
    *,
    epochs: int = 1,
    keep: bool = False,
    ends: bool = False,
    accumulate: int = 1,
) -> list[float]:
    """The losses of a loop written by hand."""
    model, optimizer = made(device)
    losses, carried = [], zeros(device)
    for _ in range(epochs):
        if not keep:
            carried = zeros(device)
        for at, batch in enumerate(data):
            moved = {name: value.to(device.torch_device) for name, value in batch.items()}
            value, carried = loss(model, moved, carried)
            (value / accumulate).backward()
            carried = tuple(part.detach() for part in carried)
            if ends:
                mask = moved["ends"].view(1, -1, 1)
                carried = tuple(torch.where(mask, torch.zeros_like(one), one) for one in carried)
            if (at + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(value.item())
    return losses


PLANS = ("baseline", "pipeline", "streams4", "graph")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_losses_of_a_plain_loop(device: Device, plan: str, accumulate: int) -> None:
    data = batches(10)
    expected = plain_losses(device, data, epochs=2, accumulate=accumulate)
    model, optimizer = made(device)
    engine = Engine(
        model,
        optimizer,
        loss,
        plan=plan,
        device=device,
        carry=zeros(device),
        accumulate=accumulate,
        accumulate_by="count",
    )
    losses = [*engine.epoch(data).losses, *engine.epoch(data).losses]
    assert losses == expected
    if plan == "graph" and device.captures:
        assert engine.graphs is not None
        assert engine.graphs.why is None
        assert engine.graphs.replays >= 10


@pytest.mark.parametrize("plan", ["pipeline", "graph"])
def test_kept_at_an_epochs_end(device: Device, plan: str) -> None:
    data = batches(6)
    expected = plain_losses(device, data, epochs=2, keep=True)
    model, optimizer = made(device)
    carry = Carry(zeros(device), at_epoch_end="keep")
    engine = Engine(model, optimizer, loss, plan=plan, device=device, carry=carry)
    assert [*engine.epoch(data).losses, *engine.epoch(data).losses] == expected


@pytest.mark.parametrize("plan", ["pipeline", "graph"])
@pytest.mark.parametrize("ends", ["ends", lambda batch: batch["ends"]])
@pytest.mark.parametrize("by_batch", [False, True])
def test_a_sample_whose_sequence_ends_begins_anew(
    device: Device, plan: str, ends: Any, by_batch: bool
) -> None:
    data = batches(10)
    expected = plain_losses(device, data, epochs=2, ends=True)
    model, optimizer = made(device)
    initial = (lambda batch: zeros(device)) if by_batch else zeros(device)
    carry = Carry(initial, ends=ends, sample_dim=1)
    engine = Engine(model, optimizer, loss, plan=plan, device=device, carry=carry)
    assert [*engine.epoch(data).losses, *engine.epoch(data).losses] == expected
    if plan == "graph" and device.captures:
        assert engine.graphs is not None
        assert engine.graphs.captures == 1


@pytest.mark.parametrize("plan", ["pipeline", "graph"])
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_resumes_from_a_checkpoint_in_the_middle_of_an_epoch(
    device: Device, plan: str, stop: int, tmp_path: Path
) -> None:
    data = batches(9)
    expected = plain_losses(device, data)

    def engine() -> Engine:
        model, optimizer = made(device)
        return Engine(model, optimizer, loss, plan=plan, device=device, carry=zeros(device))

    first, stored = engine(), Path()
    for progress in first.steps(data):
        if progress.batches == stop:
            first.settle()
            stored = save_checkpoint(tmp_path, first.state_dict(), step=stop, device=device)
            break
    second = engine()
    assert second.load_state_dict(load_checkpoint(stored)) == stop
    assert list(second.epoch(data).losses) == expected[stop:]


def test_evaluation_has_a_state_of_its_own(device: Device) -> None:
    data = batches(4)
    model, optimizer = made(device)
    engine = Engine(model, optimizer, loss, plan="pipeline", device=device, carry=zeros(device))
    progress = engine.steps(data)
    next(progress)
    before = [leaf.clone() for leaf in engine.carried]
    evaluated = engine.evaluate(data)
    assert all(torch.equal(one, now) for one, now in zip(before, engine.carried, strict=True))
    assert evaluated.losses == engine.evaluate(data).losses
    progress.close()


@contextmanager
def graph_engine(
    device: Device, loss: Callable[..., Any], carry: Any
) -> Iterator[tuple[Engine, list[float]]]:
    """An engine under graphs, and the losses of the same loop without them."""
    data = batches(12)
    model, optimizer = made(device)
    losses = Engine(model, optimizer, loss, plan="pipeline", device=device, carry=carry).epoch(data)
    model, optimizer = made(device)
    engine = Engine(model, optimizer, loss, plan="graph", device=device, carry=carry)
    yield engine, list(losses.losses)
    assert list(engine.epoch(data).losses) == list(losses.losses)


def test_an_initial_state_with_a_gradient_is_detached(capturing: Device) -> None:
    found = []
    for plan in ("pipeline", "graph"):
        model, optimizer = made(capturing)
        state = tuple(one.requires_grad_() for one in zeros(capturing))
        engine = Engine(model, optimizer, loss, plan=plan, device=capturing, carry=state)
        found.append([engine.epoch(batches(5)).losses for _ in range(2)])
    assert found[0] == found[1]


def test_a_list_that_is_shifted(capturing: Device) -> None:
    """The carried tensors of a batch are those of the batch before, in other places."""

    def shifted(model: Any, batch: Batch, carried: Any) -> tuple[torch.Tensor, Any]:
        hidden = model.embedding(batch["tokens"]).mean(1)
        value = (model.output(hidden + sum(carried)) ** 2).mean()
        return value, [*carried[1:], hidden]

    carry = [torch.zeros(BATCH, HIDDEN, device=capturing.torch_device) for _ in range(3)]
    with graph_engine(capturing, shifted, carry) as (engine, _):
        pass
    assert engine.graphs is not None
    assert engine.graphs.replays > 5


def test_a_memory_that_grows_up_to_a_length(capturing: Device) -> None:
    """As in Transformer-XL: the state has another shape in the first batches."""

    def growing(model: Any, batch: Batch, carried: Any) -> tuple[torch.Tensor, Any]:
        hidden = model.embedding(batch["tokens"])
        memory = torch.cat([carried["memory"], hidden], dim=1)[:, -10:]
        return (model.output(memory) ** 2).mean(), {"memory": memory}

    carry = {"memory": torch.zeros(BATCH, 0, HIDDEN, device=capturing.torch_device)}
    with graph_engine(capturing, growing, carry) as (engine, _):
        pass
    assert engine.graphs is not None
    assert engine.graphs.replays > 4


@pytest.mark.parametrize("graphs", [False, True])
def test_a_failed_batch_leaves_the_state_as_it_was(fake_device: FakeDevice, graphs: bool) -> None:
    data, calls, kept = batches(9), [], []

    def fails_once(model: Any, batch: Batch, carried: Any) -> tuple[torch.Tensor, Any]:
        value, after = loss(model, batch, carried)
        calls.append(1)
        if len(calls) == 3:
            kept.extend(leaf.clone() for leaf in carried)
            raise RuntimeError("no")
        return value, after

    model, optimizer = made(fake_device)
    plan = "graph" if graphs else "pipeline"
    carry = zeros(fake_device)
    engine = Engine(model, optimizer, fails_once, plan=plan, device=fake_device, carry=carry)
    with pytest.raises(RuntimeError):
        engine.epoch(data)
    assert all(torch.equal(one, now) for one, now in zip(kept, engine.carried, strict=True))


def step_of(model: Any, optimizer: Any) -> Callable[..., Any]:
    def step(batch: Batch, carried: Any) -> Any:
        value, carried = loss(model, batch, carried)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        return {"loss": value.detach()}, carried

    return step


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_of_ones_own(device: Device, plan: str) -> None:
    data = batches(10)
    expected = plain_losses(device, data, epochs=2)
    step = step_of(*made(device))
    engine = Engine.from_step(step, plan=plan, device=device, carry=zeros(device))
    losses = [*engine.epoch(data).losses, *engine.epoch(data).losses]
    assert losses == expected
    if plan == "graph" and device.captures:
        assert engine.graphs is not None
        assert engine.graphs.why is None
        assert engine.graphs.replays >= 10


def test_graphed_carries(capturing: Device) -> None:
    data = batches(10)
    expected = plain_losses(capturing, data, epochs=2)
    step = hr.graphed(step_of(*made(capturing)), device=capturing, carry=zeros(capturing))
    losses = []
    for _ in range(2):
        step.carried = None
        for batch in data:
            moved = {name: value.to(capturing.torch_device) for name, value in batch.items()}
            losses.append(step(moved)["loss"])
    assert [value.item() for value in losses] == expected
    assert step.report().why is None
    assert step.report().replays >= 14
    assert [tuple(leaf.shape) for leaf in step.carried] == [(1, BATCH, HIDDEN)] * 2


def test_the_state_can_be_set(capturing: Device) -> None:
    data = batches(8)
    model, optimizer = made(capturing)
    engine = Engine(model, optimizer, loss, plan="graph", device=capturing, carry=zeros(capturing))
    engine.epoch(data)
    assert engine.carried is not None
    seen: list[torch.Tensor] = []
    engine.on_step = lambda progress: seen.append(engine.carried[0].clone())
    last = tuple(leaf.clone() for leaf in engine.carried)
    engine.epoch(data[:1])
    from_zero = seen.pop()
    carry = Carry(zeros(capturing), at_epoch_end="keep")
    engine = Engine(model, optimizer, loss, plan="graph", device=capturing, carry=carry)
    engine.on_step = lambda progress: seen.append(engine.carried[0].clone())
    engine.carried = last
    engine.epoch(data[:1])
    assert not torch.equal(from_zero, seen.pop())
    plain = Engine(model, optimizer, takes_no_state, device=capturing)
    assert plain.carried is None
    with pytest.raises(StepError, match="carries no state"):
        plain.carried = last


def returns_the_loss_alone(model: Any, batch: Batch, carried: Any) -> Any:
    return loss(model, batch, carried)[0]


def returns_a_number(model: Any, batch: Batch, carried: Any) -> Any:
    return loss(model, batch, carried)[0], 5


def takes_no_state(model: Any, batch: Batch) -> Any:
    return loss(model, batch, None)[0]


@pytest.mark.parametrize(
    ("function", "carry", "message"),
    [
        (returns_the_loss_alone, zeros, "returned a Tensor: expected a tuple of two"),
        (returns_a_number, zeros, "holds the int 5: expected tensors only"),
        (takes_no_state, zeros, r"the engine calls loss\(model, batch, carried\)"),
        (loss, lambda device: [], "the initial state is a list without tensors"),
        (loss, lambda device: Carry(zeros(device), at_epoch_end="x"), "at_epoch_end = 'x'"),  # type: ignore[arg-type]
        (loss, lambda device: Carry(zeros(device), ends="x", sample_dim=1), "'x' gave None"),
        (loss, lambda device: Carry(zeros(device), ends="ends"), r"with 3 in dimension 0"),
        (
            loss,
            lambda device: Carry(zeros(device), ends=lambda batch: batch["tokens"]),
            r"gave shape \(3, 4\)",
        ),
    ],
)
def test_mistakes_are_named(
    fake_device: FakeDevice, function: Any, carry: Callable[[Device], Any], message: str
) -> None:
    model, optimizer = made(fake_device)
    with pytest.raises(StepError, match=message):
        Engine(model, optimizer, function, device=fake_device, carry=carry(fake_device)).epoch(
            batches(2)
        )


def test_a_state_elsewhere_and_halving_are_refused(fake_device: FakeDevice) -> None:
    model, optimizer = made(fake_device)
    elsewhere = (torch.zeros(1, BATCH, HIDDEN), torch.zeros(1, BATCH, HIDDEN))
    with pytest.raises(StepError, match="has a tensor on cpu: expected it on"):
        Engine(model, optimizer, loss, device=fake_device, carry=elsewhere).epoch(batches(1))
    with pytest.raises(StepError, match="cannot be halved"):
        Engine(model, optimizer, loss, device=fake_device, carry=elsewhere, on_oom="halve")
    carry = Carry(zeros(fake_device), at_epoch_end="keep")
    engine = Engine(model, optimizer, loss, device=fake_device, carry=carry)
    state = {**engine.state_dict(), "carry": [torch.zeros(1)]}
    engine.load_state_dict(state)
    with pytest.raises(StepError, match="the stored state has 1 tensors and the initial one 2"):
        engine.epoch(batches(1))


def test_a_state_that_was_set_or_loaded_is_the_next_batchs(device: Device) -> None:
    """Also at an epoch's beginning, where the state is otherwise reset."""
    data = batches(3)
    model, optimizer = made(device)
    engine = Engine(model, optimizer, loss, plan="pipeline", device=device, carry=zeros(device))
    ones = tuple(one + 1 for one in zeros(device))
    engine.carried = ones
    assert all(torch.equal(one, now) for one, now in zip(ones, engine.carried, strict=True))
    first = engine.epoch(data).losses[0]
    model, _ = made(device)
    moved = {name: value.to(device.torch_device) for name, value in data[0].items()}
    assert first == loss(model, moved, ones)[0].item()
    other = Engine(model, optimizer, loss, device=device, carry=zeros(device))
    other.load_state_dict({**engine.state_dict()})
    assert all(torch.equal(a, b) for a, b in zip(engine.carried, other.carried, strict=True))


def test_skipped_updates_are_refused(fake_device: FakeDevice) -> None:
    model, optimizer = made(fake_device)
    carry = zeros(fake_device)
    with pytest.raises(StepError, match="would spoil all later ones"):
        Engine(model, optimizer, loss, device=fake_device, carry=carry, on_nonfinite="skip")
