"""Monitoring as a callback of the Trainer of Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import headrace as hr

pytest.importorskip("transformers")


def train(steps: int) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(1)
    for _ in range(steps):
        optimizer.step()


@pytest.mark.parametrize("report_to", [[], ["tensorboard"]])
def test_a_training_is_watched_from_its_begin_to_its_end(
    tmp_path: Path, report_to: list[str]
) -> None:
    events, file = tmp_path / "events", tmp_path / "steps.jsonl"
    given: Any = SimpleNamespace(logging_dir=str(events), report_to=report_to)
    state: Any = SimpleNamespace(is_world_process_zero=True)
    callback = hr.TrainerMonitor(file)
    callback.on_train_begin(given, state, None)
    train(20)
    callback.on_train_begin(given, state, None)  # an error had ended the first one
    train(40)
    callback.on_train_end(given, state, None)
    train(40)
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line["steps"] for line in lines] == [10, 30]
    assert events.exists() is bool(report_to)
    assert callback.latest is not None
    assert callback.latest.step == 40
