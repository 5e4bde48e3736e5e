"""A contestant that leaves the device unusable costs its own row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.bench import Bench, DeviceLost, EarlierResults, entries_of, text_of, turns
from headrace.bench.contestants import Contestant
from headrace.bench.peers import Peer
from headrace.bench.trainable import Timing
from headrace.bench.works.training import ModelTraining
from headrace.bench.works.work import Workload, work_of
from headrace.device import Stream
from headrace.fake import Costs, FakeDevice
from headrace.records import BenchResult

ILLEGAL = "CUDA error: an illegal memory access was encountered"
FREE = Costs(kernel_us=0.0, copy_us=0.0, copy_gb_per_s=1e12, query_us=0.0)


class Fragile(FakeDevice):
    """A device which fails in every call once it is `broken`, as a CUDA context does."""

    broken = False

    def _synchronize(self, stream: Stream | None) -> None:
        self._refuse()
        super()._synchronize(stream)

    def release_unused(self) -> None:
        self._refuse()
        super().release_unused()

    def description(self) -> str:
        self._refuse()
        return super().description()

    def _refuse(self) -> None:
        if self.broken:
            raise RuntimeError(ILLEGAL)


class Breaking:
    """A peer's trainable that breaks the device in its run number `at`."""

    lead_in = trained = 0

    def __init__(self, device: Fragile, at: int) -> None:
        self._device, self._at, self._runs = device, at, 0

    def run(self, steps: int) -> Timing:
        self._runs += 1
        if self._runs == self._at:
            self._device.broken = True
            self._device.synchronize("bench")
        return Timing(steps, 0, steps)

    def losses(self, batches: Any) -> tuple[float, ...]:
        return tuple(0.0 for _ in batches)

    def graphs(self) -> None:
        return None

    def compiled(self) -> None:
        return None

    def close(self) -> None:
        self._device._refuse()


def work_on(device: FakeDevice, compute_ms: float) -> Workload:
    """One kernel of that length a step."""

    def make() -> ModelTraining:
        model = torch.nn.Linear(4, 1)

        def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
            device.work(compute_ms, "kernel", reads=[batch])
            found: torch.Tensor = model(batch).mean()
            return found

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return ModelTraining(model, optimizer, loss, [torch.ones(6, 4)])

    return work_of(make, name="fragile")


def bench(device: Fragile, at: int, compute_ms: float = 10.0, **more: Any) -> Bench:
    """`baseline`, a peer that breaks the device in its run `at`, and `event`. The first run warms
    up, then each round has two."""
    breaking = Peer("breaking", None, lambda *_: Breaking(device, at))
    fixed = {"steps": 4, "warmup": 2, "repeats": 3, "watched_s": 0.0, "compared_steps": 0}
    entries = entries_of(["baseline", "event"])
    return Bench(work_on(device, compute_ms), device, entries, [breaking], **(fixed | more))


def rounds(result: BenchResult, plan: str) -> list[float]:
    times = result.row(plan).ms_per_step
    return [] if times is None else [round(ms) for ms in times.repeats]


def test_what_was_measured_before_is_the_result() -> None:
    with Fragile(costs=FREE, check=False) as device:
        result = bench(device, at=4).run()
        device.broken = False
    assert rounds(result, "baseline") == [10]  # the second round begins with the next contestant
    assert rounds(result, "event") == [10, 10]
    assert rounds(result, "breaking") == [0]
    why = result.row("breaking").error
    assert why is not None
    assert why.startswith(f"ended the device's context (step 1: RuntimeError: {ILLEGAL} (")
    assert why.endswith(") while timing")
    assert result.failed
    assert not result.interrupted
    assert "breaking failed: ended the device's context" in text_of(result)


def test_those_that_had_no_turn_say_why() -> None:
    with Fragile(costs=FREE, check=False) as device:
        result = bench(device, at=1).run()
        device.broken = False
    assert result.row("breaking").error is not None
    why = result.row("event").error
    assert why is not None
    assert why.startswith("not measured: breaking ended the device's context (step 1: RuntimeError")
    assert result.verdict.sentences == ("No plan was measured.",)


def test_another_process_goes_on_where_this_one_ended() -> None:
    known = EarlierResults()
    with Fragile(costs=FREE, check=False) as device:
        with pytest.raises(DeviceLost, match="illegal memory access"):
            bench(device, at=4, known=known).run()
        device.broken = False
    known.ended("exit code 75")
    with Fragile(costs=FREE) as device:
        result = bench(device, at=4, compute_ms=20.0, known=known).run()
    assert rounds(result, "baseline") == [10, 20, 20]
    assert rounds(result, "event") == [10, 10, 20]
    why = result.row("breaking").error
    assert why is not None
    assert why.endswith("while timing")


def test_losses_are_not_compared_with_a_reference_that_ended_the_process() -> None:
    known = EarlierResults()
    known.begin("baseline", "comparing losses")
    known.ended("SIGSEGV")
    with Fragile(costs=FREE) as device:
        result = bench(device, at=99, known=known, compared_steps=2).run()
    assert result.row("baseline").error == "ended the process (SIGSEGV) while comparing losses"
    equal = result.row("event").equal
    assert (equal.verdict, equal.why) == ("not compared", "baseline failed")
    assert rounds(result, "event") == [10, 10, 10]


def test_after_an_end_under_the_profiler_nothing_else_is_profiled() -> None:
    known = EarlierResults()
    known.begin("event", "profiling")
    known.ended("SIGSEGV")
    with Fragile(costs=FREE) as device:
        result = bench(device, at=99, known=known).run()
    told = "GPU busy time: event ended the process (SIGSEGV) while profiling"
    assert told in result.missing
    assert result.row("baseline").gpu is None
    assert result.failed


def test_results_are_stored_after_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "STORING_SHARE", 1)
    stored: list[BenchResult] = []
    with Fragile(costs=FREE) as device:
        result = bench(device, at=99, on_result=stored.append).run()
    assert all(one.interrupted for one in stored)
    assert not result.interrupted
    assert stored[0].row("event").error == "interrupted before it was measured"
    counts = [[len(rounds(one, row.plan)) for row in one.rows] for one in stored]
    # Three warm up, then each round begins with the next one: baseline, event, breaking.
    assert counts[2:6] == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert counts[-1] == [3, 3, 3]
    again = BenchResult.from_dict(stored[4].to_dict())
    assert rounds(again, "event") == [10]


def test_storing_takes_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, stored = [0.0], []

    def store() -> None:
        stored.append(now_s[0])
        now_s[0] += 1.0

    monkeypatch.setattr(turns.time, "monotonic", lambda: now_s[0])
    contestant = Contestant("baseline", "plan", lambda: pytest.fail("not built"))
    taken = turns.ContestantTurns([contestant], None, store)
    for _ in range(50):
        with taken.of(contestant, "timing"):
            now_s[0] += 1.0
    assert stored == [1.0, 21.0, 41.0]  # each takes 1 s, of every 20 s
