"""The weight files of a run: of the last epoch, of the best one, and of the last few to average."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headrace.checkpoint import weights_from_file, weights_to_file
from headrace.device import Device
from headrace.errors import TranslationError
from headrace.lifecycle import RunFolder
from headrace.parallel import Ranks, full_state_dict


@dataclass
class WeightFiles:
    """Writes the weight files of a run. `best` has the epoch and the validation scores of the best
    weights. All ranks must call its methods; rank 0 writes."""

    folder: Path
    model: torch.nn.Module
    device: Device
    ranks: Ranks
    average_last: int
    best: dict[str, Any] = field(default_factory=dict)

    def restore(self, best: dict[str, Any]) -> None:
        """Continue with `best` from a checkpoint."""
        self.best = best

    def keep(self, epoch: int, scores: dict[str, float]) -> None:
        """Write the current weights after an epoch with these validation scores."""
        self._write("last")
        value = (scores.get("bleu", 0.0), -scores["valid_nll"])
        if not self.best or value > tuple(self.best["value"]):
            self.best = {"epoch": epoch, "value": list(value)}
            self._write("best")
        if self.average_last:
            self._write(f"epoch-{epoch:05}")
            for old in self._epoch_files()[: -self.average_last] if self.ranks.is_first else ():
                old.unlink()

    def epochs_without_better(self, epoch: int) -> int:
        """How many epochs, up to `epoch`, have not been better than the best one."""
        if not self.best:
            return 0
        return epoch - max(int(self.best["epoch"]), int(self.best.get("counted_from", 0)) - 1)

    def count_from(self, epoch: int) -> None:
        """Count the epochs without a better one from `epoch` on: a finished run trains on."""
        if self.best:
            self.best["counted_from"] = epoch

    def final_weights(self) -> str:
        """The name of the weights to score: "best", or "averaged", which it writes first."""
        name = "best"
        if self.ranks.is_first and self._epoch_files():
            name = "averaged"
            weights_to_file(self.path(name), self._averaged())
        return self.ranks.broadcast(name, self.device.ledger)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _write(self, name: str) -> None:
        weights = full_state_dict(self.model)
        if self.ranks.is_first:
            # The device is given so that its ledger records the wait for the copy.
            weights_to_file(self.path(name), weights, device=self.device)

    def _epoch_files(self) -> list[Path]:
        return sorted(self.folder.glob("epoch-*.safetensors"))

    def _averaged(self) -> dict[str, torch.Tensor]:
        """The mean of the weights of the last epochs."""
        stored = [weights_from_file(path) for path in self._epoch_files()]
        return {
            name: torch.stack([one[name].double() for one in stored]).mean(0).to(value.dtype)
            for name, value in stored[0].items()
        }


def run_of_weights(weights: str) -> Path | None:
    """The folder of the run whose weights these are: that folder, or a file in its `weights`. None
    if there is no run."""
    path = Path(weights)
    run = path if path.is_dir() else path.parent.parent
    return run if (run / "config.yaml").is_file() else None


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Load weights from a file, or the best ones of a run folder. Raises if they do not fit."""
    if path.is_dir():
        path = RunFolder.open(path).weights / "best.safetensors"
    if not path.exists():
        there = ", ".join(sorted(p.stem for p in path.parent.glob("*.safetensors")))
        if not there and (path.parent.parent / "config.yaml").exists():
            there = "none yet: a run writes weights at the end of each epoch"
        raise TranslationError(f"{path}: does not exist; found {there or 'no weights beside it'}")
    stored, own = weights_from_file(path), model.state_dict()
    for name in sorted(stored.keys() | own.keys()):
        found = tuple(stored[name].shape) if name in stored else "nothing"
        wanted = tuple(own[name].shape) if name in own else "nothing"
        if found != wanted:
            raise TranslationError(
                f"{path}: {name} is {found}, the model has {wanted}; expected weights of a model "
                "of the same size and vocabularies"
            )
    model.load_state_dict(stored)
