"""`speed_up`: what it installs, what it leaves alone, and what its report says."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.device import Device
from headrace.errors import StepError
from headrace.plan import PLAN_VARIABLE
from support.graphs.sped_up import Made, batch, compare, fused, small


class Model(nn.Module):
    """A model that can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Multiply."""
        out: torch.Tensor = self.layer(x) * scale
        return out


def train(device: Device, model: nn.Module, optimizer: Any, steps: int = 4) -> None:
    for at in range(steps):
        model(batch(device, at)).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def test_copies_and_pickles_are_plain_models(capturing: Device) -> None:
    model = Model().to(capturing.torch_device)
    names = set(vars(model))
    with hr.speed_up(model, device=capturing) as handle:
        train(capturing, model, None)
        replays = handle.report().parts[0].replays
        stored = io.BytesIO()
        torch.save(model, stored)
        stored.seek(0)
        copies = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(stored, weights_only=False),
        ]
        for one in copies:
            assert set(vars(one)) == names
            with torch.no_grad():
                one.layer.weight.zero_()
                one.layer.bias.zero_()
            assert not one.to(capturing.torch_device)(batch(capturing, 0)).any()
        assert handle.report().parts[0].replays == replays
        assert model(batch(capturing, 0)).any()
    assert set(vars(model)) == names


def test_signature_hooks_and_types_stay(capturing: Device) -> None:
    model, seen = Model().to(capturing.torch_device), []
    before = inspect.signature(model.forward)
    optimizer = fused(model)
    with hr.speed_up(model, optimizer, device=capturing):
        assert type(model) is Model
        assert inspect.signature(model.forward) == before
        assert model.forward.__doc__ == "Multiply."
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps optimizer.step
        train(capturing, model, optimizer)
        scheduler.step()
        assert list(model.state_dict()) == ["layer.weight", "layer.bias"]
        assert seen == []
    model(batch(capturing, 0))


def test_close_gives_back_the_originals(capturing: Device) -> None:
    model = Model().to(capturing.torch_device)
    optimizer = fused(model)
    handle = hr.speed_up(model, optimizer, device=capturing)
    train(capturing, model, optimizer)
    waiting = model(batch(capturing, 0)).square().mean()
    handle.close()
    assert "forward" not in vars(model)
    assert "step" not in vars(optimizer)
    waiting.backward()  # still has its graph
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_wraps_a_part_later_keeps_working_after_close(capturing: Device) -> None:
    model = Model().to(capturing.torch_device)
    optimizer = fused(model)
    handle = hr.speed_up(model, optimizer, device=capturing)
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs) * 1  # as accelerate does
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(capturing, model, optimizer)
    assert handle.report().parts[0].replays == 2
    copied = copy.deepcopy(copy.deepcopy(model))
    assert copied.state_dict().keys() == model.state_dict().keys()
    assert "__getstate__" not in vars(copied)
    handle.close()
    train(capturing, model, optimizer)
    scheduler.step()
    assert handle.report().parts[0].replays == 2


def test_baseline_in_the_environment_does_nothing(
    capturing: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLAN_VARIABLE, "baseline")
    model = Model().to(capturing.torch_device)
    handle = hr.speed_up(model, device=capturing)
    assert "forward" not in vars(model)
    assert "HEADRACE_PLAN=baseline" in str(handle.report())


def test_on_a_cpu_it_does_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    handle = hr.speed_up(model, fused(model))
    assert "forward" not in vars(model)
    assert "graphs need a GPU, and this trains on cpu" in str(handle.report())
    assert "speed_up does nothing" in caplog.text


def test_a_loader_is_prefetched(capturing: Device) -> None:
    model = Model().to(capturing.torch_device)
    data = torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=6)
    with hr.speed_up(model, loader=data, device=capturing) as handle:
        assert handle.loader is not None
        for x in handle.loader:
            assert capturing.holds(x)
            model(x).mean().backward()


def test_the_report_reads_as_text(capturing: Device) -> None:
    model = small().to(capturing.torch_device)
    optimizer = fused(model)
    with hr.speed_up(model, optimizer, device=capturing) as handle:
        train(capturing, model, optimizer)
        text = str(handle.report())
    assert "Sequential: 2 replays, 2 eager calls, 1 capture" in text
    assert "eager 2 times: the first calls of a shape" in text


def test_two_models_of_a_kind_have_numbers(capturing: Device) -> None:
    models = [small().to(capturing.torch_device) for _ in range(2)]
    with hr.speed_up(*models, device=capturing) as handle:
        names = [part.name for part in handle.report().parts]
    assert names == ["Sequential 1", "Sequential 2"]


def test_anything_else_is_refused(capturing: Device) -> None:
    with pytest.raises(StepError, match="given str; expected models and optimizers"):
        hr.speed_up("model", device=capturing)  # type: ignore[arg-type]
    with pytest.raises(StepError, match="expected at least 1"):
        hr.speed_up(Model(), after=0, device=capturing)


def test_parts_inside_parts_leave_it_to_the_outer_one(capturing: Device) -> None:
    model = nn.Sequential(small(4, 8), small(8, 2)).to(capturing.torch_device)
    with hr.speed_up(model, model[0], device=capturing) as handle:
        train(capturing, model, None)
        outer, inner = handle.report().parts
    assert outer.replays == 2
    assert inner.replays == 0
    assert inner.why is None


class Detector(nn.Module):
    """A model whose middle runs on the host, with an optional list in between."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = small(4, 8, 8, 4)
        self.heads = nn.ModuleList([small(4, 8, 8, 4), nn.Linear(4, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.backbone(x)
        scale = 1.0 if float(features.detach().sum()) > 0 else 0.5
        out: torch.Tensor = self.heads[1](self.heads[0](features * scale))
        return out


def test_what_cannot_be_captured_as_a_whole_is_divided(capturing: Device) -> None:
    def make(device: Device) -> Made:
        model = Detector().to(device.torch_device)
        optimizer = fused(model)

        def step(at: int) -> Any:
            loss = model(batch(device, at)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return (model, optimizer), step

    report = compare(capturing, make, steps=9)
    whole, backbone, head, _ = report.parts
    assert "the host waits for the device" in str(whole.why)
    assert [backbone.name, head.name] == ["Detector.backbone", "Detector.heads.0"]
    assert backbone.replays > 0
    assert head.replays > 0


def test_close_gives_back_what_was_divided(capturing: Device) -> None:
    model = Detector().to(capturing.torch_device)
    with hr.speed_up(model, device=capturing):
        train(capturing, model, None)
        assert "forward" in vars(model.backbone)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_that_was_compiled_in_place_says_so(
    capturing: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model().to(capturing.torch_device)
    monkeypatch.setattr(model, "_compiled_call_impl", model._call_impl)
    with hr.speed_up(model, device=capturing) as handle:
        train(capturing, model, None)
        assert "pass compile=True to speed_up" in str(handle.report())


def test_a_part_that_is_never_called_says_so(capturing: Device) -> None:
    with hr.speed_up(Model().to(capturing.torch_device), device=capturing) as handle:
        assert "has not been called" in str(handle.report())


class Reads(nn.Module):
    """A block whose host reads a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x


class Stages(nn.Module):
    """Large blocks with a choice of the host between them, the second of which has one as well."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.match = block(), Reads()
        self.head = nn.ModuleDict({"layers": block(), "match": Reads(), "last": block()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.match(self.backbone(x))
        out: torch.Tensor = self.head["last"](self.head["match"](self.head["layers"](x)))
        return out


def block() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.Tanh())))


def test_the_report_is_a_tree_with_what_each_break_costs(capturing: Device) -> None:
    model = Stages().to(capturing.torch_device)
    optimizer = fused(model)
    with hr.speed_up(model, optimizer, device=capturing) as handle:
        train(capturing, model, optimizer, 8)
        report = handle.report()
    assert report.way == "children"
    assert set(report.break_ms) == {"Stages"}
    assert report.break_ms["Stages"] > 0
    lines = str(report).splitlines()
    starts = [line.partition(":")[0] for line in lines if "replays," in line]
    below = ["Stages.backbone", "Stages.head.layers", "Stages.head.last"]
    assert starts == ["Stages", *(f"    {name}" for name in below), "AdamW"]
    assert lines[0].endswith(f"{report.break_ms['Stages']:.2f} ms a call of its own")
    assert f"{__file__}:" in lines[1]
