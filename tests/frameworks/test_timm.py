"""timm's models, optimizers and schedulers in the engine, against timm's own training loop."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr
from frameworks.training import (
    EAGER,
    assert_same,
    classifier,
    loss_of,
    needs,
    seeded,
    stopped_after,
)
from frameworks.training import weights as weights_of
from headrace.checkpoint import CheckpointWriter, latest_checkpoint, load_checkpoint
from headrace.device import Device, open_device
from headrace.errors import StepError
from headrace.fake import FakeDevice

timm = needs("timm")
timm_optim = needs("timm.optim")
timm_scheduler = needs("timm.scheduler")

EPOCHS, BATCHES = 4, 5
KINDS = ["cosine", "tanh", "step", "multistep", "poly"]


def images() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(8 * BATCHES - 3, 3, 32, 32, generator=draw),
        torch.randint(0, 4, (8 * BATCHES - 3,), generator=draw),
    )
    return DataLoader(data, batch_size=8, shuffle=True)


def schedule(optimizer: Any, kind: str, *, on_updates: bool, **options: Any) -> Any:
    """As timm's train.py makes one."""
    usual = {
        "num_epochs": EPOCHS,
        "decay_epochs": 1,
        "decay_milestones": [1, 3],
        "warmup_epochs": 1,
        "warmup_lr": 1e-4,
        "updates_per_epoch": BATCHES,
    }
    scheduler, _ = timm_scheduler.create_scheduler_v2(
        optimizer, sched=kind, step_on_epochs=not on_updates, **usual | options
    )
    return scheduler


def rates_of(optimizer: Any) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def by_timm(
    model: Any, optimizer: Any, scheduler: Any, loader: Any, epochs: int = EPOCHS
) -> tuple[list[float], Any]:
    """timm's loop: losses, and the rates that each update was made with."""
    losses, rates, updates = [], [], 0
    for epoch in range(epochs):
        total = 0.0
        for batch in loader:
            loss = loss_of(model, batch)
            loss.backward()
            rates.append(rates_of(optimizer))
            optimizer.step()
            updates += 1
            optimizer.zero_grad()
            losses.append(loss.item())
            total += loss.item()
            scheduler.step_update(num_updates=updates, metric=loss.item())
        scheduler.step(epoch + 1, total / len(loader))
    return losses, rates


def by_engine(
    engine: hr.Engine, loader: Any, optimizer: Any, epochs: int = EPOCHS
) -> tuple[list[float], Any]:
    losses, rates = [], []
    while engine.epochs < epochs:
        before = rates_of(optimizer)
        for _ in engine.steps(loader):
            rates.append(before)
            before = rates_of(optimizer)
        assert engine.last_result is not None
        losses += engine.last_result.losses
    return losses, rates


class TestModels:
    @pytest.mark.parametrize("plan", EAGER)
    def test_the_same_as_its_own_loop(self, plan: str) -> None:
        found = self.results(plan, open_device("cpu"))
        assert found[0][0] == found[1][0]
        assert_same(found[0][1], found[1][1])

    def test_on_a_device(self) -> None:
        with FakeDevice() as device:
            found = self.results("streams4", device, epochs=1)
        assert found[0][0] == found[1][0]
        assert_same(found[0][1], found[1][1])

    def results(self, plan: str, device: Device, epochs: int = EPOCHS) -> list[Any]:
        found = []
        for by_hand in (True, False):
            seeded(0)
            model = timm.create_model("test_vit", num_classes=4, img_size=32, drop_rate=0.1)
            model.to(device.torch_device if not by_hand else "cpu")
            optimizer = timm_optim.create_optimizer_v2(
                model, opt="lamb", lr=1e-2, weight_decay=0.05, layer_decay=0.7
            )
            scheduler = schedule(optimizer, "cosine", on_updates=True)
            seeded(5)
            if by_hand:
                losses, _ = by_timm(model, optimizer, scheduler, images(), epochs)
            else:
                engine = hr.Engine(
                    model, optimizer, loss_of, scheduler=scheduler, plan=plan, device=device
                )
                losses, _ = by_engine(engine, images(), optimizer, epochs)
            found.append((losses, weights_of(model)))
        return found


def small(kind: str, **options: Any) -> tuple[Any, Any, Any, Any]:
    """A model with two groups of parameters, one of which is scaled, and its data."""
    model = classifier()
    groups = [
        {"params": list(model[0].parameters()), "lr_scale": 0.5},  # type: ignore[index]
        {"params": list(model[3].parameters())},  # type: ignore[index]
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    draw = torch.Generator().manual_seed(3)
    data = [
        (torch.randn(4, 8, generator=draw), torch.randint(0, 3, (4,), generator=draw))
        for _ in range(BATCHES)
    ]
    seeded(5)
    return model, optimizer, schedule(optimizer, kind, **options), data


PLATEAU: dict[str, Any] = {
    "on_updates": False,
    "plateau_mode": "min",
    "patience_epochs": 0,
    "warmup_epochs": 0,
    "decay_rate": 0.5,
}


class TestSchedulers:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("on_updates", [False, True])
    @pytest.mark.parametrize("every", ["step", "epoch"])
    def test_the_same_rates(self, kind: str, on_updates: bool, every: Any) -> None:
        model, optimizer, scheduler, data = small(kind, on_updates=on_updates, noise=[0.4, 0.9])
        expected = by_timm(model, optimizer, scheduler, data)
        assert len({rate for one in expected[1] for rate in one}) > 3
        other, optimizer, scheduler, data = small(kind, on_updates=on_updates, noise=[0.4, 0.9])
        engine = hr.Engine(other, optimizer, loss_of, scheduler=scheduler, scheduler_every=every)
        assert by_engine(engine, data, optimizer) == expected
        assert_same(weights_of(other), weights_of(model))

    @pytest.mark.parametrize("on_updates", [False, True])
    def test_with_accumulation_updates_are_counted(self, on_updates: bool) -> None:
        model, optimizer, scheduler, data = small("cosine", on_updates=on_updates)
        engine = hr.Engine(model, optimizer, loss_of, scheduler=scheduler, accumulate=2)
        engine.epoch(data)
        now = rates_of(optimizer)
        assert engine.updates == 3
        if on_updates:
            scheduler.step_update(3)
        else:
            scheduler.step(1)
        assert rates_of(optimizer) == now

    @pytest.mark.parametrize(
        ("kind", "on_updates"),
        [*((kind, flag) for kind in KINDS for flag in (False, True)), ("plateau", False)],
    )
    @pytest.mark.parametrize(("epochs", "batches"), [(0, 2), (2, 3)])
    def test_stopped_and_resumed(
        self, tmp_path: Path, kind: str, on_updates: bool, epochs: int, batches: int
    ) -> None:
        """By way of a checkpoint: rates, losses and weights go on as if nothing had happened."""
        options: dict[str, Any] = {"on_updates": on_updates, "noise": [0.4, 0.9]}
        if kind == "plateau":
            options = PLATEAU | {"patience_epochs": 1}  # one bad epoch before the stop, one after

        def made() -> tuple[hr.Engine, Any, Any]:
            model, optimizer, scheduler, data = small(kind, **options)
            optimizer.param_groups[1]["momentum"] = 1.5 if kind == "plateau" else 0.9
            return hr.Engine(model, optimizer, loss_of, scheduler=scheduler), optimizer, data

        whole, optimizer, data = made()
        losses, rates = by_engine(whole, data, optimizer)
        assert rates[0] != rates[-1]
        engine, _, data = made()
        for _ in range(epochs):
            engine.epoch(data)
        state = stopped_after(engine, data, batches)
        with CheckpointWriter(engine.device, tmp_path, keep=1) as writer:
            writer.save(state, 1)
        stored = latest_checkpoint(tmp_path)
        assert stored is not None
        again, optimizer, data = made()
        seeded(99)
        again.load_state_dict(load_checkpoint(stored))
        rest = by_engine(again, data, optimizer)
        assert rest[1] == rates[-len(rest[1]) :]
        assert rest[0] == losses[-len(rest[0]) :]
        assert_same(weights_of(again.model), weights_of(whole.model))

    def test_plateau(self) -> None:
        """The engine's metric is the epoch's mean loss, which timm's loop is given here, too."""
        found = []
        for by_hand in (True, False):
            model, optimizer, scheduler, data = small("plateau", **PLATEAU)
            optimizer.param_groups[1]["momentum"] = 1.5  # so that the loss rises
            if by_hand:
                found.append(by_timm(model, optimizer, scheduler, data))
            else:
                engine = hr.Engine(model, optimizer, loss_of, scheduler=scheduler)
                found.append(by_engine(engine, data, optimizer))
        assert found[0] == found[1]
        assert found[0][1][-1][1] < 0.1

    def test_plateau_of_a_metric_that_is_to_rise(self) -> None:
        model, optimizer, scheduler, _ = small("plateau", on_updates=False)
        with pytest.raises(StepError, match="PlateauLRScheduler was made with mode='max'"):
            hr.Engine(model, optimizer, loss_of, scheduler=scheduler)

    def test_what_is_contradictory_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING)
        model, optimizer, scheduler, _ = small("cosine", on_updates=True)
        hr.Engine(model, optimizer, loss_of, scheduler=scheduler, scheduler_every="epoch")
        assert "this CosineLRScheduler counts updates (t_in_epochs=False)" in caplog.text

    def test_of_another_optimizer(self) -> None:
        model, optimizer, _, _ = small("cosine", on_updates=True)
        _, _, scheduler, _ = small("cosine", on_updates=True)
        with pytest.raises(StepError, match="belongs to another optimizer"):
            hr.Engine(model, optimizer, loss_of, scheduler=scheduler)


@pytest.mark.parametrize("name", ["lookahead_adamw", "adopt", "muon", "nadamw", "lion"])
def test_its_optimizers(name: str) -> None:
    """Also with a state that was stored in the midst of an epoch."""

    def made() -> tuple[Any, Any, Any]:
        model, _, _, data = small("cosine", on_updates=True)
        return model, timm_optim.create_optimizer_v2(model, opt=name, lr=1e-2), data

    model, optimizer, data = made()
    losses = []
    for batch in data:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    other, optimizer, data = made()
    engine = hr.Engine(other, optimizer, loss_of)
    state = stopped_after(engine, data, 2)
    again, optimizer, data = made()
    engine = hr.Engine(again, optimizer, loss_of)
    engine.load_state_dict(state)
    found = engine.epoch(data).losses
    assert len(found) >= 3
    assert list(found) == losses[-len(found) :]
    assert_same(weights_of(again), weights_of(model))
