"""What a run came to, and the file that says so."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import TranslationError
from headrace.runs import RunFolder, replace_file
from headrace.translation.score import Scores


@dataclass
class Sums:
    """An epoch's loss so far, over its batches and across interruptions."""

    loss: float = 0.0
    weight: float = 0.0

    def add(self, loss: float, weight: float) -> None:
        if math.isfinite(loss):  # each that is not is reported by itself
            self.loss += loss * weight
            self.weight += weight

    @property
    def mean(self) -> float:
        return self.loss / self.weight if self.weight else float("nan")


@dataclass(frozen=True)
class TrainResult:
    """What a run came to. `stopped` names the signal that ended it early; None: it is finished.
    `examples` are (source, reference, translation) of sentences that it never saw."""

    folder: RunFolder
    stopped: str | None
    updates: int
    scores: Scores | None = None
    examples: list[tuple[str, str, str]] = field(default_factory=list)

    def store(self) -> None:
        """Write `result.json`: the run is finished."""
        assert self.scores is not None
        content = {
            "updates": self.updates,
            "scores": asdict(self.scores),
            "examples": self.examples,
        }
        text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        replace_file(_path(self.folder), text.encode())


def stored_result(folder: RunFolder) -> TrainResult | None:
    """The result of a finished run; None if it is not finished."""
    path = _path(folder)
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        examples = [(src, trg, found) for src, trg, found in content["examples"]]
        scores = Scores(**content["scores"])
        return TrainResult(folder, None, content["updates"], scores, examples)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        raise TranslationError(
            f"{path}: is no result of a finished run ({problem}); take it away, and --resume "
            "scores the run again"
        ) from problem


def is_of_an_end_after(epochs: int, line: Mapping[str, Any]) -> bool:
    """Whether a line of metrics is of an epoch's or the run's end, and a run with so many epochs
    done is yet to come there: killed at that end, it has written the line and no checkpoint."""
    kind, epoch = line.get("kind"), line.get("epoch")
    if kind == "epoch" and isinstance(epoch, int):
        return epoch >= epochs
    return kind in ("test", "valid")


def _path(folder: RunFolder) -> Path:
    return folder.path / "result.json"
