"""Which plan `--plan auto` chooses, what it says, and that a run keeps it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from headrace.device import open_device
from headrace.fake import FakeDevice
from headrace.parallel import SINGLE
from headrace.translation import (
    Trainer,
    TrainSettings,
    choices,
    plan_choice,
    prepared_for,
    trainer,
)
from headrace.translation.batching import why_padded
from headrace.translation.build import build_run
from headrace.translation.plan_choice import PlanChoice, choose_plan
from headrace.translation.run_size import parameter_count, planned_parameters
from support.translation.id_pairs import random_pairs
from support.translation.trainers import SMALL, new

# Under `graph`, a batch takes an estimated 14 ms: packed batches pay for compiling from 90 s on,
# padded ones from 580 s on.
BASE: dict[str, Any] = {"preset": "base", "tokens": 10_000, "epochs": 10**8}
TOO_SHORT = "more than it saves"


@pytest.fixture
def data(tmp_path: Path) -> Any:
    pairs = random_pairs(tmp_path, 800, 20, 12)
    vocabularies = range(8000), range(8000)
    return SimpleNamespace(splits={"train": pairs, "valid": pairs}, vocabularies=vocabularies)


@pytest.mark.parametrize(
    ("changes", "plan", "why"),
    [
        ({}, "max", "compiling takes about 40 seconds, then steps are about 2 times as fast"),
        ({"sentences": 30, "tokens": None}, "max", "compiling takes about 2 minutes, then steps"),
        ({"packed": "off"}, "max", "compiling takes about 2 minutes, then steps are about 1.4"),
        # Packed batches pay for compiling earlier than padded ones, and large models than small.
        ({"max_steps": 10}, "auto", "the run takes about 1 second; compiling takes about 40"),
        ({"max_steps": 2000}, "auto", TOO_SHORT),
        ({"max_steps": 10_000}, "max", "compiling takes about 40 seconds"),
        ({"max_steps": 10_000, "packed": "off"}, "auto", TOO_SHORT),
        ({"max_steps": 10_000, "shapes": 8}, "auto", TOO_SHORT),
        ({"max_steps": 10_000, "preset": "tiny"}, "auto", TOO_SHORT),
        ({"max_steps": 2000, "accumulate": 5}, "max", "compiling takes about 40 seconds"),
        ({"epochs": 1}, "auto", TOO_SHORT),
        ({"time_limit": 60.0}, "auto", "the run takes about 60 seconds; compiling takes about"),
        ({"time_limit": 600.0}, "max", "without it the run takes about 10 minutes"),
        ({"packed": "on", "max_steps": 10}, "max", "packed batches need compiled attention"),
        ({"deterministic": True}, "auto", "compiled code may round differently"),
        ({"deterministic": True, "packed": "on"}, "max", "packed batches need compiled"),
        ({"on_oom": "halve"}, "pipeline", "on_oom = halve, and graphs would keep"),
        ({"shapes": 0}, "pipeline", "shapes = 0, and each batch shape"),
        ({"shapes": 0, "packed": "on"}, "max", "packed batches need compiled attention"),
    ],
)
def test_the_plan_follows_device_settings_and_length(
    monkeypatch: pytest.MonkeyPatch, data: Any, changes: dict[str, Any], plan: str, why: str
) -> None:
    settings = TrainSettings(**(BASE | changes))
    missing: str | None = None
    monkeypatch.setattr(plan_choice, "_missing_for_triton", lambda: missing)

    def chosen(device: Any, ranks: Any = SINGLE) -> tuple[str, str]:
        choice = choose_plan(settings, data, ranks, device)
        return choice.plan, choice.why

    with FakeDevice() as device:
        captured = "pipeline" if plan == "pipeline" else "auto"
        assert chosen(device)[0] == captured  # the fake device compiles nothing
        monkeypatch.setattr(device, "compiles", True)
        found, reason = chosen(device)
        assert (found, why in reason) == (plan, True), reason
        # Packed and plan agree: whatever is packed is compiled.
        settled = settings.replace(plan=found)
        if found != "max" and settings.packed == "auto":
            assert why_padded(settled, data, SINGLE, device) is not None
        assert chosen(device, SimpleNamespace(group="nccl", several=True))[0] == "pipeline"
        with monkeypatch.context() as patch:
            patch.setenv("HEADRACE_PLAN", "event")
            assert chosen(device) == ("event", "HEADRACE_PLAN names it")
            assert why_padded(settings.replace(plan="max"), data, SINGLE, device) is not None
        missing = "Triton"
        assert chosen(device)[0] == captured
    assert chosen(open_device("cpu")) == ("pipeline", "CPU captures no graphs")


def test_what_triton_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"triton", "clang"}
    monkeypatch.delenv("CC", raising=False)
    find = lambda name: name if name in there else None  # noqa: E731
    monkeypatch.setattr(plan_choice.importlib.util, "find_spec", find)
    monkeypatch.setattr(plan_choice.shutil, "which", find)
    assert plan_choice._missing_for_triton() is None
    there.remove("clang")
    assert plan_choice._missing_for_triton() == "a C compiler (gcc or clang)"
    monkeypatch.setenv("CC", "/opt/bin/icx")
    assert plan_choice._missing_for_triton() is None
    with monkeypatch.context() as patch:
        patch.setattr(plan_choice.sysconfig, "get_path", lambda name: "/nowhere")
        assert plan_choice._missing_for_triton() == "Python's headers (Python.h)"
    there.remove("triton")
    assert plan_choice._missing_for_triton() == "Triton"


def test_the_parameters_are_known_before_the_model_is_made(corpus: Path) -> None:
    settings = TrainSettings.from_dict(SMALL | {"data": str(corpus / "pairs.tsv")})
    assert settings.plan == TrainSettings().plan == "auto"
    data = prepared_for(settings, corpus / "cache")
    parts = build_run(settings, data)
    assert planned_parameters(settings, data) == parameter_count(parts)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # there is no GPU to pin for
def test_a_run_says_its_plan(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    values = SMALL | {"data": str(corpus / "pairs.tsv"), "max_steps": 1, "monitor": False}
    settings = TrainSettings.from_dict(values | {"precision": "fp32", "workers": 0})
    with FakeDevice() as device:
        for module in ("trainer", "build"):
            monkeypatch.setattr(f"headrace.translation.{module}.open_device", lambda name: device)
        run = Trainer.create(settings, project=tmp_path, cache=corpus / "cache")
        assert TrainSettings.read(run.folder.config).plan == "auto"
        run.run()
    said = " ".join(capfd.readouterr().err.split())
    assert "plan auto: the step is not compiled for a fake device" in said
    assert "plan auto (fp32) on a fake device" in said
    assert TrainSettings.read(run.folder.config).plan == "auto"


@pytest.mark.parametrize("plan", ["event", "auto"])
def test_a_resumed_run_keeps_its_plan(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    answers = iter([PlanChoice(plan, "a reason")])
    monkeypatch.setattr(choices, "choose_plan", lambda *_: next(answers))
    built: list[str] = []

    def noting_build(settings: TrainSettings, *arguments: Any, **options: Any) -> Any:
        parts = build_run(settings, *arguments, **options)
        built.append(parts.plan.name)
        return parts

    monkeypatch.setattr(trainer, "build_run", noting_build)
    folder = new(corpus, tmp_path, "run", epochs=1).run().folder
    options: dict[str, Any] = {"cache": corpus / "cache", "quiet": True}
    Trainer.resume(folder.path, changes={"epochs": 2}, **options).run()
    assert built == [plan, plan]
    assert yaml.safe_load(folder.config.read_text())["plan"] == plan
