"""What graphs gain is measured on real steps, which stay those of the plain loop."""

from __future__ import annotations

import torch

import headrace as hr
from headrace.device import Device
from support.graphs.sped_up import batch, fused, host, small


def test_steps_in_turns_are_the_plain_loops(capturing: Device) -> None:
    def train(measure: bool, speeds_up: bool) -> tuple[object, object]:
        torch.manual_seed(0)
        model = small().to(capturing.torch_device)
        optimizer = fused(model)
        handle = None
        if speeds_up:
            handle = hr.speed_up(model, optimizer, device=capturing, measure=measure)
        losses = []
        for at in range(110):
            loss = model(batch(capturing, at)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return host(losses), None if handle is None else handle.report()

    plain, _ = train(False, False)
    measured, report = train(True, True)
    assert measured == plain
    assert isinstance(report, hr.SpeedUpReport)
    assert "measured in turns over" in str(report.gain)
    assert str(report).endswith(str(report.gain))
    eager = sum(sum(part.eager.values()) for part in report.parts[:1])
    assert report.parts[0].replays + eager < 110  # those of the other turns are plain calls


def test_nothing_is_measured_unless_asked(capturing: Device) -> None:
    model = small().to(capturing.torch_device)
    with hr.speed_up(model, fused(model), device=capturing) as handle:
        assert handle.report().gain is None
