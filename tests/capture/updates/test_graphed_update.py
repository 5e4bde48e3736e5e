"""An optimizer's step as a graph: the eager loop's numbers, and the user's own parameter groups."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.capture.state import gradient_copies
from headrace.device import Device
from support.graphs.sped_up import Made, batch, compare, fused, small


def loop(
    device: Device,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    before: Callable[[int, torch.optim.Optimizer], object] = lambda at, optimizer: None,
    schedule: Callable[[Any], Any] | None = None,
) -> Made:
    model = small().to(device.torch_device)
    optimizer = make_optimizer(model.parameters())
    scheduler = None if schedule is None else schedule(optimizer)

    def step(at: int) -> Any:
        before(at, optimizer)
        model(batch(device, at)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        return [
            {name: one for name, one in group.items() if name != "params"}
            for group in copy.deepcopy(optimizer.param_groups)
        ]

    return (model, optimizer), step


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def test_the_groups_stay_the_users(capturing: Device) -> None:
    """Also a log that reads them, between any two steps, sees plain numbers."""
    schedules: list[Callable[[Any], Any]] = [
        lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, 9),
    ]
    for schedule in schedules:
        report = compare(capturing, lambda device, s=schedule: loop(device, adamw, schedule=s), 9)
        assert report.parts[1].replays == 6


@pytest.mark.parametrize(
    "setting", [{"weight_decay": 0.3}, {"betas": (0.5, 0.9)}, {"lr": 0.5}, {"maximize": True}]
)
def test_a_changed_setting_is_used(capturing: Device, setting: dict[str, Any]) -> None:
    def before(at: int, optimizer: torch.optim.Optimizer) -> None:
        if at == 5:
            optimizer.param_groups[0].update(setting)

    report = compare(capturing, lambda device: loop(device, adamw, before), 9)
    assert report.parts[1].replays >= 4


def test_a_setting_that_changes_each_time_is_eager_in_the_end(capturing: Device) -> None:
    def before(at: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.01 * at

    report = compare(capturing, lambda device: loop(device, adamw, before), 24)
    assert report.parts[1].replays == 0
    assert "other settings" in str(report.parts[1].why)


def test_loaded_state_and_a_new_group_are_noticed(capturing: Device) -> None:
    def make(device: Device) -> Made:
        (model, optimizer), step = loop(device, adamw)
        assert isinstance(optimizer, torch.optim.Optimizer)
        saved = []

        def with_changes(at: int) -> Any:
            if at == 3:
                saved.append(copy.deepcopy(optimizer.state_dict()))
            if at == 6:
                optimizer.load_state_dict(saved[0])
            if at == 8:
                extra = torch.nn.Parameter(torch.ones(2, device=device.torch_device))
                optimizer.add_param_group({"params": [extra], "lr": 0.1})
            return step(at)

        return (model, optimizer), with_changes

    report = compare(capturing, make, 11)
    assert report.parts[1].replays >= 4


def test_state_in_other_memory_is_noticed(capturing: Device) -> None:
    def before(at: int, optimizer: torch.optim.Optimizer) -> None:
        if at == 6:
            for state in optimizer.state.values():
                state["exp_avg"].data = state["exp_avg"].clone().mul_(3)

    report = compare(capturing, lambda device: loop(device, adamw, before), 10)
    assert (report.parts[1].captures, report.parts[1].why) == (2, None)


def test_a_closure_and_a_plain_sgd(capturing: Device) -> None:
    def make(device: Device) -> Made:
        model = small().to(device.torch_device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(at: int) -> Any:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(batch(device, at)).square().mean()
                loss.backward()
                return loss

            return optimizer.step(closure).detach()

        return (model, optimizer), step

    assert compare(capturing, make).parts[1].replays == 4


class Sharpness(torch.optim.SGD):
    """Takes the gradient twice, as sharpness-aware minimization does."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        with torch.enable_grad():
            closure()
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Sharpness])
def test_an_optimizer_that_calls_its_closure_as_it_likes_is_eager(
    capturing: Device, kind: Any
) -> None:
    def make(device: Device) -> Made:
        model = small(4, 4, dropout=0.0).to(device.torch_device)
        optimizer = kind(model.parameters(), lr=0.1)

        def step(at: int) -> Any:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(batch(device, at)).square().mean()
                loss.backward()
                return loss

            return optimizer.step(closure).detach()

        return (model, optimizer), step

    report = compare(capturing, make, 6)
    assert report.parts[0].replays > 0
    assert "may call its closure more than once" in str(report.parts[1].why)


def test_an_optimizer_that_counts_on_the_host_is_eager(capturing: Device) -> None:
    def make(device: Device) -> Made:
        return loop(device, lambda p: torch.optim.Adafactor(p, lr=1e-2))

    report = compare(capturing, make, 6)
    assert report.parts[1].replays == 0
    assert "may count its steps on the host" in str(report.parts[1].why)


def test_a_gradient_scaler(capturing: Device) -> None:
    """It gives the optimizer new tensors at each step, and leaves some steps out."""

    def make(device: Device) -> Made:
        model = small().to(device.torch_device)
        optimizer = fused(model)
        scaler = torch.amp.GradScaler(device.torch_device.type, init_scale=8, growth_interval=2)

        def step(at: int) -> Any:
            loss = model(batch(device, at)).square().mean()
            if at == 6:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return [p.detach().clone() for p in model.parameters()]

        return (model, optimizer), step

    assert compare(capturing, make, 10).parts[1].replays >= 5


def test_a_plain_optimizer_says_how_it_rounds(capturing: Device) -> None:
    model = small().to(capturing.torch_device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    with hr.speed_up(model, optimizer, device=capturing) as handle:
        for at in range(6):
            model(batch(capturing, at)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.param_groups[0]["capturable"] is False
            assert optimizer.param_groups[0]["lr"] == 1e-2
        part = handle.report().parts[1]
    if part.why is None:
        assert part.replays > 0
        assert "fused=True would make them equal" in str(part.rounding)


def eager_model(
    device: Device, make_optimizer: Callable[[Any], torch.optim.Optimizer], frozen_every: int = 0
) -> Made:
    """Only the optimizer is sped up: each backward leaves its gradients elsewhere."""
    model = small().to(device.torch_device)
    optimizer, kept = make_optimizer(model.parameters()), []

    def step(at: int) -> Any:
        model(batch(device, at)).square().mean().backward()
        if frozen_every and at % frozen_every == 0:
            model[0].bias.grad = None
        kept.append([one.grad for one in model.parameters()])
        del kept[:-3]  # the loop keeps some of them
        optimizer.step()
        optimizer.zero_grad()
        return [one.detach().clone() for one in model.parameters()]

    return (optimizer,), step


def capturable_adam(parameters: Any) -> torch.optim.Optimizer:
    weights = list(parameters)
    rate = torch.tensor(1e-2).to(weights[0].device)
    return torch.optim.Adam(weights, lr=rate, foreach=True, capturable=True)


@pytest.mark.parametrize(
    "make",
    [
        adamw,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        capturable_adam,
    ],
)
@pytest.mark.parametrize("frozen_every", [0, 7])
def test_gradients_of_an_eager_model_are_copied(
    capturing: Device, make: Callable[[Any], torch.optim.Optimizer], frozen_every: int
) -> None:
    report = compare(
        capturing, lambda device: eager_model(device, make, frozen_every=frozen_every), 30
    )
    part = report.parts[0]
    assert (part.why, part.replays > 10) == (None, True)


@pytest.mark.parametrize("eager_scale", [False, True])
def test_tasks_in_turns_have_a_graph_each(capturing: Device, eager_scale: bool) -> None:
    """Each step trains another head, and a scale with an eager gradient, or none."""

    def make(device: Device) -> Made:
        where = device.torch_device
        body, heads = small(4, 4).to(where), [small(4, 2).to(where) for _ in range(3)]
        scale = torch.nn.Parameter(torch.ones((), device=where))
        optimizer = fused(body, *heads)
        optimizer.add_param_group({"params": [scale]})

        def step(at: int) -> Any:
            out = heads[at % 3](body(batch(device, at)))
            loss = (out * scale if eager_scale else out).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return (body, *heads, optimizer), step

    report = compare(capturing, make, 30)
    part = report.parts[-1]
    # On a GPU an eager gradient may lie elsewhere at first, until it is copied.
    assert (part.why, 3 <= part.captures <= 6, part.replays > 6) == (None, True, True)


def test_an_update_that_writes_to_its_gradients_is_not_given_copies(capturing: Device) -> None:
    class Decaying(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for one in group["params"]:
                    if one.grad is not None:
                        one.grad.add_(one.detach(), alpha=0.1)
            return super().step(closure)

    report = compare(
        capturing, lambda device: eager_model(device, lambda one: Decaying(one, fused=True)), 12
    )
    assert "writes to its gradients" in str(report.parts[0].why)


def test_large_gradients_of_an_eager_model_are_not_copied(
    capturing: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_copies, "_MAX_BYTES", 100)
    report = compare(capturing, lambda device: eager_model(device, adamw), 12)
    assert "more than the" in str(report.parts[0].why)


def test_what_no_comparison_sees_is_found_by_a_check(
    capturing: Device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file. The replays between its change and the check have the old value, and are named."""
    file = tmp_path / "decay.txt"
    file.write_text("0.1")

    class Decaying(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            decay = float(file.read_text())
            for group in self.param_groups:
                torch._foreach_mul_(group["params"], 1 - decay)
            return super().step(closure)

    def before(at: int, optimizer: torch.optim.Optimizer) -> None:
        file.write_text("0.2" if at >= 10 else "0.1")

    (model, optimizer), step = loop(
        capturing, lambda one: Decaying(one, lr=0.1, fused=True), before
    )
    with hr.speed_up(model, optimizer, device=capturing) as handle:
        for at in range(20):
            step(at)
        part = handle.report().parts[1]
    assert part.eager["checked again"] == 1
    assert part.captures == 2
    assert "Replays 1 to 9 may have repeated the old value" in caplog.text
    assert "mul_" in caplog.text


def test_checks_of_an_update_change_nothing(capturing: Device) -> None:
    for make in (adamw, lambda one: torch.optim.SGD(one, lr=0.1, momentum=0.9)):
        report = compare(capturing, lambda device, m=make: loop(device, m), 40)
        assert report.parts[1].eager["checked again"] == 2
        assert report.parts[1].captures == 1
    report = compare(capturing, lambda device: eager_model(device, adamw), 40)
    assert report.parts[0].eager["checked again"] >= 1
