"""`headrace tune`: on a work, in a folder, stopped; its file, table and errors."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from headrace.bench import Stopped, TuneSettings, Tuning
from headrace.bench.tune import tuning
from headrace.bench.tune.candidates import Candidate, Space
from headrace.bench.tune.measurer import WorkMeasurer
from headrace.bench.tune.result import FinishedSearch
from headrace.bench.tune.search import Search
from headrace.bench.tune.trial import Measurement
from headrace.bench.works.training import ModelTraining
from headrace.bench.works.work import Workload, work_of
from headrace.cli import app
from headrace.engine import Engine
from headrace.errors import BenchError, HeadraceError, TuneError
from headrace.fake import Costs, FakeDevice
from headrace.plan import LoaderPlan, Plan, load_plan
from headrace.records import Environment, TuneResult, WorkRecord
from headrace.translation import Trainer, TrainSettings, prepared_for
from headrace.translation.build import build_run

#: Nothing takes time but made-up kernels and copies to the device, of 2 ms each.
FREE = Costs(
    kernel_us=0.0, copy_us=0.0, copy_gb_per_s=1e12, query_us=0.0, by_name={"copy h2d": 2000.0}
)


#: Steps so long that a few of them make a run.
SLOW = Costs(
    kernel_us=0.0, copy_us=0.0, copy_gb_per_s=1e12, query_us=0.0, by_name={"copy h2d": 20_000.0}
)


def made_up(device: FakeDevice, compute_ms: float = 10.0, extra_bytes: int = 0) -> Workload:
    """One kernel of that length a step; a graph plan of it would need so much memory more."""

    def make(batch_size: int = 6) -> ModelTraining:
        model = torch.nn.Linear(4, 1)

        def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
            device.work(compute_ms, "kernel", reads=[batch])
            torch.empty(extra_bytes * batch_size // 6, dtype=torch.uint8, device=batch.device)
            found: torch.Tensor = model(batch).mean()
            return found

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return ModelTraining(
            model, optimizer, loss, [torch.ones(batch_size, 4) * n for n in range(3)]
        )

    return work_of(make, name="made up")


def candidate(name: str, **loader: Any) -> Candidate:
    return Candidate(name, Plan.preset(name), LoaderPlan(**loader))


def no_measurement(one: Candidate, steps: int) -> Measurement:
    raise AssertionError(f"{one.name} was measured")


class TestMeasuring:
    def measurer(self, fake: FakeDevice, work: Workload, **options: Any) -> WorkMeasurer:
        space = Space(("baseline", "pipeline", "graph"))
        return WorkMeasurer(work, fake, space, warmup=2, compared_steps=4, **options)

    def test_exact_on_the_virtual_clock(self) -> None:
        """A copy of 2 ms and 10 ms of compute: 12 ms one after the other, 10 side by side."""
        with FakeDevice(costs=FREE) as fake, self.measurer(fake, made_up(fake)) as measurer:
            baseline = measurer.measure(candidate("baseline"), 10)
            pipeline = measurer.measure(candidate("pipeline"), 100)
        assert (baseline.ms_per_step, baseline.units_per_step) == (pytest.approx(12.0), 6.0)
        assert pipeline.ms_per_step == pytest.approx(10.0, rel=0.01)
        assert baseline.peak_memory_bytes is not None
        assert baseline.took_s > 0

    def test_a_step_of_ones_own(self) -> None:
        """It is measured under every plan but those that compile it, which is said."""
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        class Compiling(FakeDevice):
            compiles = True

        with Compiling(costs=FREE) as fake:

            def step(batch: torch.Tensor) -> torch.Tensor:
                fake.work(10.0, "kernel", reads=[batch])
                model(batch).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                return batch.mean()

            work = work_of(lambda: (step, [torch.ones(6, 4)]), name="a step")
            with self.measurer(fake, work) as measurer:
                found = [measurer.measure(candidate(name), 10) for name in ("baseline", "graph")]
                compiled = measurer.measure(candidate("max"), 10)
        assert found[0].ms_per_step == pytest.approx(12.0)
        assert found[1].failed is None
        assert compiled.failed is not None
        assert "it is your own step" in compiled.failed

    def test_a_step_that_is_not_compiled_is_no_candidate(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It runs as the same plan without `compile` does, which is tried too."""

        class Compiling(FakeDevice):
            compiles = True

        def broken(*_: Any) -> Any:
            raise torch._dynamo.exc.InternalTorchDynamoError("broken on purpose")

        monkeypatch.setattr(torch, "compile", lambda function: broken)
        with Compiling(costs=FREE) as fake, self.measurer(fake, made_up(fake)) as measurer:
            found = measurer.measure(candidate("max"), 10)
        assert found.ms_per_step is None
        assert found.failed == (
            "the step is not compiled: InternalTorchDynamoError: broken on purpose"
        )

    def test_what_comes_between_two_measurements_takes_time_too(self) -> None:
        now = [0.0]
        with (
            FakeDevice(costs=FREE) as fake,
            self.measurer(fake, made_up(fake), clock=lambda: now[0]) as measurer,
        ):
            now[0] = 3.0
            first = measurer.measure(candidate("baseline"), 5)
            measurer.release(candidate("baseline"))
            now[0] = 10.0
            second = measurer.measure(candidate("baseline"), 5)
        assert (first.took_s, second.took_s) == (3.0, 7.0)

    def test_out_of_memory_is_a_result_and_the_next_runs(self) -> None:
        """A graph keeps its memory: there is room for the eager step alone."""
        with FakeDevice(costs=FREE, memory_bytes=1_000_000) as fake:
            work = made_up(fake, extra_bytes=300_000)
            with self.measurer(fake, work) as measurer:
                fake.limit_memory(200_000)
                large = measurer.measure(candidate("baseline"), 5)
                fake.limit_memory(None)
                small = measurer.measure(candidate("pipeline"), 5)
        assert large.ms_per_step is None
        assert "of 200,000 are in use" in str(large.out_of_memory)
        assert small.ms_per_step == pytest.approx(12.0, rel=0.2)

    def test_other_losses_are_seen(self) -> None:
        """A work whose loss depends on the plan: how far ahead the host is."""
        with FakeDevice(costs=FREE) as fake:
            work = made_up(fake)

            def make() -> ModelTraining:
                made = work.build()

                def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
                    ahead = fake.default_stream.query()
                    return made.loss(model, batch) + (0.0 if ahead else 1.0)

                return made._replace(loss=loss)

            with self.measurer(fake, work_of(make, name="odd")) as measurer:
                assert measurer.measure(candidate("baseline"), 5).unequal is None
                found = measurer.measure(candidate("pipeline"), 5)
        assert found.ms_per_step is None
        assert str(found.unequal).startswith("step ")

    def test_an_error_of_the_users_is_a_result(self) -> None:
        def make() -> ModelTraining:
            made, calls = made_up(fake).build(), []

            def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
                calls.append(1)
                if len(calls) == 3:
                    raise ValueError("too much")
                return made.loss(model, batch)

            return made._replace(loss=loss)

        with (
            FakeDevice(costs=FREE) as fake,
            self.measurer(fake, work_of(make, name="broken")) as measurer,
        ):
            found = measurer.measure(candidate("baseline"), 5)
        assert str(found.failed).startswith("step 3: ValueError: too much (")

    @pytest.mark.parametrize("has_parts", [False, True])
    def test_a_graph_that_cannot_be_captured_is_none(
        self, has_parts: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A step that reads a value back is launched one by one until its parts are captured."""
        if not has_parts:
            monkeypatch.setattr(
                "headrace.engine.graphs.ladder.Ladder._train_by_parts",
                lambda ladder, fetched, eager, uses_graphs: (eager(fetched), False),
            )
        with FakeDevice(costs=FREE) as fake:
            made = made_up(fake).build()

            def make() -> ModelTraining:
                def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
                    return made.loss(model, batch) * float(batch.sum().item() >= 0)

                return made_up(fake).build()._replace(loss=loss)

            with self.measurer(fake, work_of(make, name="reads")) as measurer:
                found = measurer.measure(candidate("graph"), 5)
        if has_parts:
            assert found.failed is None
        else:
            assert found.ms_per_step is None
            assert str(found.failed).startswith("launched one by one, not as a graph: ")

    def test_released_and_measured_again(self) -> None:
        with FakeDevice(costs=FREE) as fake, self.measurer(fake, made_up(fake)) as measurer:
            measurer.release(candidate("graph"))  # never measured: nothing to do
            first = measurer.measure(candidate("graph"), 10)
            held = fake.memory().allocated
            measurer.release(candidate("graph"))
            assert fake.memory().allocated < held
            again = measurer.measure(candidate("graph"), 10)
        assert again.ms_per_step == first.ms_per_step


class TestWhole:
    """The whole search on the fake device's clock, in a folder."""

    @pytest.fixture
    def fake(self, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
        fake = FakeDevice(costs=SLOW)
        monkeypatch.setattr(tuning, "find_work", lambda *named, **_: made_up(fake, 100.0))
        return fake

    def test_a_plan_that_train_and_engine_take(self, fake: FakeDevice, tmp_path: Path) -> None:
        with fake:
            settings = TuneSettings(
                work="made up", plans=("baseline", "event", "pipeline", "graph"), steps=2,
                repeats=2, warmup=2, compare=2,
            )  # fmt: skip
            found = Tuning.create(settings, project=tmp_path, device=fake, quiet=True)
            result = found.run()
        assert result.plan.sync in ("none", "event")
        stored = load_plan(found.plan_file)
        assert stored.plan.replace(name="x") == result.plan.replace(name="x")
        assert stored.loader == result.loader
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = Engine(
            model, optimizer, lambda m, b: m(b).mean(), plan=found.plan_file, device="cpu"
        )
        assert engine.plan.replace(name="x") == result.plan.replace(name="x")
        assert TrainSettings(plan=str(found.plan_file)).plan == str(found.plan_file)
        assert sorted(path.name for path in found.folder.path.iterdir() if path.is_file()) == [
            *("plan.yaml", "result.json", "table.txt")
        ]

    def test_the_result_is_as_agreed(self, fake: FakeDevice, tmp_path: Path) -> None:
        with fake:
            settings = TuneSettings(
                work="made up", plans=("baseline", "pipeline"), steps=2, repeats=2, warmup=2
            )
            found = Tuning.create(settings, project=tmp_path, device=fake, quiet=True)
            result = found.run()
        content = json.loads((found.folder.path / "result.json").read_text())
        assert content == json.loads(json.dumps(result.to_dict()))
        assert (content["kind"], content["version"]) == ("headrace tune", 1)
        assert set(content) >= {
            *("work", "environment", "settings", "trials", "winner", "sentences")
        }
        trial = content["trials"][0]
        assert set(trial) >= {
            *("id", "plan", "loader", "changed", "runs_ms", "status", "why", "peak_memory_bytes")
        }
        assert trial["runs_ms"][0] == pytest.approx(120.0)
        assert [t["status"] for t in content["trials"]].count("winner") == 1
        assert content["sentences"][0].startswith(f"Take {content['winner']['name']}: ")
        table = (found.folder.path / "table.txt").read_text()
        for one in content["trials"]:
            assert one["name"] in table
        assert content["sentences"][0] in table

    def test_stopped_before_the_first_measurement(
        self, fake: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The signal may have killed the loader's workers: that is not the plan's fault."""

        def stopped(self: WorkMeasurer, candidate: Candidate, steps: int) -> Measurement:
            os.kill(os.getpid(), signal.SIGTERM)
            return Measurement(None, failed="a worker was killed")

        monkeypatch.setattr(WorkMeasurer, "measure", stopped)
        with fake:
            found = Tuning.create(
                TuneSettings(work="made up", warmup=2), project=tmp_path, device=fake, quiet=True
            )
            with pytest.raises(Stopped, match="SIGTERM"):
                found.run()

    def test_a_work_that_does_not_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake = FakeDevice(costs=FREE, memory_bytes=1000)
        work = made_up(fake, extra_bytes=6000)
        monkeypatch.setattr(tuning, "find_work", lambda *named, **_: work)
        with fake:
            found = Tuning.create(TuneSettings(), project=tmp_path, device=fake, quiet=True)
            with pytest.raises(
                TuneError, match=r"made up does not run under baseline: .*fake out of memory"
            ):
                found.run()

    def test_workers_must_be_the_works(self, fake: FakeDevice, tmp_path: Path) -> None:
        with pytest.raises(TuneError, match="expected a parameter workers"):
            Tuning.create(TuneSettings(workers=(2,)), project=tmp_path, device=fake, quiet=True)
        assert not list(tmp_path.iterdir())


class TestSettings:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"plans": ["pipelin"]}, r"no plan 'pipelin' \(did you mean 'pipeline'\?\)"),
            ({"plans": []}, "plans: none was named"),
            ({"workers": [-1]}, r"workers\[0\] = -1: expected a whole number, 0 or more"),
            ({"steps": 0}, "steps = 0: expected a whole number from 1"),
            ({"precision": "fp8"}, "precision = 'fp8': expected fp32"),
            ({"step": 3}, r"unknown key 'step' \(did you mean 'steps'\?\)"),
        ],
    )
    def test_what_is_wrong_is_named(self, values: dict[str, Any], message: str) -> None:
        with pytest.raises(TuneError, match=message):
            TuneSettings.from_dict(values)

    def test_round_trip(self) -> None:
        settings = TuneSettings(options=(("batch", 3),), plans=("graph",), workers=(0, 4))
        content = yaml.safe_load(yaml.safe_dump(settings.to_dict()))
        assert TuneSettings.from_dict(content) == settings


WORK = """
import torch

def make_work(batch_size=4, dtype=torch.float32):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, lambda model, batch: model(batch).mean(), [torch.ones(batch_size, 3)]

def breaks():
    model, optimizer, loss, loader = make_work()
    def broken(model, batch):
        raise ValueError("too much")
    return model, optimizer, broken, loader
"""
QUICK = ["--steps", "2", "--repeats", "2", "--warmup", "1", "--compare", "2", "--device", "cpu"]


class TestCommand:
    @pytest.fixture(autouse=True)
    def here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        (tmp_path / "mine.py").write_text(WORK)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    def invoke(self, *arguments: object) -> Any:
        return CliRunner().invoke(app, ["tune", *(str(word) for word in arguments)])

    def test_a_table_sentences_and_a_plan(self, here: Path) -> None:
        found = self.invoke(
            "--work", "mine.py:make_work", *QUICK, "--plans", "baseline,pipeline", "--out", "p.yaml"
        )
        assert found.exit_code == 0, found.output
        assert "Take " in found.stdout
        assert "runs/tune/exp" in found.stderr
        assert load_plan(here / "p.yaml") == load_plan(here / "runs/tune/exp/plan.yaml")

    def test_json_is_all_of_stdout(self) -> None:
        found = self.invoke(
            *("--work", "mine.py:make_work", *QUICK, "--plans", "baseline", "--json", "--quiet")
        )
        assert found.exit_code == 0, found.output
        content = json.loads(found.stdout)
        assert content["winner"]["plan"]["name"] == "baseline"
        assert content["environment"]["device"] == "cpu"

    def test_stopped_it_prints_what_it_has_measured(
        self, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        measure, count = WorkMeasurer.measure, itertools.count(1)

        def stopped(self: WorkMeasurer, candidate: Candidate, steps: int) -> Measurement:
            found = measure(self, candidate, steps)
            if next(count) == 6:
                os.kill(os.getpid(), signal.SIGINT)
            return found

        monkeypatch.setattr(WorkMeasurer, "measure", stopped)
        found = self.invoke(
            "--work", "mine.py:make_work", *QUICK, "--plans", "baseline,pipeline", "--quiet"
        )
        assert found.exit_code == 130, found.output
        assert "SIGINT ended the search early: there may be a faster plan." in found.stdout
        stored = TuneResult.read(here / "runs/tune/exp/result.json")
        assert stored.cut_short
        assert sum(len(trial.runs_ms) for trial in stored.trials) == 6
        assert load_plan(here / "runs/tune/exp/plan.yaml").plan.name in ("baseline", "pipeline")

    @pytest.mark.parametrize(
        ("arguments", "kind", "message", "code"),
        [
            (["--work", "transation"], BenchError, "did you mean 'translation'", 2),
            (["--work", "mlp", "--set", "widht=3"], BenchError, "did you mean 'width'", 2),
            (["--work", "mine.py:nothing"], BenchError, "has no 'nothing'", 2),
            (["--work", "mine.py:breaks"], TuneError, "not run under baseline: step 1: Value", 1),
            (["--plans", "fast"], TuneError, "no plan 'fast'", 2),
            (
                ["--work", "mine.py:make_work", "--workers", "0,2"],
                TuneError,
                "expected a parameter workers",
                2,
            ),
        ],
    )
    def test_errors(
        self, arguments: list[str], kind: type[HeadraceError], message: str, code: int
    ) -> None:
        found = self.invoke(*QUICK, *arguments)
        assert isinstance(found.exception, kind), found.output
        assert message in str(found.exception)
        assert found.exception.exit_code == code

    def test_where_the_plan_cannot_be_written_is_said_before_the_search(self, here: Path) -> None:
        (here / "taken").write_text("")
        found = self.invoke("--work", "mine.py:make_work", *QUICK, "--out", "taken/plan.yaml")
        assert isinstance(found.exception, BenchError)
        assert found.exception.exit_code == 2
        assert not (here / "runs").exists()

    def test_usage(self) -> None:
        assert self.invoke("--workers", "two").exit_code == 2
        assert self.invoke("--set", "batch").exit_code == 2
        twice = self.invoke("--set", "batch=3", "--set", "batch=4")
        assert (twice.exit_code, "batch: given twice" in twice.output) == (2, True)


def test_train_takes_the_plan(tmp_path: Path) -> None:
    """Both parts of it: the plan's fields and the loader's."""
    lines = "".join(f"{n} and {n % 7}\t{n} und {n % 7}\n" for n in range(60))
    (tmp_path / "pairs.tsv").write_text(lines, encoding="utf-8")
    outcome = Search(
        Space(("pipeline",), prefetch_depth=(2, 4), workers=(0, 2)),
        lambda one, steps: Measurement(10.0 / one.plan.prefetch_depth + (one.loader.workers != 0)),
    ).run()
    assert outcome.winner.candidate.changed == {"prefetch_depth": 4, "workers": 0}
    result = FinishedSearch(WorkRecord("x"), Environment(device_name="y"), {}, outcome)
    (tmp_path / "plan.yaml").write_text(result.plan_yaml(), encoding="utf-8")
    assert load_plan(tmp_path / "plan.yaml").plan.prefetch_depth == 4
    settings = TrainSettings.from_dict({
        "data": str(tmp_path / "pairs.tsv"), "src": "en", "trg": "de", "vocabulary": 300,
        "preset": "tiny", "width": 16, "heads": 2, "layers": 1, "inner": 32, "epochs": 1,
        "max_steps": 2, "beam": 1, "valid_sentences": 2, "device": "cpu", "tensorboard": False,
        "plan": str(tmp_path / "plan.yaml"),
    })  # fmt: skip
    trainer = Trainer.create(settings, project=tmp_path, cache=tmp_path / "cache", quiet=True)
    assert trainer.run().updates == 2
    data = prepared_for(trainer.settings, tmp_path / "cache")
    assert build_run(trainer.settings, data).plan.prefetch_depth == 4


class TestSentences:
    def sentences(self, measure: Any, **options: Any) -> list[str]:
        space = Space(("baseline", "event", "pipeline"), prefetch_depth=())
        outcome = Search(space, measure, min_ms=0, **options).run()
        return FinishedSearch(WorkRecord("x", unit="tokens"), Environment(), {}, outcome).sentences

    def test_what_to_take_and_why(self) -> None:
        ms = {"pipeline": 10.0, "event": 20.0}
        found = self.sentences(lambda one, steps: Measurement(ms.get(one.base, 40.0), 500.0))
        assert found == [
            "Take pipeline: 10.00 ms per step, 50,000 tokens/s, 4.00 times as fast as baseline "
            "(40.00 ms per step)."
        ]

    def test_ties_failures_and_nothing_to_gain(self) -> None:
        def measure(one: Candidate, steps: int) -> Measurement:
            if one.base == "pipeline":
                return Measurement(None, out_of_memory="no room")
            return Measurement(10.0)

        found = self.sentences(measure)
        assert "nothing to be gained here" in found[0]
        assert found[1].startswith("As fast within noise (1.0%): event")
        assert found[1].endswith("baseline is the simplest.")
        assert found[2] == "Out of memory: pipeline."

    def test_an_unquiet_machine_and_too_little_time(self) -> None:
        turns = iter(range(1000))
        found = self.sentences(
            lambda one, steps: Measurement(10.0 + 5 * (next(turns) % 2), took_s=1.0), budget_s=12
        )
        assert any(line.startswith("Runs of the same plan differ by") for line in found)
        assert found[-1] == "The time limit ended the search early: there may be a faster plan."

    def test_a_plan_that_failed_is_named_with_its_error(self) -> None:
        def measure(one: Candidate, steps: int) -> Measurement:
            unequal = "step 2: 1.0, the reference has 2.0" if one.base == "event" else None
            return Measurement(None if unequal else 10.0, unequal=unequal)

        assert (
            "event failed: losses differ from the first plan's: step 2: 1.0, the reference has 2.0."
            in (self.sentences(measure))
        )
