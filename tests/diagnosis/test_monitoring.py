"""Where the figures of steps go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.diagnosis import monitoring
from headrace.diagnosis.monitoring import ActiveTrackers, numbers_of
from headrace.diagnosis.step_figures import StepFigures, WaitingLine

FIGURES = StepFigures(7, 5, 1.5, 2.0, 0.25, (WaitingLine("train.py:3", ".item()", 0.5),))


def train(steps: int) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(1)
    for _ in range(steps):
        optimizer.step()


def test_a_file_gets_a_line_of_json(tmp_path: Path) -> None:
    with hr.monitor_steps(tmp_path / "steps.jsonl") as steps:
        train(40)
    (line,) = (tmp_path / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    found = json.loads(line)
    assert (found["kind"], found["step"], found["steps"]) == ("steps", 40, 30)
    assert found["step_ms"] > 0
    assert steps.latest is not None


def test_a_function_gets_the_figures() -> None:
    found: list[StepFigures] = []
    with hr.monitor_steps(found.append):
        train(40)
    assert [one.steps for one in found] == [30]


def test_a_file_that_cannot_be_opened_is_an_error_and_nothing_stays(tmp_path: Path) -> None:
    with (
        pytest.raises(hr.HeadraceError, match="cannot be opened"),
        hr.monitor_steps(tmp_path / "none" / "steps.jsonl"),
    ):
        train(1)


def test_active_trackers_get_numbers() -> None:
    logged: list[Any] = []
    run = SimpleNamespace(log=lambda values, commit: logged.append((values, commit)))
    mlflow = SimpleNamespace(
        active_run=object, log_metrics=lambda values, step: logged.append((values, step))
    )
    ActiveTrackers({"wandb": SimpleNamespace(run=run), "mlflow": mlflow}).log(FIGURES)
    assert logged == [(numbers_of(FIGURES), False), (numbers_of(FIGURES), 7)]
    assert logged[0][0]["steps/wait_ms/train.py line 3"] == 0.5


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("/home/me/train.py:3", "home/me/train.py line 3"),
        ("../train (1).py:3", "train _1_.py line 3"),
        ("<stdin>:3", "_stdin_ line 3"),
        ("C:\\me\\train.py:3", "C_/me/train.py line 3"),
    ],
)
def test_a_name_is_one_that_mlflow_stores(place: str, name: str) -> None:
    figures = replace(FIGURES, waits=(WaitingLine(place, ".item()", 0.5),))
    assert numbers_of(figures)[f"steps/wait_ms/{name}"] == 0.5


def test_a_tracker_that_fails_is_left_alone_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(values: Any, step: int) -> None:
        raise OSError("the server is gone")

    mlflow = SimpleNamespace(active_run=object, log_metrics=fail)
    trackers = ActiveTrackers({"mlflow": mlflow})
    trackers.log(FIGURES)
    trackers.log(FIGURES)
    assert caplog.messages == ["mlflow gets no more figures of steps: the server is gone"]


def test_trackers_that_are_not_active_get_nothing(caplog: pytest.LogCaptureFixture) -> None:
    mlflow = SimpleNamespace(active_run=lambda: None)  # log_metrics would begin a run
    ActiveTrackers({"wandb": SimpleNamespace(run=None), "mlflow": mlflow}).log(FIGURES)
    ActiveTrackers({}).log(FIGURES)
    assert caplog.messages == []


def test_the_environment_watches_a_whole_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(monitoring.atexit, "register", at_exit.append)
    monkeypatch.setenv("HEADRACE_MONITOR", "0")
    monitoring.monitor_by_environment()
    assert at_exit == []
    monkeypatch.setenv("HEADRACE_MONITOR", str(tmp_path / "steps.jsonl"))
    monitoring.monitor_by_environment()
    train(40)
    at_exit[0]()
    assert "HEADRACE_MONITOR: step 40: " in capsys.readouterr().err
    assert json.loads((tmp_path / "steps.jsonl").read_text(encoding="utf-8"))["steps"] == 30


def test_importing_headrace_is_enough() -> None:
    program = (
        "import sys, types; found = types.ModuleType('headrace.diagnosis'); "
        "found.monitor_by_environment = lambda: print('watched'); "
        "sys.modules[found.__name__] = found; import headrace"
    )
    environment = os.environ | {"HEADRACE_MONITOR": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "watched\n"
