"""A training run as its folder stores it: settings, metrics line by line, scores and weights.

`metrics.jsonl` has lines of four kinds: `step`, `epoch`, `use` (what the monitor saw) and `busy`
(one profiler window). `result.json` is written when the run is finished.
"""

from __future__ import annotations

import dataclasses
import json
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.atomic_files import replace_file
from headrace.errors import ReportError, RunError
from headrace.lifecycle import RunFolder, read_metrics
from headrace.machine import BusyWindow, UseSample
from headrace.schema import Fields, Invalid, read_json, read_yaml


@dataclass(frozen=True, slots=True)
class MetricsLine:
    """Base of the lines that the trainer writes, after `step` updates."""

    step: int = 0

    def values(self) -> dict[str, Any]:
        """The arguments for `MetricsLog.write`: all fields that are not None, except the step."""
        values = dataclasses.asdict(self)
        del values["step"]
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class StepMetrics(MetricsLine):
    """Some updates of an epoch. `loss` is the mean of recent batches, `mean_loss` of the epoch so
    far."""

    epoch: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    mean_loss: float | None = None


@dataclass(frozen=True, slots=True)
class EpochLine(MetricsLine):
    """A whole epoch, or the part that was trained before a time limit.

    `waits` counts the host's waits by reason. `samples` are (source, reference, translation) of
    held-out sentences, translated after this epoch.
    """

    epoch: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    data_wait_share: float | None = None
    host_blocked_share: float | None = None
    peak_memory_bytes: int | None = None
    waits: dict[str, float] = field(default_factory=dict)
    replays: int | None = None
    valid_loss: float | None = None
    valid_nll: float | None = None
    bleu: float | None = None
    validation_s: float | None = None
    samples: tuple[tuple[str, ...], ...] | None = None

    def invalid(self) -> Invalid | None:
        return _invalid_triple("samples", self.samples or ())


@dataclass(frozen=True, slots=True)
class UseLine(UseSample):
    """What the monitor saw since the line before."""

    step: int = 0


@dataclass(frozen=True, slots=True)
class BusyLine(BusyWindow):
    """What the profiler saw in a few steps."""

    step: int = 0


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores from 0 to 100; higher is better.

    Scores are comparable only if their signatures are equal: these name the tokenizer and the
    version of sacrebleu.
    """

    bleu: float
    chrf: float
    bleu_signature: str = ""
    chrf_signature: str = ""
    bleu_lower: float | None = None  # BLEU of lowercased text, if asked for
    #: Which sentences were scored, and whether training has seen any of them. Empty if not known.
    scored_on: str = ""

    def __str__(self) -> str:
        return f"BLEU {self.bleu:.2f} ({self.bleu_signature}), chrF {self.chrf:.2f}"


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The `result.json` of a finished run. `examples` are (source, reference, translation) of
    sentences that the model was not trained on. `ended_early` is "time limit" or "patience", if
    that ended the run before its last epoch."""

    updates: int
    scores: Scores
    examples: tuple[tuple[str, ...], ...] = ()
    ended_early: str | None = None

    def invalid(self) -> Invalid | None:
        return _invalid_triple("examples", self.examples)

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        text = json.dumps(dataclasses.asdict(self), ensure_ascii=False, indent=1) + "\n"
        replace_file(path, text.encode(), RunError)

    @classmethod
    def read(cls, path: Path) -> FinishedRun:
        """The result in a JSON file."""
        return read_json(path, ReportError).record(cls)


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """Everything in a run folder. `updates` is how many updates the run has made, `weights` are
    file names and sizes in bytes, and `finished` is None until the run is finished."""

    path: Path
    settings: dict[str, Any]
    steps: tuple[StepMetrics, ...] = ()
    epochs: tuple[EpochLine, ...] = ()
    uses: tuple[UseLine, ...] = ()
    busy: BusyLine | None = None
    finished: FinishedRun | None = None
    weights: tuple[tuple[str, int], ...] = ()
    updates: int = 0

    @classmethod
    def read(cls, path: Path) -> TrainingRun:
        """The run in a folder, finished or not."""
        folder = RunFolder.open(path)
        settings = dict(read_yaml(folder.config, ReportError))
        lines = _read_lines(folder.metrics) if folder.metrics.exists() else {}
        result = path / "result.json"
        busy = lines.get("busy", [])
        return cls(
            path,
            settings,
            steps=tuple(line for line in lines.get("step", ()) if line.loss is not None),
            epochs=tuple(lines.get("epoch", ())),
            uses=tuple(lines.get("use", ())),
            busy=busy[-1] if busy else None,
            finished=FinishedRun.read(result) if result.exists() else None,
            weights=tuple(
                (str(file.relative_to(path)), file.stat().st_size)
                for file in sorted(folder.weights.glob("*.safetensors"))
            ),
            updates=max((line.step for one in lines.values() for line in one), default=0),
        )

    def seconds_at(self, step: int) -> float | None:
        """When a step was done, interpolated between the monitor's samples; else None."""
        at = bisect_right(self.uses, step, key=lambda use: use.step)
        if at == 0:
            return None
        before = self.uses[at - 1]
        if before.step == step:
            return before.at_s
        if at == len(self.uses):
            return None
        after = self.uses[at]
        part = (step - before.step) / (after.step - before.step)
        return before.at_s + part * (after.at_s - before.at_s)


def _invalid_triple(name: str, found: tuple[tuple[str, ...], ...]) -> Invalid | None:
    for index, one in enumerate(found):
        if len(one) != 3:
            return Invalid(f"{name}[{index}]", list(one), "source, reference and translation")
    return None


_LINES: dict[str, type[Any]] = {
    "step": StepMetrics,
    "epoch": EpochLine,
    "use": UseLine,
    "busy": BusyLine,
}


def _read_lines(path: Path) -> dict[str, list[Any]]:
    """The lines by kind; lines of other kinds are left out."""
    found: dict[str, list[Any]] = {}
    for number, content in enumerate(read_metrics(path), 1):
        kind = content.get("kind")
        if isinstance(kind, str) and kind in _LINES:
            line = Fields(content, f"{path}:{number}", ReportError).record(_LINES[kind])
            found.setdefault(kind, []).append(line)
    return found
