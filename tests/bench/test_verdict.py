"""The verdict: each bottleneck from its figures, the six weights, and honesty about nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.bench.causes import causes_of
from headrace.bench.scores import JUDGMENTS, WEIGHTS, scheme_of, scores_of
from headrace.bench.verdict import scored, verdict_of
from headrace.plan import PRESETS, Plan
from headrace.records import (
    Equality,
    GpuUse,
    HostWaits,
    Noise,
    PlanResult,
    StepTimes,
    Verdict,
    WaitFigures,
)


def row(
    plan: str,
    ms: float,
    *,
    busy: float | None = None,
    compute: float | None = None,
    data: float = 0.0,
    blocked: float = 0.0,
    copy_wait: float = 0.0,
    launches: float | None = 1250,
    memory: int = 1 << 30,
    equal: str = "identical",
    kind: Any = "plan",
) -> PlanResult:
    gpu = None
    if busy is not None:
        compute = busy if compute is None else compute
        gpu = GpuUse(
            busy_share=busy / ms,
            compute_share=compute / ms,
            copy_share=(busy - compute) / ms,
            idle_share=1 - busy / ms,
            busy_ms_per_step=busy,
            over_busy_share=ms / busy - 1,
            launches_per_step=launches,
        )
    verdict: Any = "reference" if plan == "baseline" else equal
    return PlanResult(
        plan=plan,
        kind=kind,
        fields=PRESETS[plan].to_dict() if plan in PRESETS else None,
        graphs={"why": None} if plan in ("graph", "max") else None,
        ms_per_step=StepTimes(ms, ms, ms, (ms,)),
        gpu=gpu,
        host_blocked_ms=blocked,
        data_wait_ms=data,
        waits=HostWaits(1.0, copy_wait, {"copy": WaitFigures(1.0, copy_wait)}),
        peak_memory_bytes=memory,
        equal=Equality(verdict, largest=0.003 if verdict == "within" else None, why="step 3: …"),
    )


def judged(rows: list[PlanResult], noise: Noise | None = None) -> tuple[list[PlanResult], Verdict]:
    with_scores = scored(rows, "baseline", noise)
    return with_scores, verdict_of(with_scores, "baseline", noise)


class TestStillWaitsFor:
    """What is left under the plan to take: a faster model may be faster than its loader."""

    def test_a_loader_that_the_graph_has_overtaken(self) -> None:
        """As measured with ViT-S/16: launches were the limit, then the loader is."""
        rows = [row("baseline", 60, busy=9, data=1), row("pipeline", 58, busy=9, data=1)]
        _, verdict = judged([*rows, row("graph", 31.7, busy=8.8, data=22.9)])
        assert (verdict.waits_for, verdict.take) == ("launches", "graph")
        assert verdict.take_waits_for == "data"
        [said] = [text for text in verdict.sentences if "waits for data" in text]
        assert said.startswith("Under graph training waits for data: 22.9 of 31.7 ms per step")
        for remedy in ("num_workers", "prefetch_factor", "headrace tune"):
            assert remedy in said

    def test_also_where_no_gpu_is_seen(self) -> None:
        _, verdict = judged([row("baseline", 10), row("pipeline", 5, data=3)])
        assert (verdict.take, verdict.take_waits_for) == ("pipeline", "data")
        assert any("Under pipeline training waits for data" in s for s in verdict.sentences)

    def test_waits_that_the_gpu_does_not_notice_are_none(self) -> None:
        _, verdict = judged([row("baseline", 36, busy=8), row("graph", 8.2, busy=8, data=7)])
        assert (verdict.take, verdict.take_waits_for) == ("graph", "nothing")
        assert not any("waits for data" in text for text in verdict.sentences)

    def test_the_reference_itself_is_told_once(self) -> None:
        _, verdict = judged([row("baseline", 60, busy=20, data=38)])
        assert (verdict.waits_for, verdict.take_waits_for) == ("data", "data")
        assert sum("waits for data" in text for text in verdict.sentences) == 1
        assert "num_workers" in verdict.sentences[0]


class TestWaitsFor:
    @pytest.mark.parametrize(
        ("rows", "expected", "said"),
        [
            # Small batches: idle however it is fed.
            (
                [row("baseline", 36, busy=8.3), row("pipeline", 37, busy=8.3)],
                "launches",
                "the 1,250 kernels of a step",
            ),
            # The same, from baseline alone: a host that hardly waited was busy.
            (
                [row("baseline", 36, busy=8.3, blocked=1.0)],
                "launches",
                "longer than running them",
            ),
            # Large batches: idle only because the host waited.
            (
                [row("baseline", 51.6, busy=43), row("pipeline", 45, busy=42.4)],
                "syncs",
                "the host waits for each batch",
            ),
            (
                [row("baseline", 51.6, busy=43, blocked=40)],
                "syncs",
                "because the host waits for each batch",
            ),
            # Images: compute stands still while they are copied.
            (
                [row("baseline", 71, busy=69, compute=53), row("pipeline", 54.5, busy=54)],
                "copies",
                "it copies and computes nothing",
            ),
            # The same from memory that is not pinned: most of the copy is the host's.
            (
                [
                    row("baseline", 71, busy=57, compute=53, copy_wait=17),
                    row("pipeline", 54.5, busy=54),
                ],
                "copies",
                "17 ms per step",
            ),
            # A slow loader: the host waits for it, with the GPU idle.
            (
                [row("baseline", 60, busy=20, data=38), row("pipeline", 40, busy=20, data=19)],
                "data",
                "the loader delays training by 19 ms",
            ),
            # One whose waits the GPU does not notice.
            (
                [row("baseline", 41, busy=40, data=30), row("pipeline", 40.4, busy=40, data=30)],
                "nothing",
                "busy 98% of the time",
            ),
            ([row("baseline", 41, busy=40), row("pipeline", 40.4, busy=40)], "nothing", "nothing"),
            ([row("baseline", 2.0, data=1.0)], "data", "more workers"),
            ([row("baseline", 2.0)], "unknown", "was not measured"),
        ],
    )
    def test_each_cause(self, rows: list[PlanResult], expected: str, said: str) -> None:
        _, verdict = judged(rows)
        assert verdict.waits_for == expected
        assert said in verdict.sentences[0]

    def test_causes_add_up_to_what_is_idle(self) -> None:
        base, pipeline = row("baseline", 50, busy=30, data=5), row("pipeline", 40, busy=30, data=4)
        causes = causes_of(base, pipeline)
        assert (causes.data, causes.launches, causes.syncs) == (4, 6, 9)


class TestTake:
    def test_a_plan_alone_is_compared_with_nothing(self) -> None:
        _, verdict = judged([row("baseline", 2.0)])
        assert verdict.take == "baseline"
        assert "nothing to compare baseline with" in verdict.sentences[-1]

    def test_few_turns_are_called_few(self) -> None:
        rows = [row("baseline", 36, busy=8.3), row("graph", 8.6, busy=8.3)]
        assert "Fewer than 3 rounds (--repeats)" in judged(rows)[1].sentences[-1]
        for at, one in enumerate(rows):
            assert one.ms_per_step is not None
            ms = one.ms_per_step.median
            rows[at] = replace(one, ms_per_step=StepTimes(ms, ms, ms, (ms, ms, ms)))
        assert "turns each" not in " ".join(judged(rows)[1].sentences)

    def test_launch_bound_takes_graph_and_names_the_fastest(self) -> None:
        rows, verdict = judged(
            [
                row("baseline", 36, busy=8.3),
                row("pipeline", 37, busy=8.3),
                row("graph", 8.6, busy=8.3),
                row("max", 6.2, busy=5.9, equal="within"),
            ]
        )
        assert verdict.take == "graph"
        told = " ".join(verdict.sentences)
        assert "Take graph: 4.19 × as fast as baseline (8.6 instead of 36 ms per step)" in told
        assert "the same losses, bit for bit, 1.00 × the memory" in told
        assert "The fastest is max: 5.81 × as fast" in told
        assert "Under graph the GPU is idle 3% of a step: only faster kernels" in told
        scores = {r.plan: r.score for r in rows}
        assert scores["max"] is not None
        assert scores["max"].gain == 30
        assert scores["pipeline"] is not None
        assert scores["pipeline"].gain == 0  # slower: no gain

    def test_where_only_max_gains_much_it_is_taken(self) -> None:
        _, verdict = judged(
            [
                row("baseline", 51.6, busy=43),
                row("pipeline", 45, busy=42),
                row("graph", 42.4, busy=42),
                row("max", 30, busy=29, equal="within"),
            ]
        )
        assert verdict.take == "max"
        assert any("losses within 0.003 of baseline's" in line for line in verdict.sentences)

    def test_the_least_change_that_gains_has_a_word(self) -> None:
        rows = [row("baseline", 50), row("event", 45), row("graph", 20), row("interval", 49.9)]
        _, verdict = judged(rows)
        assert verdict.take == "graph"
        smallest = "The smallest change that gains something is event: 1.11 × as fast."
        assert smallest in verdict.sentences
        _, verdict = judged([row("baseline", 50), row("event", 49), row("graph", 20)])
        assert not any("smallest change" in line for line in verdict.sentences)

    def test_within_the_noise_nothing_is_to_be_gained(self) -> None:
        rows = [row("baseline", 40, busy=39.5), row("pipeline", 39.2, busy=39)]
        _, verdict = judged(rows)
        assert verdict.take == "baseline"
        assert "No gain here" in verdict.sentences[1]
        assert "more than chance (3.0% of a step)" in verdict.sentences[1]
        # Measured to be smaller, the same 2 % are a gain.
        _, verdict = judged(rows, Noise("pipeline", 0.002))
        assert verdict.take == "pipeline"
        assert "differs by 0.2%" in verdict.sentences[-1]
        # And measured to be larger, 10 % are none.
        _, verdict = judged([rows[0], row("pipeline", 36, busy=35)], Noise("pipeline", 0.11))
        assert verdict.take == "baseline"

    def test_a_gain_among_rounds_that_differ_by_more_is_none(self) -> None:
        base, quick = row("baseline", 47), row("interval", 45)
        spread = StepTimes(45, 20, 80, (20, 45, 80, 30, 60))
        wild = replace(quick, ms_per_step=spread)
        _, verdict = judged([replace(base, ms_per_step=StepTimes(47, 47, 47, (47,) * 5)), wild])
        assert verdict.take == "baseline"
        assert "No gain here" in verdict.sentences[1]
        # Where each round is slowed down as a whole, both are: then 10 % are a gain.
        slowed = tuple(9 / 10 * ms for ms in spread.repeats)
        steady = replace(quick, ms_per_step=StepTimes(40.5, 18, 72, slowed))
        _, verdict = judged([replace(base, ms_per_step=spread), steady])
        assert verdict.take == "interval"

    def test_losses_that_differ_are_never_advised(self) -> None:
        _, verdict = judged([row("baseline", 36), row("graph", 8.6, equal="unequal")])
        assert verdict.take == "baseline"
        assert verdict.sentences[-1] == "graph's losses differ from baseline's: step 3: …."

    def test_nor_is_one_that_was_not_compared_beside_others_that_were(self) -> None:
        _, verdict = judged([row("baseline", 36), row("max", 6.0, equal="not compared")])
        assert verdict.take == "baseline"

    @pytest.mark.parametrize("graphs", [None, {"why": "the step reads a value back"}])
    def test_a_graph_that_was_none_is_not_advised(self, graphs: Any) -> None:
        never_captured = replace(row("graph", 20), graphs=graphs)
        _, verdict = judged([row("baseline", 36), row("pipeline", 22), never_captured])
        assert verdict.take == "pipeline"

    @pytest.mark.parametrize(("compiled", "taken"), [(True, "max"), (False, "graph")])
    def test_a_step_that_was_not_compiled_is_not_advised_as_such(
        self, compiled: bool, taken: str
    ) -> None:
        report = {"compiled": compiled, "why": None if compiled else "BackendCompilerFailed: …"}
        most = replace(row("max", 12, equal="within"), compiled=report)
        _, verdict = judged([row("baseline", 60), row("graph", 40), most])
        assert verdict.take == taken

    def test_nothing_was_measured(self) -> None:
        _, verdict = judged([PlanResult("baseline", "plan", error="out of memory: …")])
        assert (verdict.waits_for, verdict.take) == ("unknown", None)

    def test_peers_are_compared_and_never_advised(self) -> None:
        _, verdict = judged([row("baseline", 36), row("lightning", 20, kind="peer")])
        assert verdict.take == "baseline"
        assert any("lightning 20 ms (0.56 × baseline's)" in line for line in verdict.sentences)

    def test_a_small_gain_that_costs_more_than_it_brings(self) -> None:
        rows = [row("baseline", 40), row("streams4", 38, memory=3 << 30)]
        _, verdict = judged(rows)
        # All 30 points for the only gain there is: 30 + 22.5 + 9 + 9 + 3.3 + 3 against 70.
        assert verdict.take == "streams4"
        _, verdict = judged([*rows, row("max", 10, equal="unequal")])
        assert verdict.take == "baseline"
        assert "but it scores fewer points" in verdict.sentences[1]


class TestScores:
    def test_weights_are_a_hundred(self) -> None:
        assert sum(WEIGHTS.values()) == 100
        assert set(JUDGMENTS) == set(PRESETS) - {"auto"}  # which is one of two others
        assert all(judgment.why for judgment in JUDGMENTS.values())

    def test_memory_is_measured(self) -> None:
        base = row("baseline", 40, memory=100)
        rows = [base, row("graph", 20, memory=200), row("pipeline", 30, memory=90)]
        scores = scores_of(rows, base, 0.03)
        assert [scores[r.plan].memory for r in rows] == [10.0, 5.0, 10.0]
        assert [scores[r.plan].gain for r in rows] == [0.0, 30.0, 15.0]
        assert scores["graph"].total == 30 + 22.5 + 10.5 + 12 + 5 + 4

    def test_a_plan_of_ones_own_is_judged_by_its_fields(self) -> None:
        assert {name: scheme_of(plan.to_dict()) for name, plan in PRESETS.items()} == {
            **{name: name for name in PRESETS},
            "auto": "graph",
        }
        own = Plan.preset("pipeline").replace(graphs="auto").to_dict()
        assert scheme_of(own) == "graph"


class TestTwins:
    def test_are_scored_alike_and_the_first_stands_for_both(self) -> None:
        one, other = row("graph", 9), replace(row("graph", 8.9), plan="graph#2")
        rows, verdict = judged([row("baseline", 36), one, other])
        assert rows[1].score == rows[2].score
        assert verdict.take == "graph"

    def test_share_their_rounds(self) -> None:
        """Of one alone 9 % might be chance; with its twin's rounds they are not."""
        base = replace(row("baseline", 10), ms_per_step=StepTimes(10, 10, 10, (10,) * 5))
        shaky = StepTimes(9.1, 8.0, 10.2, (9.1, 8.0, 10.2, 8.2, 9.9))
        steady = StepTimes(9.1, 9.1, 9.1, (9.1,) * 5)
        one = replace(row("pipeline", 9.1), ms_per_step=shaky)
        twin = replace(one, plan="pipeline#2", ms_per_step=steady)
        assert judged([base, one])[1].take == "baseline"
        assert judged([base, one, twin])[1].take == "pipeline"

    def test_another_loader_is_another_plan(self) -> None:
        one = replace(row("pipeline", 9), loader={"workers": 0})
        assert one.is_same_plan_as(replace(one, plan="pipeline#2"))
        assert not one.is_same_plan_as(replace(one, loader={"workers": 2}))
        peer = row("lightning", 9, kind="peer")
        assert not peer.is_same_plan_as(peer)
