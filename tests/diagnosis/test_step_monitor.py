"""Steps that are watched all the time: their figures, by a clock that the test moves."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headrace.diagnosis import step_monitor
from headrace.diagnosis.step_monitor import StepFigures, StepMonitor, WaitingLine, _Sampler, _Watch

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
    monkeypatch.setattr(step_monitor, "_SAMPLE_S", 1e6)
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


def figures(step_ms: float, data_ms: float = 0.0, wait_ms: float = 0.0) -> StepFigures:
    waits = (WaitingLine("train.py:30", ".item()", wait_ms),)
    return StepFigures(1000, 100, step_ms, step_ms, data_ms, waits)


def test_slower_steps_are_warned_of_once_with_what_has_grown() -> None:
    watch = _Watch()
    told = [
        *watch.warnings(figures(10.0)),
        *watch.warnings(figures(15.0, wait_ms=4.0)),
        *watch.warnings(figures(10.0)),  # it was a moment
        *watch.warnings(figures(15.0, wait_ms=4.0)),
        *watch.warnings(figures(15.0, wait_ms=4.0)),
        *watch.warnings(figures(15.0, wait_ms=4.0)),
    ]
    assert told == [
        "step 1,000: a step takes 15.0 ms, 1.50 times as long as at first; 4.0 ms more are spent "
        "at train.py:30"
    ]


def test_a_loader_that_is_the_limit_is_warned_of_once() -> None:
    watch = _Watch()
    told = [text for _ in range(4) for text in watch.warnings(figures(10.0, data_ms=3.0))]
    assert len(told) == 1
    assert "the data loader is the limit: 3.00 ms of a step of 10.00 ms" in told[0]


def test_lines_that_wait_are_counted_and_others_are_not() -> None:
    sampler, loss = _Sampler(), torch.ones(())

    class Looking:
        def item(self) -> None:
            sampler.look(sys._getframe(1))

        def launch(self) -> None:
            sampler.look(sys._getframe(1))

    loss = Looking()  # type: ignore[assignment]
    for _ in range(3):
        loss.item()
    loss.launch()  # type: ignore[attr-defined]
    shares = sampler.take()
    ((place, title), share), *others = shares.items()
    assert place.startswith("test_step_monitor.py:") or "test_step_monitor.py:" in place
    assert (title, share) == (".item()", 0.75)
    assert others == []
    assert sampler.take() == {}
