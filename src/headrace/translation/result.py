"""The result of a run, stored in `result.json` when the run is finished."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import ReportError, TranslationError
from headrace.lifecycle import RunFolder
from headrace.records import FinishedRun, Scores


@dataclass(frozen=True)
class TrainResult:
    """The result of `Trainer.run`.

    `stopped` names the signal that stopped the run, or is None if it is finished. `ended_early` is
    "time limit" or "patience" if that ended it before its last epoch. `examples` are (source,
    reference, translation) of sentences that the model was not trained on.
    """

    folder: RunFolder
    stopped: str | None
    updates: int
    scores: Scores | None = None
    examples: list[tuple[str, str, str]] = field(default_factory=list)
    ended_early: str | None = None

    def store(self) -> None:
        """Write `result.json`, which marks the run as finished."""
        assert self.scores is not None
        stored = FinishedRun(self.updates, self.scores, tuple(self.examples), self.ended_early)
        stored.write(_result_file(self.folder))


def stored_result(folder: RunFolder) -> TrainResult | None:
    """Read the result of a finished run; None if it is not finished."""
    path = _result_file(folder)
    if not path.exists():
        return None
    try:
        stored = FinishedRun.read(path)
    except ReportError as problem:
        raise TranslationError(
            f"{path}: is not the result of a finished run ({problem}); remove it and use "
            "--resume to score the run again"
        ) from problem
    examples = [(src, trg, found) for src, trg, found in stored.examples]
    return TrainResult(folder, None, stored.updates, stored.scores, examples, stored.ended_early)


def remove_result(folder: RunFolder) -> None:
    """Mark a finished run as unfinished, because it trains on."""
    _result_file(folder).unlink(missing_ok=True)


def _result_file(folder: RunFolder) -> Path:
    return folder.path / "result.json"
