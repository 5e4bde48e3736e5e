"""A training run, as its folder stores it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.errors import ReportError
from headrace.lifecycle import MetricsLog
from headrace.records import EpochLine, FinishedRun, Scores, StepMetrics, TrainingRun


def test_lines_come_back_from_the_metrics(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("preset: tiny\n")
    lines = [
        StepMetrics(10, 0, 4.5, 900.0),
        EpochLine(20, 0, 4.0, 910.0, waits={"data": 20}, bleu=1.5, samples=(("书", "book", "a"),)),
        StepMetrics(30, 1, float("nan"), 900.0),
    ]
    with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
        for kind, line in zip(("step", "epoch", "step"), lines, strict=True):
            metrics.write(kind, line.step, **line.values())
    run = TrainingRun.read(tmp_path)
    assert run.steps == (lines[0],)  # a loss that is not finite is not drawn
    assert run.epochs == (lines[1],)
    assert run.updates == 30
    assert run.finished is None


def test_when_an_update_was_done(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("preset: tiny\n")
    lines = [
        {"kind": "use", "step": step, "at_s": at, "cpu_share": 1.0}
        for step, at in ((10, 1.0), (20, 2.0), (30, 2.5), (40, 3.5))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = TrainingRun.read(tmp_path)
    assert run.seconds_at(15) == 1.5
    assert run.seconds_at(40) == 3.5
    assert run.seconds_at(5) is None
    assert run.seconds_at(41) is None


def test_a_finished_run_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    finished = FinishedRun(7, Scores(31.0, 55.0, "nrefs:1", "chrF2"), (("书", "book", "books"),))
    finished.write(path)
    assert FinishedRun.read(path) == finished
    content = json.loads(path.read_text(encoding="utf-8"))
    content["examples"] = [["a", "b"]]
    path.write_text(json.dumps(content))
    message = r"examples\[0\] = \['a', 'b'\]: expected source, reference and translation"
    with pytest.raises(ReportError, match=message):
        FinishedRun.read(path)
