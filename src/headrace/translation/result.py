"""The result of a run, and `result.json`, which a finished run has."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import ReportError, TranslationError
from headrace.runs import RunFolder
from headrace.runs.records import FinishedRun, Scores


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
        stored = FinishedRun(self.updates, self.scores, tuple(self.examples))
        stored.write(_path(self.folder))


def stored_result(folder: RunFolder) -> TrainResult | None:
    """The result of a finished run; None if it is not finished."""
    path = _path(folder)
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
    return TrainResult(folder, None, stored.updates, stored.scores, examples)


def _path(folder: RunFolder) -> Path:
    return folder.path / "result.json"
