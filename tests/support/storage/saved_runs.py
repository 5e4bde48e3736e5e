"""A run folder with random weights: enough to translate, evaluate and export, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headrace.checkpoint import weights_to_file
from headrace.lifecycle import RunFolder
from headrace.translation import TrainSettings, prepared_for
from headrace.translation.corpus.vocabulary import Vocabulary
from headrace.translation.model import new_model
from headrace.translation.saved_model import save_vocabularies
from support.translation.corpora import write_corpus
from support.translation.trainers import SMALL


def write_run(folder: Path, *, cache: Path | None = None, **changes: Any) -> Path:
    """Write a corpus and a run of it into `folder`. Returns the run's folder. With a `cache` the
    corpus is prepared there, and the run has its vocabularies."""
    write_corpus(folder)
    values = {**SMALL, "data": str(folder / "pairs.tsv"), "epochs": 1, **changes}
    settings = TrainSettings.from_dict(values)
    run = RunFolder.create(folder, "run")
    run.write_config(settings.to_dict())
    if cache is not None:
        source, target = prepared_for(settings, cache).vocabularies
    else:
        lines = (folder / "pairs.tsv").read_text(encoding="utf-8").splitlines()
        source = Vocabulary.train([line.split("\t")[0] for line in lines], settings.vocabulary)
        target = source
        if not settings.joint:
            target = Vocabulary.train([line.split("\t")[1] for line in lines], settings.vocabulary)
    save_vocabularies(run.path / "vocabulary", (source, target))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = new_model(settings.model(), (source, target))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    weights_to_file(run.weights / "best.safetensors", model.state_dict())
    return run.path
