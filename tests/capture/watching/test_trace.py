"""The trace of a step, and how the traces of two runs differ."""

from __future__ import annotations

import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import headrace as hr
from headrace.capture.watching.trace import OperationTrace
from headrace.capture.watching.tracer import StepTracer
from headrace.device import Device
from headrace.fake import FakeDevice


def traced(device: Device, work: Any) -> OperationTrace:
    with StepTracer(device, caller=traced.__code__) as tracer:
        work()
    return tracer.trace


def test_two_runs_of_the_same_work_do_not_differ(fake_device: FakeDevice) -> None:
    x = torch.ones(3, device=fake_device.torch_device)

    def work() -> Any:
        return (x * float("nan")).sum() + torch.tensor(0.5)

    assert traced(fake_device, work).difference(traced(fake_device, work)) is None


def test_differences_are_named_with_their_line(fake_device: FakeDevice) -> None:
    x, y = (torch.ones(3, device=fake_device.torch_device) for _ in range(2))
    cases = [
        (lambda: x * 0.9, lambda: x * 0.81, "is given 0.9, and was given 0.81"),
        (lambda: x * -0.0, lambda: x * 0.0, "is given -0.0, and was given 0.0"),
        (lambda: x.sin(), lambda: x.cos(), "aten::sin at"),
        (lambda: x.sin().cos(), lambda: x.sin(), "is computed for some batches only"),
        (lambda: x[:2].sin(), lambda: x[:1].sin(), "is given 2, and was given 1"),
        (lambda: x.sin(), lambda: y.sin(), "another tensor is read for each batch"),
        (lambda: x * torch.tensor(0.5), lambda: x * torch.tensor(0.6), "is given '[[0.5]]'"),
    ]
    for now, before, words in cases:
        found = traced(fake_device, now).difference(traced(fake_device, before))
        assert words in str(found)
        assert f"{__file__}:{now.__code__.co_firstlineno}" in str(found)


def test_a_host_number_that_device_work_returned_is_no_constant() -> None:
    """Attention returns the seed and offset of its dropout on the host, and backward takes them as
    arguments. They differ for each batch; in a capture they stay on the device."""
    seam: Any = SimpleNamespace(
        holds=lambda tensor: tensor.dim() > 0,
        read_host=lambda tensor: tensor.tolist(),
        answering=nullcontext,
    )
    x, drawn = torch.ones(3), iter([0.1, 0.2])

    def work(number: float) -> None:
        offset = x.sum() + next(drawn)  # the fake `holds` says that 0-dim tensors are on the host
        _ = x * (offset * 2)
        _ = x * torch.tensor(number)

    first = traced(seam, lambda: work(0.5))
    found = traced(seam, lambda: work(0.5)).difference(first)
    assert "aten::add" in str(found)  # the number from Python, not the product
    first.operations = [one for one in first.operations if "add" not in one.name]
    drawn = iter([0.3, 0.4])
    for number, differs in ((0.5, False), (0.6, True)):
        again = traced(seam, lambda: work(number))  # noqa: B023
        again.operations = [one for one in again.operations if "add" not in one.name]
        assert (again.difference(first) is not None) == differs


def test_a_storage_among_the_arguments_is_not_read(fake_device: FakeDevice) -> None:
    """Reading it would copy all of it to the host."""
    x = torch.ones(4, device=fake_device.torch_device)
    empty = torch.empty(0, device=fake_device.torch_device)
    waits = len(fake_device.hidden_waits)
    traced(fake_device, lambda: empty.set_(x.untyped_storage(), 0, (2, 2)))
    assert len(fake_device.hidden_waits) == waits


def test_a_capture_that_fails_leaves_everything_as_it_was(capturing: Device) -> None:
    """The loss changes its state, draws on the host and raises, all only during the capture."""
    model = nn.Linear(3, 1).to(capturing.torch_device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    carried = {"h": torch.zeros(1, device=capturing.torch_device), "n": 0}
    before = carried["h"]

    def loss(model: Any, batch: Any) -> torch.Tensor:
        value = model(batch).square().mean()
        if capturing.current_stream().name == "capture":
            carried["h"] = value.detach()
            carried["n"] += 1  # type: ignore[operator]
            random.random()
            torch.rand(1)
            raise ValueError("in the capture alone")
        return value  # type: ignore[no-any-return]

    engine = hr.Engine(model, optimizer, loss, plan="graph", device=capturing)
    random.seed(7)
    torch.manual_seed(7)
    state = (random.getstate(), torch.get_rng_state())
    engine.epoch([torch.ones(2, 3)] * 6)
    assert engine.graphs is not None
    assert "ValueError: in the capture alone" in str(engine.graphs.why)
    assert carried["h"] is before
    assert carried["n"] == 0
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])
    assert not any(group["capturable"] for group in optimizer.param_groups)
    assert engine._builder.parts is not None
    assert engine._builder.parts.update.rates is None
