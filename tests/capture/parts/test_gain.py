"""What graphs gain is measured on real steps, which stay those of the plain loop."""

from __future__ import annotations

import gc
import logging
from typing import Any, Literal

import pytest
import torch

import headrace as hr
from headrace.capture import Counts, Gain
from headrace.device import Device
from headrace.errors import StepError
from headrace.fake import FakeDevice
from support.graphs.sped_up import batch, fused, host, small


def trained(
    device: FakeDevice,
    plan: Literal["auto", "graph"] | None,
    extra_ms: float = 0.0,
    steps: int = 70,
) -> tuple[Any, hr.SpeedUpReport | None, Any]:
    """The losses, the report, and the model after the loop. A step with a graph takes longer by
    `extra_ms`, and one without by 1 ms."""
    torch.manual_seed(0)
    model = small().to(device.torch_device)
    optimizer = fused(model)
    handle = None
    if plan is not None:
        handle = hr.speed_up(model, optimizer, device=device, plan=plan)
    losses, replays = [], 0
    for at in range(steps):
        loss = model(batch(device, at)).square().mean()
        loss.backward()
        if handle is not None:
            now = handle.counts().replays
            device.host_work(extra_ms if now > replays else 1.0)
            replays = now
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    report = None if handle is None else handle.report()
    return host([losses, list(model.parameters())]), report, model


@pytest.mark.parametrize("extra_ms", [0.0, 5.0])
def test_what_is_faster_stays(
    fake_device: FakeDevice, caplog: pytest.LogCaptureFixture, extra_ms: float
) -> None:
    plain, _, _ = trained(fake_device, None)
    with caplog.at_level(logging.INFO, logger="headrace"):
        found, report, model = trained(fake_device, "auto", extra_ms)
    assert found == plain
    assert report is not None
    pays = extra_ms == 0.0
    assert report.decision is not None
    assert report.decision.endswith(" no graphs are used") is not pays
    assert caplog.messages == [f"speed_up: {report.decision}"]
    assert str(report).endswith(report.decision)
    assert report.way == ("parts" if pays else "eager")
    assert ("forward" in vars(model)) is pays  # else nothing of ours is in the way
    assert {part.why for part in report.parts} == {
        None if pays else "graphs gain nothing in this loop"
    }


def test_the_host_never_waits_once_that_is_known(fake_device: FakeDevice) -> None:
    def waits(plan: Literal["auto", "graph"], steps: int) -> int:
        before = fake_device.ledger.statistics().count
        trained(fake_device, plan, steps=steps)
        return fake_device.ledger.statistics().count - before

    assert waits("auto", 110) - waits("auto", 70) == waits("graph", 110) - waits("graph", 70)


def test_graphs_stay_if_they_are_asked_for(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decision(fake_device, "graph") is None
    monkeypatch.setenv("HEADRACE_PLAN", "graph")
    assert decision(fake_device, "auto") is None


def decision(device: FakeDevice, plan: Literal["auto", "graph"]) -> str | None:
    _, report, _ = trained(device, plan, extra_ms=5.0)
    assert report is not None
    assert report.parts[0].replays > 60
    return report.decision


class Loop:
    """A loop whose optimizers update in some order; the graphs save half the time."""

    def __init__(self, device: FakeDevice, optimizers: list[torch.optim.Optimizer]) -> None:
        self.device, self.optimizers = device, optimizers
        self.used, self.replays = True, 0
        self.pays: bool | None = None
        self.gain = Gain(
            device,
            shapes=1,
            use_graphs=self._use,
            counts=lambda: Counts(self.replays, 0),
            decided=self._decided,
        )

    def _use(self, used: bool) -> None:
        self.used = used

    def _decided(self, pays: bool, decision: str) -> None:
        self.pays = pays

    def update(self, number: int) -> None:
        self.device.host_work(1.0 if self.used else 2.0)
        self.replays += self.used
        self.gain.updated(self.optimizers[number])


@pytest.fixture
def loop(fake_device: FakeDevice) -> Loop:
    return Loop(fake_device, [torch.optim.SGD([torch.zeros(1)]) for _ in range(2)])


def test_a_step_ends_where_the_last_one_has(loop: Loop) -> None:
    for number in [0, 1, 1] * 60:  # a critic is updated twice
        loop.update(number)
        if loop.pays is not None:
            break
    assert "a step takes 3.00 ms with graphs and 6.00 ms without" in str(loop.gain.decision)


def test_an_optimizer_that_has_gone_ends_no_step(loop: Loop) -> None:
    loop.update(0)
    loop.optimizers[0] = loop.optimizers[1]
    gc.collect()
    while loop.pays is None:
        loop.update(1)
    assert "a step takes 1.00 ms with graphs and 2.00 ms without" in str(loop.gain.decision)


def test_an_optimizer_that_rests_is_replaced(loop: Loop) -> None:
    loop.update(0)
    for _ in range(200):
        loop.update(1)
    assert loop.pays


def test_another_plan_is_refused(fake_device: Device) -> None:
    with pytest.raises(StepError, match="plan = 'pipeline'; expected auto or graph"):
        hr.speed_up(small(), device=fake_device, plan="pipeline")  # type: ignore[arg-type]
