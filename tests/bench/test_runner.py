"""The benchmark: rows exact on the fake's virtual clock, errors that are rows, equal losses."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.bench import Bench, entries_of, find_work, plans_here, text_of
from headrace.bench.contestants import Contestant, Pool
from headrace.bench.loss_comparison import LossComparison
from headrace.bench.observation import _first_steps, _while_timed, short_name
from headrace.bench.peers import PEERS
from headrace.bench.plan_list import noise_pair
from headrace.bench.trainable import Timing
from headrace.bench.works.training import ModelTraining
from headrace.bench.works.work import Workload, work_of
from headrace.device import Device, Span, Timeline, open_device
from headrace.errors import BenchError, PlanError
from headrace.fake import Costs, FakeDevice
from headrace.plan import PRESETS
from headrace.records import BenchResult, Equality, PlanResult
from headrace.report.bench_page import bench_page

SMALL = {"batch": 4, "width": 8, "layers": 2}
BITS = {"watched_s": 0.0, "steps": 10, "warmup": 2, "repeats": 3}


def bench(
    work: Workload, device: Device, plans: str = "baseline,pipeline", **options: Any
) -> Bench:
    return Bench(work, device, entries_of(plans.split(",")), **(BITS | options))


def made_up(device: FakeDevice, compute_ms: float) -> Workload:
    """One kernel of that length a step, on a batch that takes what the copy costs."""

    def make() -> ModelTraining:
        model = torch.nn.Linear(4, 1)

        def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
            device.work(compute_ms, "kernel", reads=[batch])
            found: torch.Tensor = model(batch).mean()
            return found

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return ModelTraining(model, optimizer, loss, [torch.ones(6, 4) * n for n in range(3)])

    return work_of(make, name="made up")


#: Nothing takes time but the made-up kernel and copies to the device.
FREE = Costs(
    kernel_us=0.0, copy_us=0.0, copy_gb_per_s=1e12, query_us=0.0, by_name={"copy h2d": 2000.0}
)


class TestRows:
    def test_on_the_virtual_clock_they_are_exact(self) -> None:
        """A copy of 2 ms and 10 ms of compute: 12 ms one after the other, 10 side by side."""
        with FakeDevice(costs=FREE) as fake:
            result = bench(made_up(fake, 10.0), fake, steps=20).run()
        base, pipeline = result.row("baseline"), result.row("pipeline")
        assert base.ms_per_step is not None
        assert pipeline.ms_per_step is not None
        assert base.ms_per_step.repeats == (12.0, 12.0, 12.0)
        assert (base.speedup, base.per_s) == (1.0, 500.0)
        assert pipeline.ms_per_step.repeats == (10.0, 10.0, 10.0)
        assert pipeline.speedup == pytest.approx(1.2)
        # The first copy of a pass has nothing to hide behind: that is no part of a step's time.
        assert (base.pass_ms, pipeline.pass_ms) == (0.0, 2.0)
        assert "to begin and end an epoch: baseline 0 ms, pipeline 2 ms" in text_of(result)
        assert base.gpu is not None
        assert base.gpu.busy_ms_per_step == 12.0
        assert base.gpu.busy_share == 1.0
        assert base.gpu.compute_share == pytest.approx(10 / 12)
        assert base.gpu.copy_share == pytest.approx(2 / 12)
        assert base.gpu.over_busy_share == 0.0
        assert base.overlap_share == 0.0
        assert pipeline.overlap_share is not None
        assert pipeline.overlap_share > 0.15
        assert {stream.name for stream in base.streams} == {"forward", "transfer"}

    def test_waits_by_reason(self) -> None:
        with FakeDevice(costs=FREE) as fake:
            result = bench(made_up(fake, 10.0), fake).run()
        base, pipeline = result.row("baseline"), result.row("pipeline")
        assert base.waits is not None
        assert base.waits.by_reason["sync"].per_step == 1.0
        assert base.waits.by_reason["sync"].ms_per_step == pytest.approx(10.0)
        assert base.host_blocked_ms == pytest.approx(12.0)
        assert base.data_wait_ms == 0.0
        assert pipeline.waits is not None
        assert "sync" not in pipeline.waits.by_reason
        assert "data" not in pipeline.waits.by_reason

    def test_a_slow_loader_is_data_wait(self) -> None:
        with FakeDevice(costs=FREE) as fake:
            work = made_up(fake, 1.0)

            class Slow(list[torch.Tensor]):
                def __iter__(self) -> Iterator[torch.Tensor]:
                    for batch in super().__iter__():
                        fake.host_work(5.0)
                        yield batch

            def make() -> ModelTraining:
                training: ModelTraining = work.build()
                return training._replace(loader=Slow(training.loader))

            result = bench(work_of(make, name="slow"), fake).run()
        assert result.row("pipeline").data_wait_ms == pytest.approx(5.0)
        assert result.verdict.waits_for == "data"

    def test_the_verdict_of_exposed_copies(self) -> None:
        with FakeDevice(costs=FREE) as fake:
            result = bench(made_up(fake, 10.0), fake, "baseline,pipeline,graph").run()
        assert result.verdict.waits_for == "copies"
        assert result.verdict.take == "pipeline"
        assert result.row("graph").equal.verdict == "identical"

    def test_timelines_begin_at_nought_and_have_three_steps(self) -> None:
        with FakeDevice(costs=FREE) as fake:
            result = bench(made_up(fake, 10.0), fake).run()
        timeline = result.row("baseline").timeline
        assert timeline is not None
        assert timeline.steps == 3
        kernels = [span for span in timeline.spans if span.name == "kernel"]
        assert [(k.start_ns, k.end_ns) for k in kernels] == [
            (2_000_000, 12_000_000),
            (14_000_000, 24_000_000),
            (26_000_000, 36_000_000),
        ]
        waits = [span for span in timeline.spans if span.kind == "wait"]
        assert {span.lane for span in waits} == {"host"}
        assert ("sync", 2_000_000, 12_000_000) in [(w.name, w.start_ns, w.end_ns) for w in waits]

    def test_memory_is_each_plans_own(self) -> None:
        with FakeDevice(costs=FREE) as fake:
            one = bench(made_up(fake, 10.0), fake, "baseline").run()
            all_of_them = bench(made_up(fake, 10.0), fake, "pipeline,event,baseline").run()
        assert one.row("baseline").peak_memory_bytes
        assert (
            one.row("baseline").peak_memory_bytes == all_of_them.row("baseline").peak_memory_bytes
        )

    @pytest.mark.parametrize("device_name", ["cpu", "fake"])
    def test_all_plans_that_run_here(self, device_name: str) -> None:
        device: Any = open_device("cpu") if device_name == "cpu" else FakeDevice()
        expected = ["baseline", "interval", "event", "streams4", "pipeline"]
        assert plans_here(device) == expected + ["graph"] * (device_name == "fake")
        with device if device_name == "fake" else torch.enable_grad():
            plans = ",".join(plans_here(device))
            result = bench(find_work("mlp", SMALL), device, plans, repeats=2).run()
        assert [row.plan for row in result.rows] == plans_here(device)
        verdicts = [row.equal.verdict for row in result.rows]
        assert verdicts == ["reference", *["identical"] * (len(verdicts) - 1)]
        assert all(len(row.losses) == 10 for row in result.rows)
        assert not result.failed
        assert all(row.score is not None for row in result.rows)
        assert result.work.units_per_step == 4

    def test_on_the_cpu_it_says_what_cannot_be_seen(self) -> None:
        result = bench(find_work("mlp", SMALL), open_device("cpu"), watched_s=0.05).run()
        assert result.row("baseline").gpu is None
        assert result.row("baseline").cpu_share is not None
        assert len(result.row("baseline").samples) >= 2
        assert any("GPU busy time" in line for line in result.missing)
        assert any("no driver" in line for line in result.missing)
        assert any("memory" in line for line in result.missing)
        assert result.verdict.waits_for in ("unknown", "data")  # by its steps of half a millisecond


class TestNoise:
    def test_a_plan_entered_twice(self) -> None:
        with FakeDevice(costs=FREE) as fake:
            result = bench(made_up(fake, 10.0), fake, "baseline,pipeline,pipeline").run()
        assert [row.plan for row in result.rows] == ["baseline", "pipeline", "pipeline#2"]
        assert result.noise is not None
        assert result.noise.plan == "pipeline"
        assert result.noise.difference_share == 0.0
        assert any("measured twice, differs by" in line for line in result.verdict.sentences)

    def test_entries(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.yaml"
        file.write_text("plan: {preset: pipeline, prefetch_depth: 3}\nloader: {workers: 2}\n")
        names = ["graph", "graph#2", str(file), "graph"]
        entries = entries_of(names, "bf16")
        assert [entry.name for entry in entries] == ["graph", "graph#2", "pipeline*", "graph#3"]
        assert {entry.plan.precision for entry in entries} == {"bf16"}
        assert entries[2].loader.workers == 2
        pair = noise_pair(entries)
        assert pair is not None
        assert (pair[0].name, pair[1].name) == ("graph", "graph#2")
        assert noise_pair(entries_of(list(PRESETS))) is None
        with pytest.raises(PlanError, match="no plan 'grahp'"):
            entries_of(["grahp"])
        with pytest.raises(BenchError, match="no plan is named"):
            entries_of([])


def order_dependent() -> ModelTraining:
    """The loss of a batch depends on how many batches any plan was given before."""
    model = torch.nn.Linear(3, 1)

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(batch).mean() * (1 + 0.5 * (next(_calls) > 13))
        return found

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ModelTraining(model, optimizer, loss, [torch.ones(2, 3)])


_calls = itertools.count()


def two_models(
    returns: str = "loss", change: Callable[[torch.Tensor], object] | None = None
) -> Workload:
    """A step with two models and two optimizers. `change` is called with a weight that the losses
    do not depend on."""

    def make() -> Any:
        one, two = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
        unused = torch.nn.Linear(2, 2)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, two)]

        def step(batch: torch.Tensor) -> Any:
            loss = two(one(batch) + torch.randn_like(batch)).mean()
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            if change is not None:
                change(unused.weight.data)
            return {"loss": loss.detach(), "weight": 2} if returns == "loss" else None

        return step, [torch.ones(2, 3) * number for number in range(3)]

    return work_of(make, name="two models")


def failing(at: int) -> Workload:
    """Raises in its `at`-th step."""

    def make() -> ModelTraining:
        calls = itertools.count(1)
        model = torch.nn.Linear(3, 1)

        def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
            if next(calls) == at:
                raise ValueError("the third is too much")
            found: torch.Tensor = model(batch).mean()
            return found

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return ModelTraining(model, optimizer, loss, [torch.ones(2, 3)])

    return work_of(make, name="failing")


class TestSteps:
    """A work that returns a step of its own."""

    def test_is_measured_and_compared_as_others(self, device: Device) -> None:
        plans = ",".join(plan for plan in plans_here(device) if plan != "max")
        result = bench(two_models(), device, plans, repeats=1).run()
        assert not result.failed
        assert {row.equal.verdict for row in result.rows[1:]} == {"identical"}
        assert all(len(row.losses) == 10 for row in result.rows)
        assert result.work.units_per_step == 2
        if device.captures:
            graphs = result.row("graph").graphs
            assert graphs is not None
            assert graphs["why"] is None
            assert graphs["replays"] > 0

    def test_a_work_that_carries_state(self, device: Device) -> None:
        def make() -> Any:
            model = torch.nn.Linear(3, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def loss(model: Any, batch: torch.Tensor, carried: Any) -> Any:
                hidden = model(batch + carried["h"])
                return hidden.mean(), {"h": hidden}

            def step(batch: torch.Tensor, carried: Any) -> Any:
                optimizer.zero_grad()
                found, carried = loss(model, batch, carried)
                found.backward()
                optimizer.step()
                return found.detach(), carried

            batches, carry = [torch.ones(2, 3)], {"h": torch.zeros(2, 3)}
            return (step, batches, carry) if own else (model, optimizer, loss, batches, carry)

        plans = ",".join(plan for plan in plans_here(device) if plan != "max")
        found = []
        for own in (False, True):  # noqa: B007 - `make` reads it
            result = bench(work_of(make), device, plans, repeats=1).run()
            assert {row.equal.verdict for row in result.rows[1:]} == {"identical"}
            assert not result.failed
            found.append(result.rows[0].losses)
        assert found[0] == found[1]
        assert len(set(found[0])) == 10

    def test_max_runs_it_as_a_graph_and_says_so(self) -> None:
        class Compiling(FakeDevice):
            compiles = True

        with Compiling() as fake:
            row = bench(two_models(), fake, "baseline,max", repeats=1).run().row("max")
        assert row.equal.verdict == "identical"
        assert any("is not compiled" in note and "your own step" in note for note in row.notes)

    def test_weights_are_compared_even_if_losses_match(self) -> None:
        calls = itertools.count()
        for returns in ("loss", "nothing"):
            work = two_models(returns, lambda weight: weight.fill_(next(calls)))
            row = bench(work, open_device("cpu"), repeats=1).run().row("pipeline")
            assert row.equal.verdict == "unequal"
            assert "weights after the last step: 'Linear 3, weight' differs" in row.equal.why

    def test_without_a_loss_only_weights_are_compared(self) -> None:
        result = bench(two_models("nothing"), open_device("cpu"), repeats=1).run()
        assert result.row("pipeline").equal.verdict == "identical"
        assert result.row("pipeline").losses == ()

    def test_with_neither_there_is_nothing_to_compare(self) -> None:
        work = work_of(lambda: (lambda batch: None, [torch.ones(2)]), name="empty")
        equal = bench(work, open_device("cpu"), repeats=1).run().row("pipeline").equal
        assert equal.verdict == "not compared"
        assert "its modules were not found" in equal.why

    def test_what_it_cannot_have_is_refused(self) -> None:
        cpu = open_device("cpu")
        half = Bench(two_models(), cpu, entries_of(["baseline"], "bf16"), precision="bf16")
        with pytest.raises(BenchError, match=r"precision = 'bf16'.*Write torch\.autocast into"):
            half.run()
        peer = bench(two_models(), cpu, peers=[PEERS["reduce-overhead"]], repeats=1).run().rows[-1]
        assert peer.error is not None
        assert "which is all that peers can train: leave out --peers" in peer.error


class TestEquality:
    def test_unequal_losses_fail_and_name_the_step(self) -> None:
        global _calls
        _calls = itertools.count()
        work = work_of(order_dependent)
        result = bench(work, open_device("cpu"), repeats=1).run()
        row = result.row("pipeline")
        assert row.equal.verdict == "unequal"
        assert row.equal.first_step == 5  # 10 of baseline's, and the fifth of its own
        assert row.equal.why.startswith("step 5: ")
        assert result.failed
        assert result.verdict.take == "baseline"
        assert any("pipeline's losses differ" in line for line in result.verdict.sentences)

    def test_a_plan_of_other_losses_is_never_advised(self) -> None:
        global _calls
        with FakeDevice(costs=FREE) as fake:
            _calls = itertools.count()
            result = bench(work_of(order_dependent), fake, repeats=1).run()
        assert result.row("pipeline").equal.verdict == "unequal"
        assert result.verdict.take == "baseline"

    def test_dropout_is_the_same_in_every_plan(self, device: Device) -> None:
        work = find_work("mlp", SMALL | {"dropout": 0.3})
        plans = ",".join(plan for plan in plans_here(device) if plan != "max")
        result = bench(work, device, plans, repeats=1).run()
        verdicts = {row.equal.verdict for row in result.rows[1:]}
        assert verdicts == {"identical"}

    def test_loaders_that_draw_do_not_matter(self) -> None:
        """Everybody gets the batches that were drawn once, whatever the order of drawing."""

        class Drawing:
            def __iter__(self) -> Iterator[torch.Tensor]:
                for _ in range(3):
                    yield torch.randn(2, 3)

        def make() -> ModelTraining:
            model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return ModelTraining(model, optimizer, lambda m, b: m(b).mean(), Drawing())

        result = bench(work_of(make), open_device("cpu"), repeats=1).run()
        assert result.row("pipeline").equal.verdict == "identical"

    def test_another_optimizer_in_a_graph_is_within_the_tolerance(self) -> None:
        def make() -> ModelTraining:
            model = torch.nn.Linear(3, 1)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            return ModelTraining(model, optimizer, lambda m, b: m(b).mean(), [torch.ones(2, 3)])

        with FakeDevice() as fake:
            result = bench(work_of(make), fake, "baseline,graph", repeats=1).run()
        assert result.row("graph").equal.verdict in ("identical", "within")
        assert "capturable" in result.row("graph").equal.why

    @pytest.mark.parametrize("exact", [True, False])
    def test_kernels_without_a_deterministic_kind(self, exact: bool) -> None:
        """Then bits cannot be compared: it is tried again without, within the tolerance."""

        def make() -> ModelTraining:
            model = torch.nn.Linear(3, 1)

            def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
                if torch.are_deterministic_algorithms_enabled() and not exact:
                    raise RuntimeError("foo does not have a deterministic implementation, but …")
                found: torch.Tensor = model(batch).mean()
                return found

            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return ModelTraining(model, optimizer, loss, [torch.ones(2, 3)])

        result = bench(work_of(make), open_device("cpu"), repeats=1).run()
        equal = result.row("pipeline").equal
        assert equal.verdict == "identical"
        assert equal.why == ("" if exact else "no deterministic kernels: foo")

    def test_a_step_that_still_draws_without_dropout_is_not_compared(self) -> None:
        """A compiling device would draw other numbers: nothing could be said."""

        class Compiling(FakeDevice):
            compiles = True

        def make() -> ModelTraining:
            model = torch.nn.Linear(3, 1)

            def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
                noise = torch.rand(1).to(batch.device)
                found: torch.Tensor = (model(batch) * noise).mean()
                return found

            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return ModelTraining(model, optimizer, loss, [torch.ones(2, 3)])

        with Compiling(check=False) as fake:
            comparing = LossComparison(
                work_of(make),
                fake,
                entries_of(["baseline"])[0],
                [torch.ones(2, 3)] * 3,
                seed=0,
                tolerance=0.01,
            )
            one = Contestant("max", "plan", lambda: None, entries_of(["max"])[0])  # type: ignore[arg-type,return-value]
            one.compare_losses(comparing.compare)
        assert one.error is None
        assert one.equal.verdict == "not compared"
        assert "outside of dropout modules" in one.equal.why

    def test_left_out(self) -> None:
        result = bench(find_work("mlp", SMALL), open_device("cpu"), compared_steps=0).run()
        assert {row.equal.verdict for row in result.rows} == {"not compared"}
        assert not result.failed


def test_a_pass_too_short_for_the_clock_is_timed_as_a_whole() -> None:
    whole, short = Timing(steps=22, start_ns=5, elapsed_ns=1000), Timing(2, 9, 1000)
    assert whole.without(short) == whole
    assert whole.without(replace(short, elapsed_ns=200)) == Timing(20, 5, 800, None, pass_ns=120.0)


class TestFailures:
    def test_an_exception_in_step_3_is_a_row(self) -> None:
        result = bench(failing(3), open_device("cpu")).run()
        for row in result.rows:
            assert row.error is not None
            assert row.error.startswith("step 3: ValueError: the third is too much (")
            assert f"{Path(__file__).name}:" in row.error
            assert row.ms_per_step is None
        assert result.failed
        assert result.verdict.take is None

    def test_a_work_that_cannot_be_made_is_an_error_at_once(self) -> None:
        with pytest.raises(BenchError, match="returned a tuple of 1"):
            bench(work_of(lambda: (1,), name="one"), open_device("cpu")).run()

    def test_nor_does_one_that_does_not_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*arguments: Any, **more: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

        monkeypatch.setattr(torch.nn.Module, "to", full)
        with pytest.raises(BenchError, match="mlp failed: out of memory: CUDA out of memory"):
            bench(find_work("mlp", SMALL), open_device("cpu")).run()

    def test_a_loader_that_fails_is_named_with_its_line(self) -> None:
        class Broken:
            def __iter__(self) -> Iterator[torch.Tensor]:
                raise OSError("no such disk")
                yield

        def make() -> ModelTraining:
            model = torch.nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return ModelTraining(model, optimizer, lambda m, b: m(b).mean(), Broken())

        with pytest.raises(BenchError, match=r"loader of broken failed: OSError: no such disk \("):
            bench(work_of(make, name="broken"), open_device("cpu")).run()

    def test_one_that_fails_later_keeps_the_others_going(self) -> None:
        result = bench(failing(25), open_device("cpu"), compared_steps=0).run()
        assert [row.error is None for row in result.rows] == [False, False]
        only_twice = bench(failing(33), open_device("cpu"), "baseline", repeats=2)
        result = only_twice.run()
        row = result.row("baseline")
        assert row.ms_per_step is not None
        assert row.error is None
        assert row.notes[0].startswith("could not be profiled: step 33: ValueError: the")

    def test_out_of_memory_is_tried_alone_once_more(self) -> None:
        device, log = open_device("cpu"), []

        class Hungry:
            lead_in = trained = 0

            def __init__(self, name: str) -> None:
                self.name = name
                alive.add(name)

            def run(self, steps: int) -> Timing:
                log.append((self.name, sorted(alive)))
                if len(alive) > 1 or self.name == "glutton":
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\n…")
                return Timing(steps, 0, 1)

            def losses(self, batches: Any) -> tuple[float, ...]:
                return ()

            def graphs(self) -> None:
                return None

            def compiled(self) -> None:
                return None

            def close(self) -> None:
                alive.discard(self.name)

        alive: set[str] = set()
        pool = Pool(device, 1)
        modest, other, glutton = (
            Contestant(name, "plan", lambda name=name: Hungry(name))  # type: ignore[misc]
            for name in ("modest", "other", "glutton")
        )
        assert pool.attempt(modest, lambda way: way.run(1)) is not None
        assert pool.attempt(other, lambda way: way.run(1)) is not None
        assert pool.was_full
        assert pool.attempt(glutton, lambda way: way.run(1)) is None
        assert glutton.error == "out of memory: CUDA out of memory. Tried to allocate 2 GiB"
        assert modest.error is other.error is None
        assert pool.attempt(modest, lambda way: way.run(1)) is not None
        assert alive == {"modest"}
        pool.close()
        assert alive == set()

    def test_ctrl_c_gives_the_rows_so_far(self) -> None:
        def on_progress(what: str, done: float, left_s: float | None) -> None:
            if what == "round 2 of 3":
                raise KeyboardInterrupt

        result = bench(find_work("mlp", SMALL), open_device("cpu"), on_progress=on_progress).run()
        assert result.interrupted
        spread = result.row("pipeline").ms_per_step
        assert spread is not None
        assert len(spread.repeats) == 1

    def test_ctrl_c_before_anything_was_timed(self) -> None:
        def on_progress(what: str, done: float, left_s: float | None) -> None:
            if what.startswith("warming"):
                raise KeyboardInterrupt

        result = bench(find_work("mlp", SMALL), open_device("cpu"), on_progress=on_progress).run()
        assert result.row("pipeline").error == "interrupted before it was measured"
        assert result.row("pipeline").equal.verdict == "identical"

    def test_warnings_are_the_rows_notes(self, capfd: pytest.CaptureFixture[str]) -> None:
        cpu = open_device("cpu")
        result = bench(find_work("mlp", SMALL), cpu, "baseline,graph", repeats=1).run()
        assert any("cpu captures no graphs" in note for note in result.row("graph").notes)
        assert "captures" not in capfd.readouterr().err


class TestRecord:
    def test_comes_back_from_its_file(self, tmp_path: Path) -> None:
        with FakeDevice(costs=FREE) as fake:
            result = bench(made_up(fake, 10.0), fake, "baseline,pipeline,graph,graph").run()
        path = tmp_path / "deep" / "result.json"
        result.write(path)
        assert BenchResult.read(path) == result
        assert [file.name for file in path.parent.iterdir()] == ["result.json"]
        content = json.loads(path.read_text())
        assert (content["kind"], content["version"]) == ("headrace bench", 1)
        assert [row["plan"] for row in content["rows"]] == [
            "baseline",
            "pipeline",
            "graph",
            "graph#2",
        ]

    def test_nan_is_null(self) -> None:
        def make() -> ModelTraining:
            model = torch.nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return ModelTraining(
                model, optimizer, lambda m, b: m(b).mean() * torch.nan, [torch.ones(2, 3)]
            )

        result = bench(work_of(make), open_device("cpu"), repeats=1).run()
        content = json.loads(json.dumps(result.to_dict(), allow_nan=False))
        assert content["rows"][0]["losses"] == [None] * 10
        assert content["rows"][1]["equal"]["verdict"] == "not compared"
        assert result.failed


class CompilingFake(FakeDevice):
    compiles = True


def page_of(result: BenchResult) -> str:
    return bench_page(BenchResult.from_dict(json.loads(result.to_json())), "r.json")


class TestNotCompiled:
    """`max` where the compiler fails: captured, and told apart from compiled."""

    @pytest.fixture
    def result(self, monkeypatch: pytest.MonkeyPatch) -> BenchResult:
        def broken(*_: Any) -> Any:
            raise torch._dynamo.exc.InternalTorchDynamoError("broken on purpose")

        monkeypatch.setattr(torch, "compile", lambda function: broken)
        with CompilingFake(costs=Costs(launch_us=30.0)) as fake:
            plans = "baseline,graph,max,max"
            return bench(find_work("mlp", SMALL), fake, plans).run()

    def test_the_result_says_why(self, result: BenchResult) -> None:
        why = "InternalTorchDynamoError: broken on purpose"
        for name in ("max", "max#2"):
            row = BenchResult.from_dict(json.loads(result.to_json())).row(name)
            assert row.compiled is not None
            assert (row.compiled["compiled"], row.compiled["why"]) == (False, why)
            assert (row.is_captured, row.is_compiled, row.ran_as_planned) == (True, False, False)
            assert any(why in note for note in row.notes)
        assert result.row("graph").compiled is None
        assert result.row("graph").ran_as_planned
        assert result.verdict.take != "max"

    def test_its_row_says_so(self, result: BenchResult) -> None:
        text = text_of(result)
        assert re.search(r"^ max, uncompiled .* (identical|within \S+)$", text, re.MULTILINE)
        assert re.search(r"^ graph  ", text, re.MULTILINE)
        assert "max#2: the step is not compiled: InternalTorchDynamoError" in text

    def test_the_page_says_so(self, result: BenchResult) -> None:
        page = page_of(result)
        label = '<span class="badge" title="InternalTorchDynamoError: broken on purpose">'
        assert f"max {label}not compiled</span>" in page
        assert f"graph {label}" not in page
        assert "the step is not compiled" in page

    def test_also_if_it_is_a_later_shape_that_does_not_compile(self) -> None:
        class Later:
            lead_in, trained = 0, 0

            def run(self, steps: int) -> Timing:
                self.trained += steps
                return Timing(steps, 0, 1)

            def losses(self, batches: Any) -> tuple[float, ...]:
                return ()

            def graphs(self) -> None:
                return None

            def compiled(self) -> dict[str, Any]:
                return {"compiled": self.trained < 5, "why": None if self.trained < 5 else "later"}

            def close(self) -> None:
                return

        pool = Pool(open_device("cpu"), 2)
        one = Contestant("max", "plan", Later)
        for compiled in (True, False):
            pool.attempt(one, lambda way: way.run(2))
            assert one.compiled is not None
            assert one.compiled["compiled"] is compiled

    def test_a_device_that_compiles_and_captures_nothing(self) -> None:
        result = bench(find_work("mlp", SMALL), open_device("cpu"), "baseline,max").run()
        assert re.search(r"^ max, eager ", text_of(result), re.MULTILINE)
        notes = " ".join(result.row("max").notes)
        assert "does not compile for cpu" in notes
        assert "captures no graphs" in notes
        page = page_of(result)
        assert "not compiled</span>" in page
        assert "not captured</span>" in page


class TestText:
    def test_fits_a_terminal_with_everything_in_it(self) -> None:
        with FakeDevice(costs=Costs(launch_us=30.0)) as fake:
            plans = "baseline,streams4,graph,graph"
            result = bench(find_work("mlp", SMALL), fake, plans).run()
        rows = [
            replace(row, nvml_share=0.97, cpu_share=1.03, peak_memory_bytes=12 << 30)
            for row in result.rows
        ]
        peer = replace(
            rows[0], plan="reduce-overhead", kind="peer", waits=None, score=None, per_s=1234567.8
        )
        failed = PlanResult("max", "plan", error="out of memory: CUDA out of memory.")
        unequal = replace(rows[1], plan="mine", equal=Equality("unequal", first_step=12, why="x"))
        text = text_of(replace(result, rows=(*rows, peer, failed, unequal)))
        assert max(len(line) for line in text.splitlines()) <= 121
        heads = text.splitlines()[2].split()
        assert heads[:4] == ["ms/step", "±%", "×", "samples/s"]
        assert heads[4:] == [
            *("waits", "host", "data", "GPU%", "over%", "NVML%", "cores", "peak", "pts"),
            "losses",
        ]
        assert re.search(r"^ graph .* 97 +1\.0 +12\.00G +\d+ +identical$", text, re.MULTILINE)
        assert re.search(r"^ reduce-overhead .* 1\.235M +– ", text, re.MULTILINE)
        assert "UNEQUAL at 12" in text
        assert "max failed: out of memory: CUDA out of memory." in text
        assert "streams4" in text.split("streams in use")[1]

    def test_names_are_short(self) -> None:
        name = "void at::native::(anonymous namespace)::elementwise_kernel<4, at::native::Add>(int)"
        assert short_name(name) == "elementwise_kernel<4, Add>(int)"
        assert len(short_name("k" * 500)) == 64

    def test_spans_are_bounded(self) -> None:
        spans = [Span("a", "k", "kernel", 10 * n, 10 * n + 5) for n in range(20_000)]
        record = _first_steps(Timeline(spans), step_ms=0.1, steps=2)
        assert len(record.spans) == 6_000
        assert record.steps == pytest.approx(0.6, abs=0.01)

    def test_what_ended_before_a_stretch_is_not_in_it(self) -> None:
        """A peer's last copy of the batch before, say: it began within what two clocks differ."""
        began_ns, timing = 1_000_000, Timing(steps=1, start_ns=3_000_000, elapsed_ns=500_000)
        spans = [
            Span("default", "before", "copy", 1_900_000, 1_990_000),
            Span("default", "across", "copy", 1_990_000, 2_010_000),
            Span("default", "inside", "kernel", 2_100_000, 2_200_000),
        ]
        found = _while_timed(Timeline(spans), [], began_ns, timing).spans
        assert [(s.name, s.start_ns, s.end_ns) for s in found] == [
            ("across", 0, 10_000),
            ("inside", 100_000, 200_000),
        ]

    def test_a_timeline_ends_where_its_last_step_does(self) -> None:
        """The host waits to the end of all steps; three are shown."""
        spans = [Span("default", "k", "kernel", n * 10_000, n * 10_000 + 9_000) for n in range(60)]
        spans.append(Span("host", "losses", "wait", 5_000, 600_000))
        record = _first_steps(Timeline(spans), step_ms=0.1, steps=6)
        assert record.steps == 3
        assert max(span.end_ns for span in record.spans) == 300_000
        assert min(span.end_ns - span.start_ns for span in record.spans) >= 0
