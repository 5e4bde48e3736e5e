"""Steps that are watched all the time: their figures, by a clock that the test moves."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headrace.diagnosis import data_waits, line_samples, step_monitor
from headrace.diagnosis.line_samples import LineSample, WaitingPlace
from headrace.diagnosis.step_figures import StepFigures, WaitingLine
from headrace.diagnosis.step_monitor import StepMonitor

MS = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def move(self, ms: float) -> None:
        self.now_ns += round(ms * MS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(step_monitor, "perf_counter_ns", found)
    monkeypatch.setattr(data_waits, "perf_counter_ns", found)
    return found


class Batches(TensorDataset):
    """Loading a batch takes a moment."""

    def __init__(self, clock: Clock, ms: float) -> None:
        super().__init__(torch.ones(10_000, 2))
        self._clock, self._ms = clock, ms

    def __getitem__(self, at: Any) -> Any:
        self._clock.move(self._ms)
        return super().__getitem__(at)


def training(clock: Clock, load_ms: float = 0.0) -> Iterator[torch.optim.Optimizer]:
    """Each `next` is a step."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(2)
    for _ in DataLoader(Batches(clock, load_ms)):
        optimizer.step()
        yield optimizer


def run(steps: Iterator[Any], clock: Clock, *ms: float) -> None:
    for one in ms:
        clock.move(one)
        next(steps)


def test_the_median_step_and_the_wait_for_data_are_told(clock: Clock) -> None:
    found: list[StepFigures] = []
    monitor = StepMonitor(found.append, every_s=0.5)
    steps = training(clock, load_ms=2.0)
    with monitor:
        run(steps, clock, *[1000.0] * 10)  # the warm-up
        run(steps, clock, *[8.0] * 60)
    first, last = found
    assert first.steps == 50
    assert last.steps == 10
    assert (first.step, last.step) == (60, 70)
    assert first.step_ms == pytest.approx(10.0)
    assert first.data_wait_ms == pytest.approx(2.0)
    assert first.memory_bytes is None
    assert monitor.latest is last
    assert "10.00 ms, 2.00 ms for data" in str(monitor)


def test_an_evaluation_does_not_count(clock: Clock) -> None:
    found: list[StepFigures] = []
    steps = training(clock)
    with StepMonitor(found.append):
        run(steps, clock, *[10.0] * 50, 9000.0, 10.0)
    assert found[0].step_ms == pytest.approx(10.0)
    assert found[0].slowest_ms == pytest.approx(9000.0)


def test_after_the_block_nothing_is_watched(clock: Clock) -> None:
    loader = torch.utils.data.dataloader._BaseDataLoaderIter
    before = loader.__next__
    found: list[StepFigures] = []
    steps = training(clock)
    with StepMonitor(found.append) as monitor:
        assert loader.__next__ is not before
        assert monitor.is_running
        run(steps, clock, *[10.0] * 30)
    run(steps, clock, *[10.0] * 3000)
    assert loader.__next__ is before
    assert not monitor.is_running
    assert len(found) == 1


def test_memory_stays_flat_over_many_steps(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_samples, "SAMPLE_S", 1e6)
    monitor = StepMonitor(every_s=0.1)

    def train(steps: int) -> None:
        for _ in range(steps):
            clock.move(1.0)
            monitor._on_call(0)

    with monitor:
        train(3000)
        tracemalloc.start()
        train(2000)
        before, _ = tracemalloc.get_traced_memory()
        train(20_000)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert after - before < 50_000


def test_waits_outside_usual_steps_do_not_count(clock: Clock) -> None:
    """Such as those of an evaluation, and of what follows the last step."""
    found: list[StepFigures] = []
    item, logger = WaitingPlace("train.py:3", ".item()"), WaitingPlace("train.py:9", "a logger")
    monitor, steps = StepMonitor(found.append), training(clock)
    with monitor:
        run(steps, clock, *[10.0] * 50, 9000.0, 10.0)
        begin_ns = clock.now_ns
        for ms, place in ((-9025, None), (-5, item), (-3000, logger), (3000, logger)):
            monitor._sampler._samples.append(LineSample(begin_ns + ms * MS, place))
    assert found[0].waits == (WaitingLine("train.py:3", ".item()", 5.0),)
