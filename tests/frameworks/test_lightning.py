"""Lightning's Trainer with a prefetched loader: its epochs, samplers and checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

import headrace as hr
from frameworks.training import (
    assert_same,
    classifier,
    loss_of,
    needs,
    samples,
    seeded,
    shuffled,
    weights,
)

lightning = needs("lightning")
SingleDeviceStrategy = needs("lightning.pytorch.strategies").SingleDeviceStrategy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
]


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier()
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = loss_of(self.inner, batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Ahead(SingleDeviceStrategy):  # type: ignore[misc, valid-type]
    """Copies ahead in a strategy: batches are on the device when Lightning asks for them."""

    def process_dataloader(self, dataloader: Any) -> Any:
        return hr.prefetch(dataloader, str(self.root_device))

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        return batch


def trainer(**options: Any) -> Any:
    usual = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(**usual | options)


def fitted(loader: Any, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    module = Module()
    seeded(5)
    trainer(**options).fit(module, loader)
    return module.losses, weights(module)


class TestFit:
    def test_the_same_with_a_prefetched_loader(self) -> None:
        losses, expected = fitted(shuffled())
        assert len(losses) == 20
        found, prefetched = fitted(hr.prefetch(shuffled(), "cpu"))
        assert found == losses
        assert_same(prefetched, expected)

    def test_the_same_with_a_strategy(self) -> None:
        losses, expected = fitted(shuffled())
        found, prefetched = fitted(shuffled(), strategy=Ahead(device="cpu"))
        assert found == losses
        assert_same(prefetched, expected)

    def test_a_sampler_is_told_the_epoch(self) -> None:
        told: list[int] = []

        class Told(RandomSampler):
            def set_epoch(self, epoch: int) -> None:
                told.append(epoch)

        loader = DataLoader(samples(), 4, sampler=Told(samples()))
        fitted(hr.prefetch(loader, "cpu"))
        assert told == [0, 1]

    def test_a_part_of_the_batches(self) -> None:
        losses, expected = fitted(shuffled(), limit_train_batches=0.5)
        assert len(losses) == 10
        found, prefetched = fitted(hr.prefetch(shuffled(), "cpu"), limit_train_batches=0.5)
        assert found == losses
        assert_same(prefetched, expected)


class KeepsItsPlace(DataLoader[Any]):
    """A loader with a state of its own: how many batches it gave."""

    given = 0

    def __iter__(self) -> Any:
        for at, batch in enumerate(super().__iter__()):
            if at >= self.given:
                self.given = at + 1
                yield batch
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def test_a_checkpoint_has_the_state_after_the_last_batch(tmp_path: Path) -> None:
    """Not after those that were fetched ahead: the next run trains on those, too."""

    class Stopping(Module):
        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if self.trainer.global_step == 4:
                self.trainer.save_checkpoint(tmp_path / "middle.ckpt")

    def loader() -> Any:
        return hr.prefetch(KeepsItsPlace(samples(), batch_size=4), "cpu")

    module = Stopping()
    seeded(5)
    trainer(max_epochs=1).fit(module, loader())
    seen: list[torch.Tensor] = []

    class Seeing(Module):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            seen.append(batch[0])
            return super().training_step(batch, index)

    trainer(max_epochs=1).fit(Seeing(), loader(), ckpt_path=tmp_path / "middle.ckpt")
    expected = [features for features, _ in DataLoader(samples(), batch_size=4)][4:]
    assert len(seen) == len(expected)
    assert all(map(torch.equal, seen, expected))


def test_its_loader_in_the_engine() -> None:
    """What a LightningModule trains with, without Lightning's loop: the same."""
    losses, expected = fitted(shuffled())
    module = Module()
    engine = hr.Engine(module, module.configure_optimizers(), lambda m, b: m.training_step(b, 0))
    seeded(5)
    loader = shuffled()
    assert [one for _ in range(2) for one in engine.epoch(loader).losses] == losses
    assert_same(weights(module), expected)
