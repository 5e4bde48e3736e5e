"""The faults of docs/faults.md that concern the engine, and what happens after each."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import math
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.checkpoint import CheckpointWriter, load_checkpoint
from headrace.device import Device
from headrace.engine import Engine
from headrace.errors import LoaderError, NonFiniteError, OutOfMemoryError, PlanError, StepError
from headrace.fake import FakeDevice, Hang
from headrace.lifecycle import Watchdog
from headrace.lifecycle.watchdog import HUNG
from support.training.engines import (
    EAGER,
    bad_batches,
    data,
    loss,
    make_engine,
    make_model,
    same,
    weights,
)
from support.training.loaders import Stateful, shuffled

PLANS = [*EAGER, "graph"]


class TestNonFinite:
    @pytest.mark.parametrize("plan", PLANS)
    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_skip_leaves_out_the_update_and_reports_it(
        self, device: Device, plan: str, accumulate: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The weights are those of a run that never saw the group with the bad batch."""
        options = {"accumulate": accumulate, "deterministic": True, "clip_norm": 1.0}
        group = slice(8, 8 + accumulate)
        batches = bad_batches(16, 8)
        engine = make_engine(
            device, plan, model=make_model(device, 0.0), on_nonfinite="skip", **options
        )
        result = engine.epoch(batches)
        other = make_engine(device, plan, model=make_model(device, 0.0), **options)
        rest = [batch for at, batch in enumerate(batches) if at not in range(16)[group]]
        other.epoch(rest)
        assert same(weights(engine), weights(other))
        assert result.non_finite == (8,)
        assert len(result.losses) == 16
        assert result.waits["non_finite"].count == 0  # nothing was read back
        assert f"loss not finite at batch 9 of epoch 1{'; its' if accumulate == 1 else ''}" in (
            caplog.text
        )
        assert engine.updates == 16 // accumulate

    @pytest.mark.parametrize("plan", ["pipeline", "graph"])
    def test_the_gate_changes_no_bit_where_all_is_finite(self, device: Device, plan: str) -> None:
        found = make_engine(device, plan, on_nonfinite="skip", deterministic=True)
        expected = make_engine(device, plan, deterministic=True)
        torch.manual_seed(1)
        losses = found.epoch(data()).losses
        torch.manual_seed(1)
        assert losses == expected.epoch(data()).losses
        assert same(weights(found), weights(expected))

    def test_a_gradient_alone(self, device: Device, caplog: pytest.LogCaptureFixture) -> None:
        """The loss of 0 is fine; the root's slope there is not."""

        def rooted(model: Any, batch: Any) -> torch.Tensor:
            return model(batch[0]).sum().mul(0).sqrt()

        engine = make_engine(device, loss=rooted, on_nonfinite="skip")
        before = weights(engine)
        engine.epoch(data(3))
        assert same(weights(engine), before)
        assert "a gradient not finite at batch 3 of epoch 1; its update is skipped" in caplog.text

    @pytest.mark.parametrize("plan", ["baseline", "pipeline", "graph"])
    def test_stop_names_the_batch(self, device: Device, plan: str) -> None:
        engine = make_engine(device, plan, on_nonfinite="stop")
        with pytest.raises(NonFiniteError, match="loss not finite at batch 9 of epoch 1") as caught:
            engine.epoch(bad_batches(100, 8))
        assert (caught.value.epoch, caught.value.batch) == (0, 8)
        assert engine.last_result is not None
        assert engine.last_result.statistics.batches < 100
        assert make_engine(device).epoch(data(3)).statistics.batches == 3  # all is given back

    @pytest.mark.parametrize("plan", ["baseline", "pipeline", "graph"])
    def test_tolerate_keeps_the_weights_of_before_the_last_straw(
        self, device: Device, plan: str
    ) -> None:
        options = {"model": make_model(device, 0.0), "deterministic": True}
        engine = make_engine(device, plan, on_nonfinite="tolerate:2", **options)
        batches = bad_batches(60, 3, 5, 9)
        with pytest.raises(NonFiniteError, match="at batch 10 of epoch 1; 2 such updates were"):
            engine.epoch(batches)
        other = make_engine(device, plan, model=make_model(device, 0.0), deterministic=True)
        other.epoch([batches[at] for at in (0, 1, 2, 4, 6, 7, 8)])
        assert same(weights(engine), weights(other))

    def test_an_optimizer_that_is_not_fused_costs_a_wait(self, device: Device) -> None:
        model = make_model(device, 0.0)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=False)
        engine = Engine(model, optimizer, loss, device=device, plan="graph", on_nonfinite="skip")
        result = engine.epoch(bad_batches(6, 2))
        assert result.waits["non_finite"].count == 6
        assert all(torch.isfinite(weight).all() for weight in weights(engine))
        if device.captures:
            assert engine.graphs is not None
            assert "reads back before every update" in str(engine.graphs.why)

    def test_fp16_too_ends_after_so_many(self, device: Device) -> None:
        engine = make_engine(device, precision="fp16", on_nonfinite="tolerate:2")
        with pytest.raises(NonFiniteError, match="at batch 10 of epoch 1; 2 such updates were"):
            engine.epoch(bad_batches(60, 3, 5, 9))
        assert all(torch.isfinite(weight).all() for weight in weights(engine))

    def test_fp16_leaves_it_to_the_scaler(self, device: Device) -> None:
        engine = make_engine(device, precision="fp16", on_nonfinite="skip")
        engine.epoch(bad_batches(6, 2))
        assert all(torch.isfinite(weight).all() for weight in weights(engine))

    def test_what_was_tolerated_is_part_of_the_state(self, device: Device) -> None:
        engine = make_engine(device, on_nonfinite="tolerate:1")
        engine.epoch(bad_batches(4, 2))
        other = make_engine(device, on_nonfinite="tolerate:1")
        other.load_state_dict(copy.deepcopy(engine.state_dict()))
        before = weights(other)
        with pytest.raises(NonFiniteError, match="at batch 1 of epoch 2; 1 such updates were"):
            other.epoch(bad_batches(1, 0))  # one too many: no update any more
        assert same(weights(other), before)

    @pytest.mark.parametrize("word", ["ignore", "tolerate", "tolerate:", "tolerate:-1", "skip:2"])
    def test_words_it_does_not_know(self, word: str) -> None:
        with pytest.raises(StepError, match="expected report, stop, skip, or tolerate:N"):
            make_engine(hr.open_device("cpu"), on_nonfinite=word)


def wide(device: Device) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3)]
    return torch.nn.Sequential(*layers).to(device.torch_device)


def weighted_loss(model: torch.nn.Module, batch: Any) -> dict[str, Any]:
    right = model(batch[0]).argmax(1).eq(batch[1]).float().mean()
    return {"loss": loss(model, batch), "weight": (batch[1] >= 0).sum(), "right": right}


def step_bytes(rows: int, **options: Any) -> int:
    """What training on batches of so many rows needs."""
    with FakeDevice() as device:
        make_engine(device, model=wide(device), **options).epoch(data(6, rows))
        return device.memory().peak_allocated


class TestOutOfMemory:
    @pytest.mark.parametrize("accumulate", [1, 3])
    @pytest.mark.parametrize("function", [loss, weighted_loss])
    @pytest.mark.parametrize("plan", ["pipeline", "streams4"])
    def test_in_halves_it_is_the_same_step_to_rounding(
        self, plan: str, function: Any, accumulate: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        options = {"loss": function, "accumulate": accumulate, "clip_norm": 1.0}
        batches = [*data(7, 40), *data(5, 400), *data(2, 30)]
        with FakeDevice() as device:
            whole = make_engine(device, plan, model=wide(device), **options)
            expected = whole.epoch(batches)
        room = (step_bytes(400, **options) + step_bytes(40, **options)) // 2
        with FakeDevice(memory_bytes=room) as device:
            engine = make_engine(device, plan, model=wide(device), on_oom="halve", **options)
            found = engine.epoch(batches)
            assert engine._builder.parts is not None
            assert engine._builder.parts.group.split_batches == 5
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
        assert found.weights == expected.weights
        assert found.metrics == pytest.approx(expected.metrics)
        for one, other in zip(weights(engine), weights(whole), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert engine.updates == whole.updates
        assert caplog.text.count("trained on in two halves") == 1

    def test_where_nothing_is_halved_no_bit_changes(self, device: Device) -> None:
        for accumulate in (1, 3):
            expected = make_engine(device, accumulate=accumulate, deterministic=True)
            found = make_engine(device, accumulate=accumulate, on_oom="halve", deterministic=True)
            torch.manual_seed(1)
            losses = expected.epoch(data()).losses
            torch.manual_seed(1)
            assert found.epoch(data()).losses == losses
            assert same(weights(found), weights(expected))

    def test_the_error_says_what_holds_the_memory(self) -> None:
        with FakeDevice(memory_bytes=(step_bytes(400) + step_bytes(40)) // 2) as device:
            engine = make_engine(device, model=wide(device))
            with pytest.raises(OutOfMemoryError) as caught:
                engine.epoch([*data(3, 40), *data(1, 400)])
            assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
            said = str(caught.value)
            del caught  # it holds all that the step had allocated
            assert engine.epoch(data(2, 40)).statistics.batches == 2  # and goes on
        for part in (
            "no memory left for batch (400, 8), (400,)",
            "the largest batch that fitted had 40 samples",
            "weights 0.0 MB, ",
            "optimizer 0.0 MB",
            "activations, batches and others",
            "smaller batches, with accumulate",
            "on_oom='halve'",
            "precision='bf16'",
            "PyTorch says: fake out of memory: tried to allocate",
        ):
            assert part in said, said

    def test_a_batch_that_cannot_be_halved(self) -> None:
        with FakeDevice(memory_bytes=(step_bytes(400) + step_bytes(40)) // 2) as device:
            engine = make_engine(device, model=wide(device), on_oom="halve", accumulate=2)
            uneven = (torch.randn(400, 8), torch.zeros(400, dtype=torch.int64), torch.zeros(3))
            with pytest.raises(OutOfMemoryError, match="no memory left for batch"):
                engine.epoch([*data(1, 4), uneven])
            assert engine.updates == 1  # the batch before was not lost

    def test_refused_where_halves_are_not_the_whole(self, device: Device) -> None:
        norm = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.BatchNorm1d(3))
        with pytest.raises(StepError, match="1 is a BatchNorm1d, whose mean over a half"):
            make_engine(device, model=norm.to(device.torch_device), on_oom="halve")
        with pytest.raises(StepError, match="plan graph has graphs = 'on'"):
            make_engine(device, "graph", on_oom="halve")
        engine = make_engine(device, on_oom="halve")
        with pytest.raises(StepError, match="has graphs = 'on'"):
            engine.use_plan("graph")
        with pytest.raises(StepError, match="on_oom = 'shrink': expected 'raise' or 'halve'"):
            make_engine(device, on_oom="shrink")

    def test_refused_with_several_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
        with pytest.raises(StepError, match="this is one of 4 processes"):
            make_engine(hr.open_device("cpu"), on_oom="halve")

    def test_a_checkpoint_without_room_for_a_clone(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with FakeDevice(memory_bytes=5000) as device:
            weight = torch.ones(1000, device=device.torch_device)
            with CheckpointWriter(device, tmp_path) as writer:
                writer.save({"weight": weight}, 1)
                weight.add_(1)  # ordered behind the copy: the fake would object
            assert device.pinned.lent == 0
        assert torch.equal(load_checkpoint(tmp_path / "step-00000001")["weight"], torch.ones(1000))
        assert "training waits while the state is copied to the host" in caplog.text


class Stuck:
    """A loader that hangs before its third batch, until it is let go."""

    def __init__(self) -> None:
        self.may_go = threading.Event()

    def __iter__(self) -> Iterator[Any]:
        yield from data(2)
        self.may_go.wait()


class TestLoader:
    def test_one_that_hangs(self, device: Device) -> None:
        stuck = Stuck()
        engine = make_engine(device, loader_timeout=0.05)
        with pytest.raises(
            LoaderError, match=r"no batch for 0.05 s .waiting for batch 3 of this pass"
        ):
            engine.epoch(stuck)
        assert engine.last_result is not None
        assert len(engine.last_result.losses) == 2
        stuck.may_go.set()

    def test_a_timeout_changes_nothing_else(self, device: Device) -> None:
        expected = make_engine(device, deterministic=True)
        found = make_engine(device, deterministic=True, loader_timeout=60)
        torch.manual_seed(1)
        losses = expected.epoch(data()).losses
        torch.manual_seed(1)
        assert found.epoch(data()).losses == losses
        assert not [t for t in threading.enumerate() if t.name == "headrace-loader"]

    def test_errors_pass_through_the_thread(self, device: Device) -> None:
        ended = []

        def broken() -> Iterator[Any]:
            try:
                yield from data(3)
                raise KeyError("row 17")
            finally:
                ended.append(True)

        with pytest.raises(KeyError, match="row 17"):
            list(hr.prefetch(broken(), device, loader_timeout=60))
        for _ in hr.prefetch(broken(), device, loader_timeout=60):
            break
        assert ended == [True, True]
        with pytest.raises(PlanError, match="loader_timeout = -1"):
            hr.prefetch([], device, loader_timeout=-1)

    def test_the_state_is_whole_when_on_error_is_called(self, device: Device) -> None:
        """Gone on with from there, no batch is lost and none comes twice."""
        stored: list[Any] = []

        def broken() -> Iterator[Any]:
            yield from data(7)
            raise OSError("the disk is gone")

        def keep(problem: BaseException) -> None:
            assert isinstance(problem, OSError)
            engine.settle()
            stored.append(copy.deepcopy(engine.state_dict()))

        options = {"accumulate": 2, "deterministic": True}
        whole = make_engine(device, model=make_model(device, 0.0), **options)
        whole.epoch(data(12))
        engine = make_engine(device, model=make_model(device, 0.0), on_error=keep, **options)
        with pytest.raises(OSError, match="the disk is gone"):
            engine.epoch(broken())
        other = make_engine(device, model=make_model(device, 0.0), **options)
        assert other.load_state_dict(stored[0]) == 7
        other.epoch(data(12)[7:], first_batch=7)
        assert same(weights(other), weights(whole))

    def test_restored_values_are_not_lost_to_an_error_before_the_first_batch(
        self, device: Device
    ) -> None:
        def broken(count: int) -> Iterator[Any]:
            yield from data(count)
            raise OSError("the disk is gone")

        def keep(problem: BaseException) -> None:
            stored.append(copy.deepcopy(engine.state_dict()))

        whole = make_engine(device).epoch(data(12))
        stored: list[Any] = []
        engine = make_engine(device, on_error=keep)
        with pytest.raises(OSError, match="the disk is gone"):
            engine.epoch(broken(7))
        for _ in range(2):
            engine = make_engine(device, on_error=keep)
            engine.load_state_dict(stored[-1])
            with pytest.raises(OSError, match="the disk is gone"):
                engine.epoch(broken(0), first_batch=7)
        assert len(stored) == 3
        engine = make_engine(device)
        engine.load_state_dict(stored[-1])
        result = engine.epoch(data(12)[7:], first_batch=7)
        assert result.losses == whole.losses
        assert result.mean_loss == whole.mean_loss

    def test_an_engine_that_is_asked_looks_at_its_values_whatever_ended_the_loop(
        self, device: Device
    ) -> None:
        def broken() -> Iterator[Any]:
            yield from data(3)
            inputs, labels = data(1)[0]
            yield inputs * math.nan, labels
            raise OSError("the disk is gone")

        asked: list[BaseException] = []

        def ask(problem: BaseException) -> None:
            try:
                engine.settle()
            except NonFiniteError as found:
                asked.append(found)

        engine = make_engine(device, on_error=ask, on_nonfinite="stop")
        with pytest.raises(OSError, match="the disk is gone"):
            engine.epoch(broken())
        assert "batch 4" in str(asked[0])

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_an_error_at_any_moment(self, accumulate: int) -> None:
        """As Python raises Ctrl-C, and a DataLoader the death of a worker: between any two lines.
        Whenever `on_error` is called, the state is that after the batches it says."""
        device, called = hr.open_device("cpu"), 0
        options: dict[str, Any] = {"accumulate": accumulate, "deterministic": True}
        options["lr"] = lambda update: 0.01 * 0.5**update
        whole = make_engine(device, model=make_model(device, 0.5), **options)
        torch.manual_seed(5)  # dropout's masks, too
        whole.epoch(data(7))
        for moment in range(60, 700, 13):
            stored = interrupted(device, moment, options)
            if stored is not None:
                called += 1
                other = make_engine(device, model=make_model(device, 0.5), **options)
                done = other.load_state_dict(stored)
                other.epoch(data(7)[done:], first_batch=done)
                assert same(weights(other), weights(whole)), moment
        assert called > 3


_INTERRUPTED = ("/loop.py", "/step.py", "/engine.py", "/schedules.py")


def interrupted(device: Device, moment: int, options: dict[str, Any]) -> Any | None:
    """Train, with an error before the so-manieth line that the loop runs. What `on_error` kept."""
    stored: list[Any] = []
    lines = [0]

    def keep(problem: BaseException) -> None:
        engine.settle()
        stored.append(copy.deepcopy(engine.state_dict()))

    def trace(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(_INTERRUPTED):
            return None
        lines[0] += event == "line"
        if lines[0] == moment and event == "line":
            sys.settrace(None)
            raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")
        return trace

    engine = make_engine(device, model=make_model(device, 0.5), on_error=keep, **options)
    before = sys.gettrace()
    torch.manual_seed(5)
    sys.settrace(trace)
    try:
        with contextlib.suppress(RuntimeError):
            engine.epoch(data(7))
    finally:
        sys.settrace(before)
    return stored[0] if stored else None


class TestPlace:
    """Restored in the midst of an epoch, `epoch(loader)` finds the next batch by itself."""

    @pytest.mark.parametrize("loader", [lambda: Stateful(data(13)), lambda: data(13), shuffled])
    @pytest.mark.parametrize("plan", ["baseline", "pipeline"])
    def test_in_any_loader(
        self, device: Device, plan: str, loader: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        torch.manual_seed(5)
        whole = make_engine(device, plan, deterministic=True)
        torch.manual_seed(6)
        expected = [loss for _ in range(2) for loss in whole.epoch(loader()).losses]
        torch.manual_seed(5)
        engine = make_engine(device, plan, deterministic=True)
        torch.manual_seed(6)
        seen: list[float] = []
        for info in engine.steps(loader()):
            seen += [entry.values["loss"] for entry in info.arrived]
            if info.batch == 6:
                stored = copy.deepcopy(engine.state_dict())  # with values not yet reported
                break
        torch.manual_seed(99)
        other = make_engine(device, plan, deterministic=True)
        other.load_state_dict(stored)
        again = copy.deepcopy(other.state_dict())  # taken at once, it is the same
        assert (again["batch"], again["loader"]) == (7, stored["loader"])
        assert torch.equal(again["random"]["host"], stored["random"]["host"])
        seen += [*other.epoch(loader()).losses, *other.epoch(loader()).losses]
        assert seen == expected  # each exactly once
        assert same(weights(other), weights(whole))
        assert ("loaded and dropped" in caplog.text) == (not isinstance(loader(), Stateful))

    def test_the_loaders_state_is_that_of_what_was_trained_on(self, device: Device) -> None:
        engine, loader = make_engine(device), Stateful(data(13))
        for info in engine.steps(loader):
            if info.batch == 4:
                assert loader.at > 5
                assert engine.state_dict()["loader"] == {"at": 5}
                break

    def test_a_sampler_that_knows_its_plan_is_told(self, device: Device) -> None:
        class Planned(list[Any]):
            started = 0

            def start_at(self, batch: int) -> None:
                self.started = batch

            def __iter__(self) -> Iterator[Any]:
                return iter(list(super().__iter__())[self.started :])

        engine = make_engine(device)
        for info in engine.steps(data(13)):
            if info.batch == 4:
                stored = copy.deepcopy(engine.state_dict())
                break
        other = make_engine(device)
        other.load_state_dict(stored)
        assert len([None for _ in other.steps(Planned(data(13)))]) == 8

    def test_a_loader_that_is_too_short(self, device: Device) -> None:
        engine = make_engine(device)
        for _ in engine.steps(data(5)):
            stored = copy.deepcopy(engine.state_dict())
        other = make_engine(device)
        other.load_state_dict(stored)
        with pytest.raises(
            StepError, match="the loader ended after 3 batches, and 5 of this epoch"
        ):
            other.epoch(data(3))

    def test_progress_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        from headrace.data import Skipping

        times = iter(range(0, 1000, 2))
        rest = Skipping([*range(10)], 8, clock=lambda: next(times))
        with caplog.at_level(logging.WARNING):
            assert list(rest) == [8, 9]
        assert "of 8 batches dropped" in caplog.text


class TestState:
    def test_the_ledger_goes_on(self, device: Device) -> None:
        engine = make_engine(device, "baseline")
        engine.epoch(data(5))
        stored = copy.deepcopy(engine.state_dict())
        before = device.ledger.statistics()
        device.ledger.load_state_dict({"wall_ns": 0, "reasons": {}})
        make_engine(device, "baseline").load_state_dict(stored)
        assert device.ledger.statistics()["data"] == before["data"]


class TestHang:
    def test_a_hung_step_is_described(self, tmp_path: Path) -> None:
        now, told = [0.0], io.StringIO()
        with FakeDevice() as device:
            engine = make_engine(device, "pipeline")
            engine.epoch(data(3))
            file = tmp_path / "hang.txt"
            dog = Watchdog(device, 60, file=file, clock=lambda: now[0], stream=told)
            dog.progress("batch 2 of epoch 0")
            assert not dog.look()
            device.hang = hang = Hang()
            result: list[Any] = []
            thread = threading.Thread(
                target=lambda: result.append(engine.epoch(data(40))), name="training"
            )
            thread.start()
            assert hang.waited_for.wait(30)
            now[0] = 59.0
            assert not dog.look()
            now[0] = 61.0
            assert dog.look()
            assert not dog.look()  # once
            now[0] = 121.0
            assert dog.look()  # and once more for each further minute
            dog.pause()
            now[0] = 999.0
            assert not dog.look()
            device.hang = None
            hang.resume()
            thread.join()
            assert result[0].statistics.batches == 40  # it goes on
        text = file.read_text()
        assert text.count("no progress for") == 2
        for part in (
            "no progress for 61 s; last progress: batch 2 of epoch 0",
            "training has been waiting for 'run_ahead'",
            "default has pending work",
            "--- training",
            "engine/streams/run_ahead.py",
        ):
            assert part in text, text
        assert "no progress for 61 s" in told.getvalue()

    def test_it_may_end_the_process(self, device: Device) -> None:
        now, codes = [0.0], []
        dog = Watchdog(
            device, 5, abort=True, clock=lambda: now[0], stream=io.StringIO(), leave=codes.append
        )
        dog.progress("x")
        now[0] = 6.0
        assert dog.look()
        assert codes == [HUNG]

    def test_it_ends_the_process_also_without_a_terminal(self, tmp_path: Path) -> None:
        now, codes, file = [0.0], [], tmp_path / "hang.txt"

        class Gone(io.StringIO):
            def write(self, text: str) -> int:
                raise OSError(5, "Input/output error")

        dog = Watchdog(
            "cpu",
            5,
            file=file,
            abort=True,
            clock=lambda: now[0],
            stream=Gone(),
            leave=codes.append,
        )
        dog.progress("x")
        now[0] = 6.0
        assert dog.look()
        assert codes == [HUNG]
        assert "no progress for 6 s" in file.read_text()

    def test_its_thread_looks_and_ends(self, device: Device, tmp_path: Path) -> None:
        looked = threading.Event()

        class Seen(io.StringIO):
            def write(self, text: str) -> int:
                looked.set()
                return super().write(text)

        with Watchdog(device, 0.001, stream=Seen()) as dog:
            dog.progress("x")
            assert looked.wait(30)
        assert not [t for t in threading.enumerate() if t.name == "headrace-watch"]
        with Watchdog(device, 0) as dog:
            dog.progress("x")
            assert not dog.look()

    def test_a_folder_that_is_gone(
        self, device: Device, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        now = [0.0]
        dog = Watchdog(
            device, 1, file=tmp_path / "no" / "x", clock=lambda: now[0], stream=io.StringIO()
        )
        dog.progress("x")
        now[0] = 2.0
        assert dog.look()
        assert "cannot be written" in caplog.text
