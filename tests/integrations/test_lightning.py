"""`hr.lightning.SpeedUp` in Lightning's Trainer: everything as without it, and no waits."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import headrace as hr
from frameworks.training import assert_same, needs, samples, seeded, weights
from headrace.errors import StepError
from headrace.fake import Costs, fake_cuda

lightning = needs("lightning")
callbacks = needs("lightning.pytorch.callbacks")
DDPStrategy = needs("lightning.pytorch.strategies").DDPStrategy
CSVLogger = needs("lightning.pytorch.loggers").CSVLogger

for _package in ("lightning.pytorch", "pytorch_lightning"):
    logging.getLogger(_package).setLevel(logging.ERROR)
pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.detach())
        self.log("loss", loss, prog_bar=True)
        self.log("twice", 2 * loss, prog_bar=True, on_epoch=True, on_step=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("validation", loss, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class ByForward(Module):
    """Calls itself, as Lightning's guide has it, and logs numbers besides tensors."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.detach())
        self.log_dict({"loss": loss, "index": float(index)}, prog_bar=True)
        return loss


class Manual(Module):
    """Two models and two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.other = network()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        for model, optimizer in zip((self.net, self.other), self.optimizers(), strict=True):
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.detach())
            self.log(f"loss of {len(self.losses) % 2}", loss, prog_bar=True)

    def configure_optimizers(self) -> Any:
        both = (self.net, self.other)
        return [torch.optim.AdamW(one.parameters(), lr=0.01, fused=True) for one in both]


@dataclass
class Run:
    """What a training has left behind."""

    losses: list[Any]
    logged: str
    shown: dict[str, Any]
    metrics: dict[str, Any]
    weights: dict[str, torch.Tensor]
    waits: list[str] = field(default_factory=list)
    report: str = ""


class Waits(callbacks.Callback):  # type: ignore[misc, name-defined]
    """Notes which operations make the host wait in batches from the third of an epoch on."""

    def __init__(self, device: Any) -> None:
        self._device, self._before, self._validated = device, 0, False
        self.found: list[str] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index > 2 and not self._validated:
            waits = self._device.hidden_waits[self._before :]
            self.found += [wait.operation for wait in waits]
        self._before, self._validated = len(self._device.hidden_waits), False

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._validated = True


def fit(
    sped_up: bool, folder: Path, kind: type[Module] = Module, resume: Any = None, **options: Any
) -> Run:
    usual: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": "gpu",
        "devices": 1,
        "log_every_n_steps": 2,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    # Lightning makes DDP's copies on a stream that nothing waits for: a race of its own.
    with fake_cuda(check="strategy" not in options) as device, contextlib.redirect_stdout(None):
        seeded(0)
        module, waits = kind(), Waits(device)
        graphs = [hr.lightning.SpeedUp()] if sped_up else []
        logger = CSVLogger(folder, version="sped up" if sped_up else "alone")
        given = [*graphs, waits, *options.pop("callbacks", [])]
        trainer = lightning.Trainer(**usual | options, logger=logger, callbacks=given)
        loaders = DataLoader(samples(32), 4, shuffle=True), DataLoader(samples(8), 4)
        trainer.fit(module, *loaders, ckpt_path=resume)
        return Run(
            [one.item() for one in module.losses],
            (Path(logger.log_dir) / "metrics.csv").read_text(encoding="utf-8"),
            dict(trainer.progress_bar_metrics),
            {name: one.item() for name, one in trainer.callback_metrics.items()},
            weights(module),
            waits.found,
            str(graphs[0].report()) if sped_up else "",
        )


def compare(folder: Path, *arguments: Any, **options: Any) -> tuple[Run, Run]:
    """Train both ways. Losses, logged values, metrics and weights must be the same."""
    alone, sped_up = (fit(one, folder, *arguments, **options) for one in (False, True))
    assert sped_up.losses == alone.losses
    assert sped_up.logged == alone.logged
    assert sped_up.metrics == alone.metrics
    assert sped_up.shown == alone.shown
    assert_same(sped_up.weights, alone.weights)
    assert "runs eagerly" not in sped_up.report
    return alone, sped_up


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Module, {"precision": "bf16-mixed"}),
        (Module, {"precision": "16-mixed", "val_check_interval": 0.5}),
        (ByForward, {"accumulate_grad_batches": 3, "log_every_n_steps": 1}),
        (Manual, {}),
        (Module, {"max_steps": 11, "enable_progress_bar": True, "gradient_clip_val": 0.5}),
    ],
)
def test_the_same_and_no_waits(tmp_path: Path, kind: type[Module], options: Any) -> None:
    alone, sped_up = compare(tmp_path, kind, **options)
    assert "replays" in sped_up.report
    assert sped_up.report.count(", 1 captures") == (4 if kind is Manual else 2)
    assert len(alone.waits) >= 8
    assert sped_up.waits == []


def checkpoints(folder: Path) -> Any:
    return callbacks.ModelCheckpoint(
        folder, monitor="validation", save_last=True, every_n_train_steps=None
    )


def tensors(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict):
        for key, one in state.items():
            yield from tensors(one, f"{name}/{key}")
    elif isinstance(state, list | tuple):
        for at, one in enumerate(state):
            yield from tensors(one, f"{name}/{at}")
    else:
        yield name, state.tolist() if isinstance(state, torch.Tensor) else state


def test_checkpoints_are_the_same_and_resumed_from(tmp_path: Path) -> None:
    runs = [(tmp_path / str(one), one) for one in (False, True)]
    for folder, sped_up in runs:
        fit(
            sped_up,
            folder,
            max_epochs=2,
            enable_checkpointing=True,
            callbacks=[checkpoints(folder), callbacks.EarlyStopping("validation")],
        )
    stored = [torch.load(folder / "last.ckpt", "cpu", weights_only=False) for folder, _ in runs]
    found = [
        {name: one for name, one in tensors(state) if str(tmp_path) not in f"{name}{one}"}
        for state in stored
    ]
    assert len(found[0]) > 30
    assert found[0] == found[1]
    resume = runs[0][0] / "last.ckpt"
    compare(tmp_path, Module, resume, max_epochs=3)


def test_a_training_after_a_search_for_its_learning_rate(tmp_path: Path) -> None:
    """The search trains with optimizers of its own."""

    class Searched(Module):
        def __init__(self) -> None:
            super().__init__()
            self.lr = 0.01

    search = callbacks.LearningRateFinder(num_training_steps=6, early_stop_threshold=None)
    _, sped_up = compare(tmp_path, Searched, callbacks=[search], max_epochs=1)
    assert "AdamW: 3 replays" in sped_up.report


def test_loggers_get_values_when_the_device_has_them(tmp_path: Path) -> None:
    """On a device that is faster than the host: in the next batch."""

    class Counts(CSVLogger):  # type: ignore[misc, valid-type]
        steps: ClassVar[list[tuple[int, int]]] = []

        def log_metrics(self, metrics: Any, step: int) -> None:
            if "loss" in metrics:
                self.steps.append((step, trainer.fit_loop.epoch_loop.batch_idx))

    with fake_cuda(costs=Costs(launch_us=100)):
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="gpu",
            devices=1,
            logger=Counts(tmp_path),
            log_every_n_steps=5,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[hr.lightning.SpeedUp()],
        )
        trainer.fit(Module(), DataLoader(samples(64), 4))
    assert Counts.steps == [(4, 5), (9, 10), (14, 15)]


def test_a_training_that_is_stopped_hands_on_all_values(tmp_path: Path) -> None:
    """What the loggers have not got yet when a batch raises."""

    class Stops(Module):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if len(self.losses) == 7:
                raise LookupError
            return super().training_step(batch, index)

    class Saves(callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_exception(self, trainer: Any, module: Any, exception: Any) -> None:
            trainer.logger.save()

    rows = []
    for sped_up in (False, True):
        with pytest.raises(LookupError):
            fit(sped_up, tmp_path, Stops, callbacks=[Saves()], log_every_n_steps=1)
        folder = tmp_path / "lightning_logs" / ("sped up" if sped_up else "alone")
        rows.append((folder / "metrics.csv").read_text(encoding="utf-8"))
    assert rows[0] == rows[1]
    assert len(rows[0].splitlines()) == 8


def test_batches_are_copied_ahead_unless_the_module_moves_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Moves(Module):
        def on_before_batch_transfer(self, batch: Any, index: int) -> Any:
            return batch[0] + 1, batch[1]

    caplog.set_level("INFO", "headrace")
    compare(tmp_path, Moves, max_steps=4)
    assert "Moves.on_before_batch_transfer moves or changes them" in caplog.text
    caplog.clear()
    compare(tmp_path, Module, max_steps=4)
    assert "are not copied ahead" not in caplog.text


def test_under_ddp_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())  # Lightning names this rank there
    runs = []
    for sped_up in (False, True):
        strategy = DDPStrategy(process_group_backend="gloo")
        try:
            runs.append(fit(sped_up, tmp_path, strategy=strategy, max_steps=6))
        finally:
            torch.distributed.destroy_process_group()
    alone, run = runs
    assert (run.losses, run.logged, run.metrics) == (alone.losses, alone.logged, alone.metrics)
    assert_same(run.weights, alone.weights)
    assert "wrapped in DDP, which averages gradients by hooks" in run.report


def test_the_other_package_of_lightning(tmp_path: Path) -> None:
    """`pytorch_lightning` is the same code under another name, with classes of its own."""
    other = needs("pytorch_lightning")

    class Other(other.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = network(), []

        training_step = Module.training_step
        configure_optimizers = Module.configure_optimizers

    losses = []
    for graphs in ([], [hr.lightning.SpeedUp()]):
        with fake_cuda():
            seeded(0)
            module = Other()
            other.Trainer(
                max_epochs=1,
                accelerator="gpu",
                devices=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=graphs,
            ).fit(module, DataLoader(samples(24), 4))
            losses.append([one.item() for one in module.losses])
    assert losses[0] == losses[1]
    assert "2 replays" in str(graphs[0].report())


def test_without_a_gpu_it_does_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graphs, module = hr.lightning.SpeedUp(), Module()
    with pytest.raises(StepError, match=r"before Trainer\.fit"):
        graphs.report()
    trainer = lightning.Trainer(
        fast_dev_run=True, accelerator="cpu", callbacks=[graphs], enable_progress_bar=False
    )
    trainer.fit(module, DataLoader(samples(4), 4))
    assert graphs.report().off == "graphs need a GPU, and this trains on cpu"
    assert "SpeedUp does nothing: graphs need a GPU, and this trains on cpu" in caplog.text
