"""Hugging Face models, schedules and the Trainer, against loops by hand and the Trainer's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

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
from headrace.device import Device, open_device
from headrace.errors import StepError
from headrace.fake import FakeDevice

transformers = needs("transformers")
needs("accelerate")

EPOCHS = 2
TINY = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "num_labels": 3,
}


class Sentences(Dataset[Any]):
    """Pairs of token ids, of several lengths, and a label, as a GLUE task has them."""

    def __init__(self, count: int = 22) -> None:
        draw = torch.Generator().manual_seed(1)
        lengths = torch.randint(4, 12, (count,), generator=draw).tolist()
        self._ids = [torch.randint(5, 60, (length,), generator=draw) for length in lengths]
        self._labels = torch.randint(0, 3, (count,), generator=draw).tolist()

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"input_ids": self._ids[at], "labels": self._labels[at]}


def padded(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = [item["input_ids"] for item in items]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(one) for one in ids], batch_first=True),
        "labels": torch.tensor([item["labels"] for item in items]),
    }


def as_encoding(items: list[dict[str, Any]]) -> Any:
    """What the tokenizers' collators return: a mapping that moves itself."""
    return transformers.BatchEncoding(padded(items))


def sentences(collate: Any = padded) -> DataLoader[Any]:
    return DataLoader(Sentences(), batch_size=4, shuffle=True, collate_fn=collate)


def bert() -> Any:
    seeded(0)
    config = transformers.BertConfig(**TINY)
    return transformers.BertForSequenceClassification(config)


def distilbert() -> Any:
    seeded(0)
    config = transformers.DistilBertConfig(
        vocab_size=60, dim=16, n_layers=2, n_heads=2, hidden_dim=32, num_labels=3
    )
    return transformers.DistilBertForSequenceClassification(config)


def their_loss(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def parts(model: Any, updates: int = 12) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return optimizer, transformers.get_scheduler(
        "linear", optimizer, num_warmup_steps=3, num_training_steps=updates
    )


def by_hand(make: Callable[[], Any], collate: Any = padded) -> tuple[list[float], Any]:
    """The loop of a GLUE script."""
    model = make()
    optimizer, scheduler = parts(model)
    losses, loader = [], sentences(collate)
    model.train()
    seeded(5)
    for _ in range(EPOCHS):
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, weights_of(model)


def by_engine(
    make: Callable[[], Any], plan: str, device: Device, collate: Any = padded
) -> tuple[list[float], Any]:
    model = make().to(device.torch_device)
    optimizer, scheduler = parts(model)
    engine = hr.Engine(
        model.train(),
        optimizer,
        their_loss,
        scheduler=scheduler,
        clip_norm=1.0,
        plan=plan,
        device=device,
    )
    loader = sentences(collate)
    seeded(5)
    losses = [one for _ in range(EPOCHS) for one in engine.epoch(loader).losses]
    return losses, weights_of(model)


class TestModels:
    @pytest.mark.parametrize("make", [bert, distilbert])
    @pytest.mark.parametrize("plan", EAGER)
    def test_the_same_as_by_hand(self, make: Callable[[], Any], plan: str) -> None:
        losses, expected = by_hand(make)
        found, weights = by_engine(make, plan, open_device("cpu"))
        assert found == losses
        assert_same(weights, expected)

    @pytest.mark.parametrize("collate", [padded, as_encoding])
    def test_on_a_device(self, collate: Any) -> None:
        losses, expected = by_hand(bert, collate)
        with FakeDevice() as device:
            found, weights = by_engine(bert, "streams4", device, collate)
        assert found == losses
        assert_same(weights, expected)

    @pytest.mark.parametrize("padding", [None, 0, 2])
    def test_as_a_graph(self, padding: int | None) -> None:
        """Outside of captures, transformers asks on the host whether a mask is all ones."""
        ids = torch.randint(5, 60, (2, 6), generator=torch.Generator().manual_seed(1))
        batch = {"input_ids": ids, "labels": torch.tensor([0, 1])}
        if padding is not None:
            batch["attention_mask"] = torch.ones(2, 6, dtype=torch.long)
            batch["attention_mask"][0, 6 - padding :] = 0
        found = {}
        for plan in ("pipeline", "graph"):
            with FakeDevice() as device:
                model = bert().to(device.torch_device).train()
                # Of a fused optimizer the capturable kind gives the same bits.
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
                engine = hr.Engine(model, optimizer, their_loss, plan=plan, device=device)
                seeded(5)
                found[plan] = engine.epoch([batch] * 6).losses
        assert found["graph"] == found["pipeline"]
        assert engine.graphs is not None
        assert engine.graphs.why is None
        assert engine.graphs.replays == 3

    def test_gradient_checkpointing_as_a_graph(self) -> None:
        """Its hook is refused; the advice is to remove it, and that is enough."""
        batch = {"input_ids": torch.full((2, 6), 7), "labels": torch.tensor([0, 1])}
        with FakeDevice() as device:
            model = bert().to(device.torch_device).train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            model.gradient_checkpointing_enable(
                {"use_reentrant": False, "preserve_rng_state": False}
            )
            reports = []
            for _ in range(2):
                engine = hr.Engine(model, optimizer, their_loss, plan="graph", device=device)
                engine.epoch([batch] * 5)
                reports.append(engine.graphs)
                model.disable_input_require_grads()
        refused, captured = reports
        assert "call model.disable_input_require_grads()" in str(refused.why)
        assert (captured.why, captured.captures) == (None, 1)


class TestSchedules:
    """`get_scheduler` gives PyTorch's, and a few that follow a metric."""

    KINDS = (
        ("linear", {}),
        ("cosine", {}),
        ("cosine_with_restarts", {}),
        ("polynomial", {}),
        ("constant_with_warmup", {}),
        ("inverse_sqrt", {}),
        ("cosine_with_min_lr", {"min_lr": 1e-3}),
        ("warmup_stable_decay", {"num_decay_steps": 4}),
    )

    @pytest.mark.parametrize(("name", "options"), KINDS)
    def test_the_same_rates_also_when_resumed(self, name: str, options: Any) -> None:
        def made() -> tuple[Any, Any, Any]:
            model = classifier()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return (
                model,
                optimizer,
                transformers.get_scheduler(
                    name, optimizer, 3, 10, scheduler_specific_kwargs=options
                ),
            )

        _, optimizer, scheduler = made()
        expected = []
        for _ in range(10):
            optimizer.step()
            scheduler.step()
            expected.append(optimizer.param_groups[0]["lr"])
        assert len(set(expected)) > 2
        data = [(torch.ones(2, 8), torch.tensor([0, 1]))] * 10
        model, optimizer, scheduler = made()
        engine = hr.Engine(model, optimizer, loss_of, scheduler=scheduler)
        rates = [optimizer.param_groups[0]["lr"] for _ in engine.steps(data)]
        assert rates == expected
        model, optimizer, scheduler = made()
        state = stopped_after(hr.Engine(model, optimizer, loss_of, scheduler=scheduler), data, 4)
        model, optimizer, scheduler = made()
        engine = hr.Engine(model, optimizer, loss_of, scheduler=scheduler)
        engine.load_state_dict(state)
        rates = [optimizer.param_groups[0]["lr"] for _ in engine.steps(data)]
        assert rates == expected[4:]

    @pytest.mark.parametrize("name", ["reduce_lr_on_plateau", "greedy"])
    def test_those_that_follow_a_metric(self, name: str) -> None:
        """They are given the mean loss of each epoch."""
        data = [(torch.ones(2, 8), torch.tensor([0, 1]))] * 3
        found = []
        for by_engine in (False, True):
            model = classifier()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scheduler = transformers.get_scheduler(
                name, optimizer, scheduler_specific_kwargs={"patience": 0}
            )
            options: dict[str, Any] = {}
            if by_engine:
                options = {"scheduler": scheduler, "scheduler_every": "epoch"}
            engine = hr.Engine(model, optimizer, loss_of, **options)
            seeded(5)
            rates = []
            for _ in range(6):
                mean = engine.epoch(data).mean_loss
                if not by_engine:
                    scheduler.step(mean)
                rates.append(optimizer.param_groups[0]["lr"])
            found.append(rates)
        assert found[0] == found[1]
        assert len(set(found[0])) > 1

    def test_a_metric_needs_a_whole_epoch(self) -> None:
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = transformers.get_scheduler("greedy", optimizer)
        with pytest.raises(StepError, match="GreedyLR needs the epoch's mean loss"):
            hr.Engine(model, optimizer, loss_of, scheduler=scheduler)


def arguments(folder: Path, **options: Any) -> Any:
    usual = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "num_train_epochs": EPOCHS,
        "learning_rate": 5e-3,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 3,
    }
    return transformers.TrainingArguments(**usual | options)


class Prefetching(transformers.Trainer):  # type: ignore[misc, name-defined]
    def get_train_dataloader(self) -> Any:
        return hr.prefetch(super().get_train_dataloader(), "cpu")


def trained(
    kind: type[Any], folder: Path, resume: Path | None = None, **options: Any
) -> tuple[list[float], Any]:
    trainer = kind(
        model=bert(),
        args=arguments(folder, **options),
        train_dataset=Sentences(),
        data_collator=padded,
    )
    seeded(5)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, weights_of(trainer.model)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
class TestTrainer:
    @pytest.mark.parametrize("accumulation", [1, 4])
    def test_the_same_with_a_prefetched_loader(self, tmp_path: Path, accumulation: int) -> None:
        options = {"gradient_accumulation_steps": accumulation}
        losses, expected = trained(transformers.Trainer, tmp_path, **options)
        assert len(losses) == EPOCHS * (6 if accumulation == 1 else 2)
        found, weights = trained(Prefetching, tmp_path, **options)
        assert found == losses
        assert_same(weights, expected)

    def test_its_checkpoints(self, tmp_path: Path) -> None:
        """Resumed in the midst of an epoch, with a loader that Trainer makes of ours."""
        losses, expected = trained(
            Prefetching, tmp_path, save_strategy="steps", save_steps=4, save_total_limit=5
        )
        found, weights = trained(Prefetching, tmp_path, tmp_path / "checkpoint-4")
        assert found == losses
        assert_same(weights, expected)

    @pytest.mark.parametrize("plan", ["baseline", "pipeline"])
    def test_its_loader_optimizer_and_schedule_in_the_engine(
        self, tmp_path: Path, plan: str
    ) -> None:
        losses, expected = trained(transformers.Trainer, tmp_path)
        trainer = transformers.Trainer(
            model=bert(),
            args=arguments(tmp_path),
            train_dataset=Sentences(),
            data_collator=padded,
        )
        trainer.create_optimizer_and_scheduler(num_training_steps=12)
        seeded(5)  # from which its sampler takes its seed
        loader = trainer.get_train_dataloader()
        engine = hr.Engine(
            trainer.model.train(),
            trainer.optimizer,
            their_loss,
            scheduler=trainer.lr_scheduler,
            clip_norm=1.0,
            plan=plan,
        )
        found = [one for _ in range(EPOCHS) for one in engine.epoch(loader).losses]
        assert [round(one, 4) for one in found] == [round(one, 4) for one in losses]
        assert_same(weights_of(trainer.model), expected)
