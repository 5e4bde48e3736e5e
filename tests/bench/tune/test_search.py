"""The search over plans, on costs that are invented: what it finds, what it drops, what it says."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.tune.candidates import Candidate, Space
from headrace.bench.tune.noise import MIN_NOISE, noise_of
from headrace.bench.tune.result import sentences_of
from headrace.bench.tune.search import Search
from headrace.bench.tune.trial import Measurement, NothingRuns, Outcome, SearchProgress
from headrace.device import open_device
from headrace.fake import FakeDevice
from headrace.plan import PRESETS, LoaderPlan, Plan

EAGER = ("baseline", "interval", "event", "streams4", "pipeline")
Cost = Callable[[Candidate], float]


class Bench:
    """Measures by an invented cost in ms a step, with some noise, and counts."""

    def __init__(self, cost: Cost, noise: float = 0.0, seed: int = 0) -> None:
        self.cost, self.noise, self.random = cost, noise, random.Random(seed)
        self.runs: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.out: set[str] = set()

    def __call__(self, candidate: Candidate, steps: int) -> Measurement:
        assert candidate.key not in self.out, "was let go of for good"
        self.runs[candidate.name] += 1
        self.steps[candidate.name] += steps
        cost = self.cost(candidate) * (1 + self.noise * self.random.uniform(-1, 1))
        return Measurement(cost, peak_memory_bytes=1000, took_s=cost * steps / 1e3)


def search(cost: Cost | Bench, space: Space | None = None, **options: Any) -> tuple[Outcome, Bench]:
    bench = cost if isinstance(cost, Bench) else Bench(cost)
    return Search(space or Space(EAGER), bench, min_ms=0, **options).run(), bench


def by_name(**ms: float) -> Cost:
    return lambda candidate: ms.get(candidate.base, 100.0)


def status(outcome: Outcome) -> dict[str, str]:
    return {trial.candidate.name: str(trial.status) for trial in outcome.trials}


class TestFinds:
    def test_the_fastest_preset(self) -> None:
        outcome, _ = search(by_name(pipeline=10.0, event=20.0))
        assert outcome.winner.candidate.name == "pipeline"
        assert status(outcome)["event"] == status(outcome)["baseline"] == "slower"

    def test_what_is_clearly_behind_runs_once(self) -> None:
        outcome, bench = search(by_name(pipeline=10.0), steps=20)
        assert bench.steps["interval"] == bench.steps["streams4"] == 20
        dropped = next(t for t in outcome.trials if t.candidate.name == "interval")
        assert dropped.why == "900.0% behind pipeline"
        assert dropped.ms == [100.0]

    def test_workers_first_where_data_is_what_is_waited_for(self) -> None:
        """With no workers every plan takes as long as the loader; with eight, plans differ."""

        def cost(candidate: Candidate) -> float:
            loading = 50.0 / (1 + (candidate.loader.workers or 0))
            computing = {"baseline": 20.0, "pipeline": 10.0}.get(candidate.base, 15.0)
            return max(loading, computing)

        outcome, _ = search(cost, Space(EAGER, workers=(0, 1, 2, 4, 8)))
        winner = outcome.winner.candidate
        assert (winner.base, winner.loader.workers) == ("pipeline", 4)  # 8 are no faster

    def test_a_field_of_the_plan(self) -> None:
        def cost(candidate: Candidate) -> float:
            return 10.0 + (20.0 - 2 * candidate.plan.prefetch_depth if candidate.base else 0)

        outcome, _ = search(cost)
        assert outcome.winner.candidate.changed["prefetch_depth"] == 8

    def test_it_starts_with_the_first_preset_where_baseline_is_not_wanted(self) -> None:
        outcome, _ = search(by_name(graph=5.0), Space(("pipeline", "graph")))
        assert outcome.first.candidate.name == "pipeline"
        assert outcome.winner.candidate.name == "graph"

    @settings(max_examples=30, deadline=None)
    @given(data=st.data())
    def test_the_best_of_costs_that_multiply(self, data: st.DataObject) -> None:
        """Where each field has a factor of its own, the best of the whole grid is found, but for
        what counts as noise each time."""
        factor = st.floats(1.0, 3.0)
        space = Space(EAGER, workers=(0, 2, 4), prefetch_depth=(1, 2, 4))
        draws: dict[tuple[str, Any], float] = {}

        def of(name: str, value: Any) -> float:
            if (name, value) not in draws:
                draws[name, value] = data.draw(factor, label=f"{name} {value}")
            return draws[name, value]

        def cost(candidate: Candidate) -> float:
            plan, loader = candidate.plan, candidate.loader
            found = of("base", candidate.base) * of("workers", loader.workers or 0)
            return found * of("prefetch_depth", plan.prefetch_depth)

        outcome, _ = search(cost, space)
        winner = outcome.winner.candidate
        # No single change is better by more than noise; and it is no worse than any preset.
        for stage in space.stages():
            for other in space.around(stage, winner):
                assert cost(winner) <= cost(other) * (1 + MIN_NOISE) ** 3
        assert cost(winner) <= cost(outcome.first.candidate) * (1 + MIN_NOISE)

    @settings(max_examples=40, deadline=None)
    @given(
        ms=st.fixed_dictionaries({name: st.floats(5, 50) for name in EAGER}),
        noise=st.floats(0, 0.03),
        seed=st.integers(0, 1000),
    )
    def test_noise_does_not_mislead_by_more_than_its_size(
        self, ms: dict[str, float], noise: float, seed: int
    ) -> None:
        bench = Bench(by_name(**ms), noise, seed)
        outcome, _ = search(bench, Space(EAGER))
        assert ms[outcome.winner.candidate.base] <= min(ms.values()) * (1 + 0.03 + 3 * noise)


class TestTies:
    def test_of_two_that_are_the_same_the_simpler_wins(self) -> None:
        ms = {"event": 10.02, "pipeline": 10.0, "streams4": 10.01}
        outcome, bench = search(by_name(**ms), repeats=5)
        assert outcome.winner.candidate.name == "event"
        assert status(outcome)["pipeline"] == status(outcome)["streams4"] == "same as winner"
        assert bench.runs["pipeline"] >= 3

    def test_close_is_not_the_same(self) -> None:
        outcome, bench = search(by_name(event=10.25, pipeline=10.0), repeats=5)
        assert outcome.winner.candidate.name == "pipeline"
        event = next(t for t in outcome.trials if t.candidate.name == "event")
        assert (event.status, event.why) == ("slower", "2.5% behind pipeline")
        assert bench.runs["event"] == 3

    def test_nothing_to_be_gained(self) -> None:
        outcome, _ = search(lambda candidate: 10.0)
        assert outcome.winner is outcome.first
        assert outcome.winner.candidate.name == "baseline"

    def test_small_gains_that_add_up_to_noise_are_none(self) -> None:
        """Measured against the first plan in turn, at the end."""
        flips: Counter[str] = Counter()

        def cost(candidate: Candidate) -> float:
            flips[candidate.name] += 1
            # pipeline looks better at first, and is not when it is looked at again.
            lucky = candidate.base == "pipeline" and flips[candidate.name] <= 3
            return 9.0 if lucky else 10.0

        outcome, _ = search(cost, Space(("baseline", "pipeline"), prefetch_depth=()))
        assert outcome.winner.candidate.name == "baseline"
        assert status(outcome)["pipeline"] == "same as winner"

    def test_the_noise_is_that_of_the_runs(self) -> None:
        assert (
            noise_of([], 1) == noise_of([[1.0]], 1) == noise_of([[5.0, 5.0, 5.0]], 3) == MIN_NOISE
        )
        assert noise_of([[9.0, 10.0, 11.0]], 3) == pytest.approx(2 * 1.2533 * 0.1 * (2 / 3) ** 0.5)


class TestFailures:
    def test_out_of_memory_is_a_result(self) -> None:
        def measure(candidate: Candidate, steps: int) -> Measurement:
            if candidate.base == "pipeline":
                return Measurement(None, out_of_memory="tried to allocate 20 GiB")
            return Measurement(by_name(event=20.0)(candidate))

        release: list[str] = []
        found = Search(
            Space(EAGER), measure, release=lambda candidate: release.append(candidate.name)
        ).run()
        assert found.winner.candidate.name == "event"
        assert status(found)["pipeline"] == "out of memory"
        assert "pipeline" in release

    def test_other_losses_are_refused(self) -> None:
        def measure(candidate: Candidate, steps: int) -> Measurement:
            unequal = "step 3: 1.5 instead of 1.4" if candidate.base == "pipeline" else None
            return Measurement(by_name(pipeline=1.0)(candidate), unequal=unequal)

        found = Search(Space(EAGER), measure).run()
        refused = next(t for t in found.trials if t.candidate.name == "pipeline")
        assert refused.status == "failed"
        assert refused.why == "losses differ from the first plan's: step 3: 1.5 instead of 1.4"
        assert found.winner.candidate.name == "baseline"

    def test_the_first_must_run(self) -> None:
        with pytest.raises(NothingRuns, match="ValueError: no"):
            Search(Space(EAGER), lambda *_: Measurement(None, failed="ValueError: no")).run()

    @settings(max_examples=30, deadline=None)
    @given(
        fails=st.dictionaries(st.integers(1, 40), st.sampled_from(["oom", "failed"]), max_size=12),
        ms=st.fixed_dictionaries({name: st.floats(5, 50) for name in EAGER}),
    )
    def test_whatever_fails_whenever_there_is_a_winner_that_ran(
        self, fails: dict[int, str], ms: dict[str, float]
    ) -> None:
        count = 0

        def measure(candidate: Candidate, steps: int) -> Measurement:
            nonlocal count
            count += 1
            if fails.get(count - 1) == "oom":
                return Measurement(None, out_of_memory="no room")
            if fails.get(count - 1) == "failed":
                return Measurement(None, failed="broke")
            return Measurement(ms[candidate.base])

        outcome = Search(Space(EAGER, workers=(0, 2)), measure).run()
        assert outcome.winner.status == "winner"
        assert outcome.winner.ms
        assert [t.status for t in outcome.trials].count("winner") == 1


class TestBudget:
    def test_it_ends_with_its_time(self) -> None:
        bench = Bench(by_name(pipeline=10.0, event=30.0))
        outcome, _ = search(bench, steps=20, budget_s=15.0)
        assert outcome.ended_by
        assert outcome.winner.candidate.name == "pipeline"
        spent_s = sum(bench.steps[name] * by_name(pipeline=10.0, event=30.0)(
            Candidate(name.split(",")[0], Plan.preset(name.split(",")[0]))
        ) for name in bench.steps) / 1e3  # fmt: skip
        assert spent_s < 15.0 + 8.0  # the run in which it was up is finished

    def test_without_any_time_the_first_is_all_there_is(self) -> None:
        outcome, bench = search(by_name(pipeline=10.0), budget_s=0.0)
        assert (outcome.winner is outcome.first, outcome.ended_by) == (True, "time limit")
        assert sum(bench.runs.values()) == 1

    def test_without_time_to_compare_a_gain_must_be_more_than_chance(self) -> None:
        """The machine grew slower in the midst: what was measured then is no worse for it."""
        count = 0

        def slower_and_slower(candidate: Candidate) -> float:
            nonlocal count
            count += 1
            return 10.0 if count < 4 else 14.0

        outcome, _ = search(Bench(slower_and_slower), steps=20, budget_s=3.0)
        assert outcome.ended_by
        assert outcome.winner is outcome.first
        bench = Bench(by_name(pipeline=80.0), noise=0.5)
        assert search(bench, steps=20, budget_s=25.0)[0].winner.candidate.name == "baseline"
        bench = Bench(by_name(pipeline=10.0), noise=0.1)
        assert search(bench, steps=20, budget_s=25.0)[0].winner.candidate.name == "pipeline"

    def test_whenever_it_ends_the_simplest_of_equals_wins(self) -> None:
        """Who happens to run first after a round is not the better for it."""

        def cost(candidate: Candidate) -> float:
            return (10.0 if candidate.base == "pipeline" else 100.0) - 0.1 * bool(
                candidate.loader.workers
            )

        for budget_s in range(2, 17):  # then the stage is decided, by repeats
            outcome, _ = search(cost, Space(EAGER, workers=(0, 2)), steps=20, budget_s=budget_s)
            assert outcome.ended_by
            assert "workers" not in outcome.winner.candidate.name

    def test_what_alone_was_measured_is_called_so(self) -> None:
        outcome, _ = search(by_name(pipeline=10.0), budget_s=0.0)
        assert sentences_of(outcome, "samples")[0] == "Take baseline: nothing else was measured."

    def test_short_steps_make_long_runs(self) -> None:
        """20 steps of half a millisecond tell nothing: as many as take 200 ms."""
        bench = Bench(lambda candidate: 0.5)
        Search(Space(("baseline", "pipeline")), bench, steps=20).run()
        assert bench.steps["pipeline"] >= 400 * bench.runs["pipeline"] > 0

    @pytest.mark.parametrize(("swing", "runs"), [(0.0, 1), (4.0, 2)])
    def test_on_an_unquiet_machine_less_is_clear(self, swing: float, runs: int) -> None:
        """Where runs of the same differ by a third, a fifth behind is not clearly behind."""
        turns: Counter[str] = Counter()

        def cost(candidate: Candidate) -> float:
            turns[candidate.base] += 1
            swings = swing if candidate.base == "baseline" and turns["baseline"] % 2 else 0.0
            return {"event": 10.0, "pipeline": 12.0}.get(candidate.base, 50.0) + swings * 5

        outcome, bench = search(cost)
        assert outcome.winner.candidate.name == "event"
        assert bench.runs["pipeline"] == runs

    def test_progress_says_how_far_it_is(self) -> None:
        seen: list[SearchProgress] = []
        search(by_name(pipeline=10.0), on_progress=seen.append)
        assert [progress.done for progress in seen] == list(range(len(seen)))
        assert (seen[0].stage, seen[4].stage) == ("first", "plans")
        assert seen[-1].stage == "last comparison"


class TestSpace:
    def test_what_makes_sense_here(self) -> None:
        cpu = Space.on(open_device("cpu"), 4, loads=True)
        assert cpu.presets == EAGER
        assert cpu.workers == (0, 1, 2)
        assert cpu.prefetch_depth == ()  # nothing runs beside the host
        fake = Space.on(FakeDevice(), 64, loads=False)
        assert "graph" in fake.presets
        assert "max" not in fake.presets
        assert fake.workers == ()
        one = Space.on(open_device("cpu"), 1, loads=True, presets=("pipeline",))
        assert (one.presets, one.workers) == (("pipeline",), (0, 1))

    @pytest.mark.parametrize("name", PRESETS)
    def test_every_neighbor_is_a_valid_plan_and_new(self, name: str) -> None:
        space = Space(tuple(PRESETS), workers=(0, 4))
        best = Candidate(name, Plan.preset(name))
        for stage in space.stages():
            around = list(space.around(stage, best))
            assert len({candidate.key for candidate in around}) == len(around)

    def test_names_and_order(self) -> None:
        plain = Candidate("pipeline", Plan.preset("pipeline"))
        deep = dataclasses.replace(
            plain, plan=plain.plan.replace(prefetch_depth=4), loader=LoaderPlan(workers=8)
        )
        assert deep.name == "pipeline, prefetch depth 4, workers 8"
        assert deep.changed == {"prefetch_depth": 4, "workers": 8}
        baseline = Candidate("baseline", Plan.preset("baseline"))
        assert baseline.complexity < plain.complexity < deep.complexity
