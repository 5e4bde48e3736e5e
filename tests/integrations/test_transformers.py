"""`hr.transformers.speed_up` in the Hugging Face Trainer: all is as without it, but the waits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import headrace as hr
from frameworks.training import assert_same, forget_accelerators, needs, seeded, weights
from headrace.errors import StepError
from headrace.fake import fake_cuda

transformers = needs("transformers")
needs("accelerate")

EPOCHS, BATCHES = 2, 5


class Sentences(Dataset[Any]):
    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(5, 60, (6,), generator=torch.Generator().manual_seed(at))
        mask = torch.ones_like(ids)
        mask[6 - at % 3 :] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids[0] % 2}


def bert(dropout: float = 0.1) -> Any:
    seeded(0)
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return transformers.BertForSequenceClassification(config)


@dataclass
class Seen(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """What a callback is told, and which operations make the host wait in steps from the fourth
    on."""

    device: Any
    logs: list[Any] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    before: int = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.before = len(self.device.hidden_waits)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step > 4:
            self.waits += [one.operation for one in self.device.hidden_waits[self.before :]]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **others: Any) -> None:
        self.logs.append((state.global_step, state.epoch, timeless(logs)))


def timeless(logs: dict[str, Any]) -> dict[str, Any]:
    """Without the values that a clock has measured."""
    return {
        name: value for name, value in logs.items() if not name.endswith(("runtime", "_per_second"))
    }


@dataclass
class Run:
    """What a training has left behind."""

    history: list[Any]
    logs: list[Any]
    tokens: int
    loss: float
    weights: dict[str, torch.Tensor]
    waits: list[str]
    report: str


def train(sped_up: bool, folder: Path, kind: Any = None, resume: Any = None, **options: Any) -> Run:
    kind, more = kind or transformers.Trainer, options.pop("more", {})
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": EPOCHS,
        "learning_rate": 5e-3,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 3,
    }
    try:
        with fake_cuda() as device:
            made = transformers.Seq2SeqTrainingArguments(**arguments | options)
            model = bert(0.0 if made.gradient_checkpointing else 0.1)
            trainer = kind(model, made, train_dataset=Sentences(), **more)
            trainer.remove_callback(transformers.PrinterCallback)
            handle = hr.transformers.speed_up(trainer) if sped_up else None
            seen = Seen(device)
            trainer.add_callback(seen)
            result = trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
            return Run(
                list(map(timeless, trainer.state.log_history)),
                seen.logs,
                trainer.state.num_input_tokens_seen,
                result.training_loss,
                weights(trainer.model),
                seen.waits,
                str(handle.report()) if handle is not None else "",
            )
    finally:
        forget_accelerators()


def compare(folder: Path, *arguments: Any, **options: Any) -> tuple[Run, Run]:
    """Train both ways: logged values, what callbacks saw, and weights must be the same."""
    alone, sped_up = (train(one, folder / str(one), *arguments, **options) for one in (False, True))
    assert repr(sped_up.history) == repr(alone.history)  # some are NaN
    assert repr(sped_up.logs) == repr(alone.logs)
    assert repr((sped_up.tokens, sped_up.loss)) == repr((alone.tokens, alone.loss))
    assert_same(sped_up.weights, alone.weights)
    assert "BertForSequenceClassification: " in sped_up.report
    assert sped_up.report.count(", 1 captures") == 2, sped_up.report
    return alone, sped_up


class OwnLoss(transformers.Seq2SeqTrainer):  # type: ignore[misc, name-defined]
    """A loss of the user's, which is NaN once."""

    calls = 0

    def compute_loss(self, model: Any, inputs: Any, **others: Any) -> Any:
        labels = inputs.pop("labels")
        loss = torch.nn.functional.cross_entropy(model(**inputs).logits, labels)
        self.calls += 1
        return loss.detach() * loss * (float("inf") if self.calls == 6 else 1.0)

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        loss = super().training_step(*arguments, **named)
        if self.calls == 6:
            self.model.zero_grad()
        return loss


# The fake device captures no checkpoints that set the random state.
CHECKPOINTS = {"use_reentrant": False, "preserve_rng_state": False}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (None, {"bf16": True}),
        (None, {"fp16": True, "include_num_input_tokens_seen": "all"}),
        (
            None,
            {"gradient_accumulation_steps": 2, "include_num_input_tokens_seen": "non_padding"},
        ),
        (OwnLoss, {"logging_steps": 3, "max_steps": 10}),
        (OwnLoss, {"logging_nan_inf_filter": False}),
        (None, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": CHECKPOINTS}),
    ],
)
def test_the_same_and_no_waits(tmp_path: Path, kind: Any, options: Any) -> None:
    alone, sped_up = compare(tmp_path, kind, **options)
    assert len(alone.logs) > 3
    assert alone.waits
    assert sped_up.waits == []


def accuracy(result: Any) -> dict[str, float]:
    return {"accuracy": float((result.predictions.argmax(-1) == result.label_ids).mean())}


def files(folder: Path) -> Iterator[tuple[str, Any]]:
    """What the checkpoints have: tensors by content, other files but the arguments' by byte."""
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix in (".pt", ".pth"):
            yield name, repr(torch.load(path, "cpu", weights_only=False))
        elif path.name == "trainer_state.json":
            state = json.loads(path.read_text(encoding="utf-8"))
            state["log_history"] = list(map(timeless, state["log_history"]))
            state["best_model_checkpoint"] = Path(state["best_model_checkpoint"] or "").name
            yield name, state
        elif path.is_file() and path.name != "training_args.bin":
            yield name, path.read_bytes()


def test_evaluations_checkpoints_and_a_resumed_training(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": 4,
        "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
        "more": {"eval_dataset": Sentences(), "compute_metrics": accuracy},
    }
    alone, _ = compare(tmp_path, **options)
    assert sum("eval_accuracy" in entry for entry in alone.history) == 3
    one, other = (dict(files(tmp_path / name)) for name in ("False", "True"))
    assert len(one) >= 3 * 6
    assert one == other
    compare(tmp_path, None, tmp_path / "False" / "checkpoint-4", logging_steps=2)


def test_a_log_of_the_subclass_gets_values_at_their_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as TRL's, which logs means of what it has collected since the last call."""

    class Collects(transformers.Trainer):  # type: ignore[misc, name-defined]
        steps = 0

        def training_step(self, *arguments: Any, **named: Any) -> Any:
            self.steps += 1
            return super().training_step(*arguments, **named)

        def log(self, logs: Any, *arguments: Any) -> None:
            super().log(logs | {"collected": self.steps}, *arguments)

    caplog.set_level("INFO", "headrace")
    alone, sped_up = compare(tmp_path, Collects, logging_steps=2)
    assert alone.waits
    assert sped_up.waits == []  # between the steps that log
    assert "Collects has a method log of its own" in caplog.text


def test_a_callback_that_decides_by_late_values_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stops(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 3:
                control.should_training_stop = True

    run = train(True, tmp_path, more={"callbacks": [Stops()]})
    assert run.logs[-1][0] in (4, 5)  # of 10
    assert "a callback's on_log has changed trainer.control at the values of step 3" in caplog.text


def test_a_training_that_is_stopped_logs_all_values(tmp_path: Path) -> None:
    class Stops(transformers.Trainer):  # type: ignore[misc, name-defined]
        def training_step(self, *arguments: Any, **named: Any) -> Any:
            if self.state.global_step == 7:
                raise LookupError
            return super().training_step(*arguments, **named)

    logs = []
    for sped_up in (False, True):
        told: list[Any] = []

        class Tells(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
            def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
                told.append((state.global_step, logs))  # noqa: B023

        with pytest.raises(LookupError):
            train(sped_up, tmp_path, Stops, more={"callbacks": [Tells()]})
        logs.append(told)
    assert logs[0] == logs[1]
    assert len(logs[0]) == 7


def test_the_host_is_at_most_eight_batches_ahead(tmp_path: Path) -> None:
    with fake_cuda():
        arguments = transformers.TrainingArguments(
            tmp_path, max_steps=20, report_to="none", disable_tqdm=True, save_strategy="no"
        )
        trainer = transformers.Trainer(bert(), arguments, train_dataset=Sentences())
        hr.transformers.speed_up(trainer, plan="graph")
        step, ended, behind = trainer.training_step, [], []

        def timed(*given: Any, **named: Any) -> Any:
            loss = step(*given, **named)
            behind.append(sum(not event.query() for event in ended))
            ended.append(torch.cuda.Event())
            ended[-1].record()
            return loss

        trainer.training_step = timed
        trainer.train()
    forget_accelerators()
    assert 4 < max(behind) <= 8


def test_close_gives_the_trainer_its_own_methods_back(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to="none")
    with fake_cuda():
        trainer = transformers.Trainer(bert(), transformers.TrainingArguments(tmp_path))
        before = dict(vars(trainer))
        handle = hr.transformers.speed_up(trainer)
        assert "training_step" in vars(trainer)
        handle.close()
        assert vars(trainer) == before
    forget_accelerators()
    trainer = transformers.Trainer(bert(), arguments)
    report = hr.transformers.speed_up(trainer).report()
    assert report.off == "graphs need a GPU, and this trains on cpu"
    assert "training_step" not in vars(trainer)
    with pytest.raises(StepError, match="was given Sentences; expected a Trainer"):
        hr.transformers.speed_up(Sentences())
    forget_accelerators()
