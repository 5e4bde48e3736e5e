"""The result of a run, stored in `result.json` when the run is finished."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from headrace.errors import TranslationError
from headrace.runs import RunFolder, replace_file
from headrace.translation.score import Scores


@dataclass(frozen=True)
class TrainResult:
    """The result of `Trainer.run`.

    `stopped` names the signal that stopped the run, or is None if it is finished. `examples` are
    (source, reference, translation) of sentences that the model was not trained on.
    """

    folder: RunFolder
    stopped: str | None
    updates: int
    scores: Scores | None = None
    examples: list[tuple[str, str, str]] = field(default_factory=list)

    def store(self) -> None:
        """Write `result.json`, which marks the run as finished."""
        assert self.scores is not None
        content = {
            "updates": self.updates,
            "scores": asdict(self.scores),
            "examples": self.examples,
        }
        text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        replace_file(_result_file(self.folder), text.encode())


def stored_result(folder: RunFolder) -> TrainResult | None:
    """Read the result of a finished run; None if it is not finished."""
    path = _result_file(folder)
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        examples = [(src, trg, found) for src, trg, found in content["examples"]]
        scores = Scores(**content["scores"])
        return TrainResult(folder, None, content["updates"], scores, examples)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        raise TranslationError(
            f"{path}: is not the result of a finished run ({problem}); remove it and use "
            "--resume to score the run again"
        ) from problem


def _result_file(folder: RunFolder) -> Path:
    return folder.path / "result.json"
