"""The weight files of a run: the last, the best, and its last epochs', to be averaged."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headrace.checkpoint import weights_from_file, weights_to_file
from headrace.device import Device
from headrace.errors import TranslationError
from headrace.parallel import Ranks, full_state_dict
from headrace.runs import RunFolder


@dataclass
class KeptWeights:
    """A folder of weights. `best` says of which epoch the best are, and why. Of several ranks the
    first writes, and all have to ask."""

    folder: Path
    model: torch.nn.Module
    device: Device
    ranks: Ranks
    average_last: int
    best: dict[str, Any] = field(default_factory=dict)

    def restore(self, best: dict[str, Any]) -> None:
        """Go on with what a checkpoint says of the best."""
        self.best = best

    def keep(self, epoch: int, found: dict[str, float]) -> None:
        """The weights as they are after an epoch, which was worth what was `found` of it."""
        self._write("last")
        value = (found.get("bleu", 0.0), -found["valid_nll"])
        if not self.best or value > tuple(self.best["value"]):
            self.best = {"epoch": epoch, "value": list(value)}
            self._write("best")
        if self.average_last:
            self._write(f"epoch-{epoch:05}")
            for old in self._epochs()[: -self.average_last] if self.ranks.is_first else ():
                old.unlink()

    def to_use(self) -> str:
        """At the end: the name of those to translate with."""
        name = "best"
        if self.ranks.is_first and self._epochs():
            name = "averaged"
            weights_to_file(self.path(name), self._averaged())
        return self.ranks.broadcast(name, self.device.ledger)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _write(self, name: str) -> None:
        weights = full_state_dict(self.model)
        if self.ranks.is_first:
            # On the run's own device, so that the wait for the copy is in its ledger.
            weights_to_file(self.path(name), weights, device=self.device)

    def _epochs(self) -> list[Path]:
        return sorted(self.folder.glob("epoch-*.safetensors"))

    def _averaged(self) -> dict[str, torch.Tensor]:
        """The mean of the last epochs' weights."""
        stored = [weights_from_file(path) for path in self._epochs()]
        return {
            name: torch.stack([one[name].double() for one in stored]).mean(0).to(value.dtype)
            for name, value in stored[0].items()
        }


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Weights from a file, or from a run's folder (its best); what does not fit is named."""
    if path.is_dir():
        path = RunFolder.open(path).weights / "best.safetensors"
    if not path.exists():
        there = ", ".join(sorted(p.stem for p in path.parent.glob("*.safetensors")))
        if not there and (path.parent.parent / "config.yaml").exists():
            there = "none yet: a run writes its first weights after its first epoch"
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
