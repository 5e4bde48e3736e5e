"""The windows of a session: in order, complete or cut short, and nothing left behind."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

import headrace
from headrace.device import Device, open_device
from headrace.diagnosis import session as session_module
from headrace.diagnosis.loaders import LoaderFacts
from headrace.diagnosis.session import Session, Settings
from headrace.errors import ProgramError, RaceError
from headrace.fake import fake_cuda
from support.diagnosis.made_traces import Loop

FAST = Settings(warmup=3, clean=4, profiled=3, lines=2)
WINDOWS = 13  # how many steps they have, with one to find out what a step is


def trained(steps: int, each: Callable[[int], object] = lambda step: None) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    loader = iter(DataLoader(TensorDataset(torch.ones(400, 2)), batch_size=2))
    for step in range(steps):
        (x,) = next(loader)
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()
        each(step)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The CPU in place of a GPU, with a made-up trace. Returns the windows that were entered."""
    windows: list[str] = []

    @contextmanager
    def chrome_trace() -> Iterator[dict[str, Any]]:
        windows.append("profiled")
        yield {}

    @contextmanager
    def watch_waits(device: Device, on_wait: Any) -> Iterator[None]:
        windows.append("lines")
        yield

    def read_trace(content: Any, clock: Any, marks: Any, inputs: Any, calls: Any) -> Any:
        kinds = Counter(call.kind for call in calls)
        windows.append(f"{len(marks)} steps, {len(list(inputs))} batches, {dict(kinds)}")
        return Loop().run()

    monkeypatch.setattr(Session, "_accelerator", lambda self: open_device("cpu"))
    for replacement in (chrome_trace, watch_waits, read_trace):
        monkeypatch.setattr(session_module, replacement.__name__, replacement)
    return windows


def test_the_windows_follow_each_other(on_gpu: list[str]) -> None:
    completed: list[int] = []
    session = Session(FAST, on_complete=lambda: completed.append(1))
    with session:
        trained(20, lambda step: completed.append(0) if not completed else None)
    measured = session.seen.measured
    kinds = {"optimizer": 6, "backward": 3}  # `zero_grad` counts, too
    assert on_gpu == ["profiled", f"3 steps, 3 batches, {kinds}", "lines"]
    assert (len(measured.clean_ns), measured.profiled_steps, len(measured.waits)) == (4, 3, 2)
    assert measured.is_complete
    assert completed.count(1) == 1
    assert measured.clean_total_ns >= sum(measured.clean_ns)
    assert measured.backwards == 2
    assert measured.loader == LoaderFacts(workers=0, pins=False, batch_tensors=1)


@pytest.mark.parametrize("cupti", [True, False])
def test_without_cupti_events_take_the_profilers_place(
    on_gpu: list[str], monkeypatch: pytest.MonkeyPatch, cupti: bool
) -> None:
    """If it is not wanted, and if it records nothing."""
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(session_module, "read_trace", lambda *given: None)
    monkeypatch.setattr(session_module, "_WORTH_SAMPLING", -1.0)  # so that Python's lines are, too
    session = Session(replace(FAST, cupti=cupti))
    with session:
        trained(30)
    measured = session.seen.measured
    assert ("profiled" in on_gpu) is cupti
    assert measured.is_complete
    assert measured.missing == []
    assert not measured.has_cupti
    assert measured.trace is not None
    assert (measured.trace.steps, len(measured.waits)) == (3, 2)
    assert measured.trace.launches_per_step() > 3
    assert len(measured.trace.inputs) == 3
    assert any("without CUPTI" in note for note in session.seen.notes)


def test_a_script_that_ends_before_the_device_was_measured_has_no_breakdown(
    on_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    session = Session(replace(FAST, cupti=False))
    with session:
        trained(10)
    measured = session.seen.measured
    assert measured.profiled_steps == 2
    assert measured.trace is None
    assert "no breakdown" in measured.missing[0]


class Ended(BaseException):
    pass


def trained_with_workers(steps: int, trained_on: list[float], second: bool = False) -> None:
    """Train on numbers that two processes load. With `second`, another loader follows."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    batches = DataLoader(TensorDataset(torch.arange(80.0)), batch_size=1, num_workers=2)
    others = DataLoader(TensorDataset(torch.ones(80)), batch_size=1, num_workers=2)
    loader = iter(batches)
    for step in range(steps):
        if step == WINDOWS and second:
            loader = iter(others)
        (x,) = next(loader)
        trained_on.append(float(x))
        (weight * x).sum().backward()
        optimizer.step()


def test_before_a_script_is_ended_its_loader_is_timed(on_gpu: list[str]) -> None:
    def end() -> None:
        raise Ended

    trained_on: list[float] = []
    session = Session(FAST, on_complete=end, takes_batches=True)
    with session, pytest.raises(Ended):
        trained_with_workers(40, trained_on)
    assert trained_on == list(range(WINDOWS))  # and no further step
    facts = session.seen.measured.loader
    assert facts is not None
    assert facts.workers == 2
    assert facts.batch_ms is not None


@pytest.mark.parametrize("second", [False, True])
def test_a_script_that_runs_on_gets_all_its_batches(on_gpu: list[str], second: bool) -> None:
    """Without `takes_batches`, or if another loader follows the last window."""
    trained_on: list[float] = []
    completed: list[int] = []
    session = Session(
        FAST, on_complete=lambda: completed.append(len(trained_on)), takes_batches=second
    )
    with session:
        trained_with_workers(40, trained_on, second)
    assert trained_on == ([*range(WINDOWS), *[1.0] * (40 - WINDOWS)] if second else list(range(40)))
    assert completed == [WINDOWS]
    facts = session.seen.measured.loader
    assert facts is not None
    assert facts.batch_ms is None


@pytest.mark.parametrize(
    ("steps", "clean", "profiled", "lines"), [(5, 1, 0, 0), (9, 4, 1, 0), (12, 4, 3, 1)]
)
def test_a_script_that_ends_early_leaves_what_is_known(
    on_gpu: list[str], steps: int, clean: int, profiled: int, lines: int
) -> None:
    session = Session(FAST)
    with session:
        trained(steps)
    measured = session.seen.measured
    assert (len(measured.clean_ns), measured.profiled_steps, len(measured.waits)) == (
        clean,
        profiled,
        lines,
    )
    assert not measured.is_complete


def test_a_profiler_of_the_scripts_own_leaves_the_breakdown_out(on_gpu: list[str]) -> None:
    session = Session(FAST)
    with session, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        trained(20)
    assert on_gpu == ["lines"]
    assert "the script runs a profiler of its own" in session.seen.measured.missing[0]


def test_a_window_that_fails_does_not_fail_the_script(
    on_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise ValueError("CUPTI is busy")

    monkeypatch.setattr(session_module, "read_trace", failing)
    session, done = Session(FAST), []
    with session:
        trained(20, done.append)
    assert len(done) == 20
    assert session.seen.measured.missing == [
        "diagnose itself failed in the profiled window: ValueError: CUPTI is busy"
    ]
    assert not session.seen.measured.is_complete


def test_the_windows_begin_again_when_other_steps_follow(on_gpu: list[str]) -> None:
    session = Session(FAST)
    with session:
        trained(9)
        assert len(session.seen.measured.clean_ns) == 4
        trained(30)
    measured = session.seen.measured
    assert [one[:18] for one in on_gpu[-3:]] == ["profiled", "3 steps, 3 batches", "lines"]
    assert (len(measured.clean_ns), measured.profiled_steps, len(measured.waits)) == (4, 3, 2)
    assert measured.is_complete


def test_gradients_that_are_accumulated_are_seen(on_gpu: list[str]) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with headrace.diagnose(warmup=3, clean=2, profiled=1, lines=2) as diagnosis:
        for batch in range(48):
            (weight * 2).sum().backward()
            if batch % 4 == 3:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    assert diagnosis.result.backwards_per_step == 4
    assert "A step has 4 backward passes" in str(diagnosis)
    assert "zero_grad(set_to_none=False)" in diagnosis.result.notes[0]


def test_everything_is_as_before_afterwards(on_gpu: list[str]) -> None:
    names: list[tuple[Any, str]] = [
        (_BaseDataLoaderIter, "__next__"),
        (torch.Tensor, "backward"),
        (torch.autograd, "backward"),
        (torch.nn.Module, "__call__"),
        (torch.optim.Optimizer, "zero_grad"),
        (torch.cuda.CUDAGraph, "replay"),
    ]
    before = [getattr(owner, name) for owner, name in names]
    for steps in (1, 9, 12, 20):
        with Session(FAST):
            trained(steps)
        assert [getattr(owner, name) for owner, name in names] == before


def test_a_block_is_diagnosed_and_its_result_printed(on_gpu: list[str]) -> None:
    with headrace.diagnose(warmup=3, clean=4, profiled=3, lines=2) as diagnosis:
        with pytest.raises(ProgramError, match="has not ended"):
            str(diagnosis)
        trained(20)
    assert diagnosis.result.outcome == "complete"
    assert str(diagnosis).startswith("A step takes ")


def test_a_block_on_the_fake_device_has_waits_and_no_times() -> None:
    found: list[headrace.Diagnosis] = []

    def train_after_a_race() -> None:
        with fake_cuda():
            written = torch.zeros(4, device="cuda")
            with torch.cuda.stream(torch.cuda.Stream()):
                written.add_(1)  # the race: before the block, and not counted in it
            with headrace.diagnose(warmup=3, lines=2) as diagnosis:
                found.append(diagnosis)
                weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
                optimizer = torch.optim.SGD([weight], lr=0.1)
                for _ in range(8):
                    optimizer.zero_grad()
                    loss = weight.square().sum()
                    loss.backward()
                    optimizer.step()
                    loss.item()

    with pytest.raises(RaceError):
        train_after_a_race()
    (diagnosis,) = found
    assert (diagnosis.result.outcome, diagnosis.result.races) == ("lines only", 0)
    assert str(diagnosis).startswith("The host waits for the device 1.0 times a step, at 1 line.")


def test_a_block_inside_another_is_refused(on_gpu: list[str]) -> None:
    with headrace.diagnose() as diagnosis:
        with pytest.raises(ProgramError, match="being diagnosed already"), headrace.diagnose():
            pass
        trained(2)
    assert diagnosis.result.steps == 2
    with Session(FAST):
        pass


def test_a_line_of_the_blocks_own_code_may_be_the_step(on_gpu: list[str]) -> None:
    line = inspect.currentframe().f_lineno + 3  # type: ignore[union-attr]
    with headrace.diagnose(warmup=3, clean=4, step_line=f"{__file__}:{line}") as diagnosis:
        for _ in range(9):
            math.sqrt(2)
    assert diagnosis.result.steps == 9


def test_windows_without_steps_are_an_error() -> None:
    for name, least in (("warmup", 1), ("clean", 2), ("profiled", 1), ("lines", 1)):
        with pytest.raises(ProgramError, match=f"{name} is 0; expected at least {least}"):
            Settings(**{name: 0})  # type: ignore[arg-type]


@pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch has CUDA here")
def test_lines_that_wait_between_many_steps_are_told() -> None:
    def train(rollout: Callable[[torch.Tensor], object]) -> list[str]:
        with fake_cuda(), headrace.diagnose(warmup=3, lines=2) as diagnosis:
            # One line that moves many tensors waits once: the loop does not come back there.
            weights = [torch.ones(2).cuda().requires_grad_() for _ in range(9)]
            optimizer = torch.optim.SGD(weights, lr=0.1, fused=True)
            for _ in range(4):
                rollout(weights[0].detach())
            for _ in range(9):
                weights[0].sum().backward()
                optimizer.step()
                weights[0].tolist()
        return list(diagnosis.result.notes)

    assert train(lambda weight: None) == []
    (note,) = train(lambda weight: weight.cpu())
    assert "test_session.py:" in note
    assert "waited 4 times before the steps that were looked at, and not in them" in note
    assert note.endswith('measure whole rounds with step_line="FILE:LINE"')
