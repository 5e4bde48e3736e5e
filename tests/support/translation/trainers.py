"""Small training runs of the translation trainer."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from headrace.translation import Trainer, TrainSettings

SMALL: dict[str, Any] = {
    "src": "en",
    "trg": "de",
    "vocabulary": 300,
    "preset": "tiny",
    "width": 16,
    "heads": 2,
    "layers": 1,
    "inner": 32,
    "sentences": 16,
    "epochs": 2,
    "warmup": 10,
    "beam": 2,
    "valid_sentences": 4,
    "device": "cpu",
    "save_every": 0,
    "tensorboard": False,
}


def new(corpus: Path, project: Path, name: str, **changes: Any) -> Trainer:
    settings = TrainSettings.from_dict({**SMALL, "data": str(corpus / "pairs.tsv"), **changes})
    return Trainer.create(settings, project=project, name=name, cache=corpus / "cache", quiet=True)


def weights_of(run: Path) -> str:
    return hashlib.sha256((run / "weights" / "last.safetensors").read_bytes()).hexdigest()
