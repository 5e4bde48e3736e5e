"""A training run as its folder tells it: settings, metrics, scores, weights."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import ReportError
from headrace.report.bench_result import StreamUse
from headrace.runs import RunFolder, read_metrics
from headrace.schema import Fields, read_json, read_yaml


@dataclass(frozen=True, slots=True)
class Epoch:
    step: int
    epoch: int
    loss: float | None
    valid_loss: float | None
    bleu: float | None
    tokens_per_s: float | None
    data_wait_share: float | None
    host_blocked_share: float | None
    peak_memory_bytes: float | None
    waits: dict[str, float]


@dataclass(frozen=True, slots=True)
class Use:
    """What the monitor saw: `cpu_share` and `workers_cpu_share` in cores."""

    step: int
    at_s: float
    gpu_share: float | None
    gpu_memory_bytes: float | None
    power_w: float | None
    cpu_share: float | None
    workers_cpu_share: float | None
    host_memory_bytes: float | None


@dataclass(frozen=True, slots=True)
class Busy:
    """The profiler window: shares of wall time from 0 to 1."""

    step: int
    steps: int | None
    busy_share: float | None
    compute_share: float | None
    copy_share: float | None
    idle_share: float | None
    overlap_share: float | None
    streams: tuple[StreamUse, ...]


@dataclass(frozen=True, slots=True)
class Final:
    """The scores of a finished run."""

    bleu: float | None
    chrf: float | None
    signature: str


@dataclass
class TrainingRun:
    path: Path
    settings: dict[str, Any]
    steps: list[tuple[int, float]] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    busy: Busy | None = None
    final: Final | None = None
    examples: list[tuple[str, str, str]] = field(default_factory=list)
    weights: list[tuple[str, int]] = field(default_factory=list)

    @property
    def updates(self) -> int:
        return max([at for at, _ in self.steps] + [epoch.step for epoch in self.epochs], default=0)

    def seconds_at(self, step: int) -> float | None:
        """When that step was done, by the monitor's samples; None if there are none around it."""
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


def training_run(path: Path) -> TrainingRun:
    """All that a run's folder says of it. A run that is not finished yet has no scores."""
    folder = RunFolder.open(path)
    run = TrainingRun(path, dict(read_yaml(folder.config, ReportError)))
    if folder.metrics.exists():
        _read_metrics(run, folder.metrics)
    result = path / "result.json"
    if result.exists():
        _read_result(run, read_json(result, ReportError))
    run.weights = [
        (str(file.relative_to(path)), file.stat().st_size)
        for file in sorted(folder.weights.glob("*.safetensors"))
    ]
    return run


def _read_metrics(run: TrainingRun, path: Path) -> None:
    begun_s = last_s = 0.0
    for number, content in enumerate(read_metrics(path), 1):
        line = Fields(content, f"{path}:{number}", ReportError)
        kind, step = line.text("kind"), line.whole("step") or 0
        if kind == "step" and (loss := line.number("loss")) is not None:
            run.steps.append((step, loss))
        elif kind == "epoch":
            run.epochs.append(_epoch(line, step))
        elif kind == "use":
            use = _use(line, step, begun_s)
            if use.at_s < last_s:  # resumed: the monitor began to count anew
                begun_s = last_s
                use = _use(line, step, begun_s)
            last_s = use.at_s
            run.uses.append(use)
        elif kind == "busy":
            run.busy = _busy(line, step)


def _epoch(line: Fields, step: int) -> Epoch:
    waits = line.child("waits")
    counted = {} if waits is None else {str(name): waits.number(str(name)) for name in waits.values}
    return Epoch(
        step=step,
        epoch=line.whole("epoch") or 0,
        waits={name: count for name, count in counted.items() if count is not None},
        **{
            name: line.number(name)
            for name in (
                *("loss", "valid_loss", "bleu", "tokens_per_s", "data_wait_share"),
                *("host_blocked_share", "peak_memory_bytes"),
            )
        },
    )


def _use(line: Fields, step: int, begun_s: float) -> Use:
    return Use(
        step=step,
        at_s=begun_s + (line.number("at_s") or 0.0),
        **{
            name: line.number(name)
            for name in (
                *("gpu_share", "gpu_memory_bytes", "power_w", "cpu_share"),
                *("workers_cpu_share", "host_memory_bytes"),
            )
        },
    )


def _busy(line: Fields, step: int) -> Busy:
    return Busy(
        step=step,
        steps=line.whole("steps"),
        streams=tuple(
            StreamUse(
                stream.text("name") or "stream",
                stream.number("busy_share"),
                stream.number("kernels_per_step"),
                stream.number("copies_per_step"),
            )
            for stream in line.children("streams")
        ),
        **{
            name: line.number(name)
            for name in (
                *("busy_share", "compute_share", "copy_share", "idle_share", "overlap_share"),
            )
        },
    )


def _read_result(run: TrainingRun, content: Fields) -> None:
    scores = content.section("scores")
    run.final = Final(
        scores.number("bleu"), scores.number("chrf"), scores.text("bleu_signature") or ""
    )
    for index, example in enumerate(content.values.get("examples") or ()):
        if not isinstance(example, list) or [type(text) for text in example] != [str] * 3:
            raise ReportError(
                f"{content.file}: examples[{index}]: expected source, reference and translation"
            )
        run.examples.append((example[0], example[1], example[2]))
