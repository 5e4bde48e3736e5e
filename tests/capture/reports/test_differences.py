"""The first replays, compared with eager calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.capture.reports.differences import Differences
from headrace.device import Device
from support.graphs.sped_up import batch, fused, small, train


@pytest.mark.parametrize("kind", ["fused", "plain", "sgd"])
def test_replays_are_equal_and_the_check_changes_nothing(
    capturing: Device, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout and the statistics of batch normalization."""

    def make(device: Device) -> Any:
        model = nn.Sequential(small(4, 8), nn.BatchNorm1d(8), small(8, 2)).to(device.torch_device)
        if kind == "fused":
            optimizer = fused(model)
        elif kind == "plain":
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

        def step(at: int) -> Any:
            loss = model(batch(device, at)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return (model, optimizer), step

    unchecked, _ = train(capturing, make, sped_up=True, steps=8)
    sped_up = hr.speed_up
    monkeypatch.setattr(hr, "speed_up", lambda *parts, **kw: sped_up(*parts, check=3, **kw))
    checked, report = train(capturing, make, sped_up=True, steps=8)
    assert repr(checked) == repr(unchecked)
    assert report is not None
    model, optimizer = (part.check for part in report.parts)
    assert model is not None
    assert optimizer is not None
    assert (model.replays, model.worst, model.is_equal) == (3, 0.0, True)
    assert (optimizer.replays, optimizer.is_equal) == (3, True)
    assert optimizer.worst <= (1e-5 if kind == "plain" else 0.0)


class Scaled(nn.Module):
    """Multiplies by what a file says."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self.body, self.read = small(4, 8, 2, dropout=0.0), file.read_text

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x) * float(self.read())
        return result


def test_what_a_replay_repeats_wrongly_is_found(capturing: Device, tmp_path: Any) -> None:
    file = tmp_path / "scale"
    file.write_text("1.0", encoding="utf-8")
    model = Scaled(file).to(capturing.torch_device)
    with hr.speed_up(model, device=capturing, check=4) as handle:
        for at in range(6):
            model(batch(capturing, at)).square().mean().backward()
            if at == 3:
                file.write_text("2.0", encoding="utf-8")
        found = handle.report().parts[0].check
    assert found is not None
    assert not found.is_equal
    assert (found.replays, found.where) == (4, "output 0, replay 3")
    assert found.worst == pytest.approx(0.5)


def test_two_calls_in_one_backward_are_compared_one_by_one(capturing: Device) -> None:
    model = small().to(capturing.torch_device)
    with hr.speed_up(model, device=capturing, check=6) as handle:
        for at in range(6):
            x = batch(capturing, at).requires_grad_()
            (model(x).mean() + model(2 * x).square().mean()).backward()
        found = handle.report().parts[0].check
    assert found is not None
    assert (found.replays, found.worst) == (6, 0.0)


@pytest.mark.parametrize(
    ("found", "expected", "is_equal", "worst"),
    [
        ([1.0, float("nan")], [1.0, float("nan")], True, 0.0),
        ([1.0, 2.0], [1.0, 2.00001], True, 5e-6),
        ([1.0, 2.0], [1.0, 2.5], False, 0.2),
        ([1.0, float("nan")], [1.0, 2.0], False, float("inf")),
        ([1, 2], [1, 3], False, float("inf")),
    ],
)
def test_what_counts_as_equal(
    capturing: Device, found: list[Any], expected: list[Any], is_equal: bool, worst: float
) -> None:
    check = Differences(capturing, 1)
    assert check.report() is None
    assert check.begins()
    check.compare([("one", torch.tensor(found), torch.tensor(expected))])
    report = check.report()
    assert report is not None
    assert report.is_equal is is_equal
    assert report.worst == pytest.approx(worst, rel=0.1)


def test_zero_but_for_rounding_is_zero(capturing: Device) -> None:
    check = Differences(capturing, 1)
    assert check.begins()
    large = torch.ones(2)
    check.compare([("a", large, large), ("b", torch.full((2,), 1e-9), torch.zeros(2))])
    report = check.report()
    assert report is not None
    assert report.is_equal
