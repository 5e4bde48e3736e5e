"""`HEADRACE_PLAN`: one variable that replaces the plan of every engine, for bug reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.bench import Bench, TuneSettings, Tuning, entries_of, find_work
from headrace.device import open_device
from headrace.errors import PlanError
from headrace.fake import FakeDevice
from headrace.plan import effective_plan


def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch).mean()
    return found


def engine_on(device: Any, **options: Any) -> hr.Engine:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).to(hr.open_device(device).torch_device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    return hr.Engine(model, optimizer, loss, device=device, **options)


def batches(count: int = 6) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, generator=draw) for _ in range(count)]


@pytest.fixture
def baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PLAN", "baseline")


@pytest.mark.usefixtures("baseline")
class TestReplaced:
    def test_an_engine_runs_under_the_other_plan_and_says_so(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with FakeDevice() as device:
            engine = engine_on(device, plan="graph")
            result = engine.epoch(batches())
        assert engine.plan == hr.Plan.preset("baseline")
        assert (result.plan, result.statistics.replays, engine.graphs) == ("baseline", 0, None)
        told = [record for record in caplog.records if "HEADRACE_PLAN" in record.getMessage()]
        assert [record.levelname for record in told] == ["WARNING"]
        assert told[0].getMessage() == (
            "HEADRACE_PLAN is set: this engine runs under plan baseline instead of graph"
        )

    def test_so_does_a_step_of_ones_own(self) -> None:
        engine = hr.Engine.from_step(lambda batch: None, device="cpu", plan="event")
        assert engine.plan.name == "baseline"

    def test_and_one_that_changes_its_plan_says_it_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = engine_on("cpu", plan="pipeline")
        for plan in ("event", "interval"):
            engine.use_plan(plan)
            assert engine.plan.name == "baseline"
        assert caplog.text.count("HEADRACE_PLAN") == 1
        engine_on("cpu", plan="pipeline")
        assert caplog.text.count("HEADRACE_PLAN") == 2  # another engine

    @pytest.mark.parametrize("how", ["plan", "engine"])
    def test_the_precision_stays(self, how: str) -> None:
        plan = hr.Plan.preset("pipeline")
        options: dict[str, Any] = {"plan": plan, "precision": "bf16"}
        if how == "plan":
            options = {"plan": plan.replace(precision="bf16")}
        engine = engine_on("cpu", **options)
        assert (engine.plan.name, engine.plan.precision) == ("baseline", "bf16")

    def test_nothing_is_said_where_nothing_changes(self, caplog: pytest.LogCaptureFixture) -> None:
        engine_on("cpu", plan="baseline")
        assert "HEADRACE_PLAN" not in caplog.text

    def test_what_compares_plans_refuses(self, tmp_path: Path) -> None:
        told = "HEADRACE_PLAN=baseline in the environment replaces every plan, and {} compares"
        bench = Bench(find_work("mlp"), open_device("cpu"), entries_of(["baseline", "event"]))
        with pytest.raises(PlanError, match=told.format("bench")):
            bench.run()
        tuning = Tuning.create(TuneSettings(work="mlp"), project=tmp_path, quiet=True)
        with pytest.raises(PlanError, match=told.format("tune")):
            tuning.run()


def test_a_plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("plan: {preset: event, name: mine, precision: bf16}\nloader: {workers: 3}\n")
    monkeypatch.setenv("HEADRACE_PLAN", str(file))
    used = effective_plan(hr.Plan.preset("pipeline"))
    assert (used.name, used.sync, used.precision) == ("mine", "event", None)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("basline", "no plan 'basline' (did you mean 'baseline'?)"),
        ("nowhere.yaml", "nowhere.yaml: cannot be read"),
    ],
)
def test_a_wrong_value_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, value: str, told: str
) -> None:
    monkeypatch.setenv("HEADRACE_PLAN", value)
    with pytest.raises(PlanError) as caught:
        engine_on("cpu", plan="pipeline")
    assert str(caught.value).startswith(f"HEADRACE_PLAN={value} in the environment: {told}")


def test_an_empty_value_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PLAN", "")
    assert engine_on("cpu", plan="event").plan.name == "event"
