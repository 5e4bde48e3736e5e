"""A state that is taken when something went wrong, or in the midst of something, has all of it."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace.data.timed_iterator import TimedIterator
from headrace.device import Device, open_device
from headrace.engine import Engine, Progress
from headrace.engine.step.restoring import SavedBuffers
from headrace.engine.values.block import Block
from headrace.errors import NonFiniteError
from headrace.fake import FakeDevice
from support.training.engines import bad_batches, data, loss, make_engine, make_model, same, weights
from support.training.loaders import BATCHES, BoomError, OwnEpochs
from support.training.resumed_engines import losses_of, new, pending_in


def rescued(
    device: Device, batches: list[Any], expected: type[Exception], **options: Any
) -> tuple[list[int], Any]:
    """The batches whose values came back until an error, and the state that `on_error` saw."""
    kept: list[Any] = []
    seen: list[int] = []

    def keep(problem: BaseException) -> None:
        assert isinstance(problem, expected)
        kept.append(copy.deepcopy(engine.state_dict()))

    engine = new(device, model=make_model(device, 0.0), on_error=keep, **options)
    engine.on_step = lambda info: seen.extend(entry.step for entry in info.arrived)
    with pytest.raises(expected):
        engine.epoch(batches)
    return seen, kept[0]


def struck_at(device: Device, moment: int) -> list[Any]:
    """The state that `on_error` saw, if it was called, after an error before that line of all that
    the loop runs."""
    kept: list[Any] = []
    lines = [0]

    def strike(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith("/loop.py"):
            return None
        lines[0] += event == "line"
        if event == "line" and lines[0] == moment:
            sys.settrace(None)
            raise BoomError
        return strike

    engine = new(device, on_error=lambda problem: kept.append(engine.state_dict()))
    before = sys.gettrace()
    sys.settrace(strike)
    try:
        with contextlib.suppress(BoomError):
            engine.epoch(OwnEpochs())
    finally:
        sys.settrace(before)
    return kept


class TestInOnStep:
    @pytest.mark.parametrize("plan", ["baseline", "interval", "streams4", "pipeline", "graph"])
    def test_a_state_may_be_taken(self, device: Device, plan: str) -> None:
        expected = losses_of(new(device, plan), data(BATCHES), 2)
        kept: list[Any] = []
        seen: list[float] = []

        def take(info: Progress) -> None:
            if not kept:
                seen.extend(entry.values["loss"] for entry in info.arrived)
            if info.batch == 3 and not kept:
                kept.append(copy.deepcopy(engine.state_dict()))

        engine = new(device, plan)
        engine.on_step = take
        engine.epoch(data(BATCHES))
        other = new(device, plan)
        other.load_state_dict(kept[0])
        assert seen + losses_of(other, data(BATCHES), 2) == expected


class TestAfterAnError:
    def test_losses_that_ended_the_loop_are_in_the_state(self, device: Device) -> None:
        seen, stored = rescued(device, bad_batches(60, 12), NonFiniteError, on_nonfinite="stop")
        assert seen + pending_in(stored) == list(range(stored["batch"]))
        other = new(device, model=make_model(device, 0.0), on_nonfinite="stop")
        other.load_state_dict(stored)
        with pytest.raises(NonFiniteError, match="batch 13 of epoch 1"):
            other.epoch(bad_batches(60, 12))

    def test_a_loss_that_ended_the_callers_loop_ends_it_once(self, device: Device) -> None:
        engine = new(device, model=make_model(device, 0.0), on_nonfinite="stop")
        steps = engine.steps(bad_batches(60, 2))
        while next(steps).batch < 4:
            pass
        with pytest.raises(NonFiniteError, match="batch 3"):
            engine.settle()
        assert pending_in(engine.state_dict()) == [0, 1, 2, 3, 4]
        steps.close()  # the loop is left, without the same error once more
        assert engine.last_result is not None
        assert len(engine.last_result.losses) == 5

    @pytest.mark.parametrize("name", ["send", "read"])
    def test_a_copy_that_failed_keeps_its_losses(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The values of ten batches are sent on their way, or come back, which fails once."""
        plain = getattr(Block, name)

        def failing(*args: Any) -> Any:
            monkeypatch.setattr(Block, name, plain)
            raise BoomError

        with FakeDevice() as device:
            monkeypatch.setattr(Block, name, failing)
            seen, stored = rescued(device, data(25), BoomError)
        assert (seen, pending_in(stored)) == ([], list(range(stored["batch"])))

    @pytest.mark.parametrize("plan", ["baseline", "pipeline", "streams4", "graph"])
    @pytest.mark.parametrize("fails_in", ["forward", "backward"])
    @pytest.mark.parametrize("at", [0, 7])
    def test_batch_norm_is_as_before_the_failed_batch(
        self, device: Device, plan: str, fails_in: str, at: int
    ) -> None:
        def normed() -> torch.nn.Module:
            torch.manual_seed(0)
            layers = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3)
            return torch.nn.Sequential(*layers).to(device.torch_device)

        def fail(gradient: torch.Tensor) -> None:
            raise BoomError

        def failing(model: Any, batch: Any) -> torch.Tensor:
            value = loss(model, batch)
            if len(batch[0]) == 4:  # of a shape of its own: no graph's
                if fails_in == "forward":
                    raise BoomError
                value.register_hook(fail)
            return value

        kept: list[Any] = []
        batches = data(14)
        broken = [*batches[:at], tuple(part[:4] for part in batches[at])]
        engine = new(
            device,
            plan,
            model=normed(),
            loss=failing,
            on_error=lambda problem: kept.append(copy.deepcopy(engine.state_dict())),
        )
        with pytest.raises(BoomError):
            engine.epoch(broken)
        other, whole = new(device, plan, model=normed()), new(device, plan, model=normed())
        other.load_state_dict(kept[0])
        other.epoch(batches)
        whole.epoch(batches)
        assert same(weights(other), weights(whole))
        found, expected = other.model.state_dict(), whole.model.state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)

    def test_the_loaders_state_is_that_of_the_count_at_any_moment(self) -> None:
        """An error strikes between any two lines of the loop."""
        device = open_device("cpu")
        told = [state for at in range(80, 330) for state in struck_at(device, at)]
        assert len(told) > 30
        assert all(state["loader"]["at"] == state["batch"] for state in told)

    def test_ctrl_c_while_a_loader_draws_in_its_thread(self) -> None:
        """It goes on until it sees that nobody waits any more: what it draws is drawn again."""
        device, may_draw, has_drawn = open_device("cpu"), threading.Event(), threading.Event()

        class Drawing:
            def __iter__(self) -> Iterator[Any]:
                for at, (features, labels) in enumerate(data(BATCHES)):
                    if at == 4 and interrupted:
                        may_draw.wait(30)
                    noise = torch.randn(features.shape)
                    if at == 4:
                        has_drawn.set()
                    yield features + 0.1 * noise, labels

        interrupted = False
        expected = losses_of(new(device, "baseline"), Drawing(), 1)
        interrupted, kept = True, []
        has_drawn.clear()

        def keep(problem: BaseException) -> None:
            may_draw.set()
            assert has_drawn.wait(30)
            kept.append(copy.deepcopy(engine.state_dict()))

        seen: list[float] = []
        engine = new(device, "baseline", on_error=keep, loader_timeout=60)
        engine.on_step = lambda info: seen.extend(e.values["loss"] for e in info.arrived)
        plain = TimedIterator.__next__

        def interrupting(self: TimedIterator) -> Any:
            if self._received == 4:
                self._requests.put(self._device.current_stream())
                raise KeyboardInterrupt
            return plain(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TimedIterator, "__next__", interrupting)
            with pytest.raises(KeyboardInterrupt):
                engine.epoch(Drawing())
        interrupted = False
        other = new(device, "baseline")
        other.load_state_dict(kept[0])
        assert seen + losses_of(other, Drawing(), 1) == expected

    def test_a_loaders_error_leaves_nothing_behind(self, device: Device) -> None:
        """No cycle that only a garbage collection would find."""

        class Failing:
            def __iter__(self) -> Iterator[Any]:
                yield data(1)[0]
                raise BoomError

        loader = Failing()
        alive = weakref.ref(loader)
        engine = new(device)
        with pytest.raises(BoomError):
            engine.epoch(loader)
        del loader
        assert alive() is None

    def test_a_buffer_that_is_replaced_cannot_go_back(self, device: Device) -> None:
        class Counting(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = make_model(device, 0.0)
                self.register_buffer("calls", torch.zeros((), device=device.torch_device))

            def forward(self, features: torch.Tensor) -> Any:
                self.calls = self.calls + 1  # another tensor each time
                return self.inner(features)

        called: list[Any] = []

        def failing(model: Any, batch: Any) -> torch.Tensor:
            value = loss(model, batch)
            if len(batch[0]) == 4:
                raise BoomError
            return value

        engine = new(device, model=Counting(), loss=failing, on_error=called.append)
        with pytest.raises(BoomError):
            engine.epoch([*data(3), tuple(part[:4] for part in data(1)[0])])
        assert not called  # its state is not that before the batch


class TestBuffers:
    def test_only_what_changes_is_copied(self) -> None:
        """All before an epoch's first batch, then batch norm's, and what was seen to change."""

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = torch.nn.BatchNorm1d(2)
                self.register_buffer("mask", torch.ones(3))
                self.register_buffer("late", torch.zeros(3))

        model = Model()
        saved = SavedBuffers(model)
        saved.save()
        assert len(saved._copies) == 5
        model.norm(torch.randn(4, 2))
        saved.save()
        assert len(saved._copies) == 3
        model.late.add_(1)  # type: ignore[operator]
        assert not saved.restore()  # it was not saved
        saved.save()
        model.late.add_(1)  # type: ignore[operator]
        saved.save()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model.late.add_(1)  # type: ignore[operator]
        model.norm(torch.randn(4, 2))
        assert saved.restore()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class TestGates:
    @pytest.mark.parametrize("at", [4, 5])
    def test_more_than_is_tolerated_among_values_not_yet_reported(
        self, device: Device, at: int
    ) -> None:
        def made() -> Engine:
            return new(device, model=make_model(device, 0.0), on_nonfinite="tolerate:1")

        engine, batches = made(), bad_batches(7, 2, 3)
        steps = engine.steps(batches)
        while next(steps).batch < at:
            pass
        stored = copy.deepcopy(engine.state_dict())
        with pytest.raises(NonFiniteError):
            steps.close()
        other = made()
        other.load_state_dict(stored)
        with pytest.raises(NonFiniteError, match="batch 4 of epoch 1; 1 such"):
            other.epoch(batches)

    def test_fp16_counts_from_the_state_on(self) -> None:
        device = open_device("cpu")

        def made() -> Engine:
            model = make_model(device, 0.0)
            return new(device, model=model, precision="fp16", on_nonfinite="tolerate:1")

        engine, stored = made(), None
        for info in engine.steps(bad_batches(12, 2)):
            if info.batch == 4:
                engine.settle()
                stored = copy.deepcopy(engine.state_dict())
                break
        assert stored is not None
        assert stored["skipped_updates"] == 1
        engine.load_state_dict(stored)  # the same engine again: not counted twice
        assert len(engine.epoch(bad_batches(12, 2)).losses) == 7
        other = made()
        other.load_state_dict(stored)  # another: not forgotten
        with pytest.raises(NonFiniteError):
            other.epoch(bad_batches(12, 2, 8))

    def test_halving_takes_back_what_a_failed_batch_showed(self, device: Device) -> None:
        def fail(gradient: torch.Tensor) -> None:
            raise BoomError

        def failing(model: Any, batch: Any) -> torch.Tensor:
            value = loss(model, batch)
            if len(batch[0]) == 4:
                value = value * float("nan")
                value.register_hook(fail)
            return value

        engine = new(
            device,
            model=make_model(device, 0.0),
            loss=failing,
            on_oom="halve",
            on_nonfinite="skip",
        )
        with pytest.raises(BoomError):
            engine.epoch([*data(3), tuple(part[:4] for part in data(1)[0])])
        assert engine.epoch(data(3)).metrics["skipped"] == 0


class TestGroups:
    @pytest.mark.parametrize("plan", ["pipeline", "graph"])
    @pytest.mark.parametrize("other_plan", ["pipeline", "graph"])
    def test_gradients_that_no_batch_gave_are_not_stored_as_zeros(
        self, device: Device, plan: str, other_plan: str
    ) -> None:
        """A graph keeps the memory of all gradients; an optimizer moves a parameter whose gradient
        is zero, and leaves one alone that has none."""

        def some(model: Any, batch: Any) -> torch.Tensor:
            whole = model(batch[0]) if len(batch[0]) == 5 else model[0](batch[0])
            return whole.square().mean()

        def made(name: str) -> Engine:
            model = make_model(device, 0.0)
            return new(device, name, model=model, loss=some, accumulate=2)

        batches = [*data(20), *data(2, rows=3), *data(2)]
        whole = made(other_plan)
        whole.epoch(batches)
        engine = made(plan)
        for info in engine.steps(batches):
            if info.batch == 20:
                stored = copy.deepcopy(engine.state_dict())
                break
        assert stored["step"]["gradients"].count(None) == 2
        other = made(other_plan)
        other.load_state_dict(stored)
        other.epoch(batches)
        assert same(weights(other), weights(whole))

    def test_no_steps_leave_an_open_group_as_it_is(self, device: Device) -> None:
        engine = new(device, accumulate=4)
        for info in engine.steps(data(16)):
            if info.batch == 1:
                stored = copy.deepcopy(engine.state_dict())
                break
        other = new(device, accumulate=4)
        other.load_state_dict(stored)
        assert other.epoch(data(16), max_steps=0).statistics.batches == 0
        assert other.updates == 0


@pytest.mark.parametrize("leaves", ["break", "leave"])
def test_a_last_update_that_fails_leaves_no_open_group(device: Device, leaves: str) -> None:
    """The loop is left inside a group, whose update then fails: the group is gone, and the next
    epoch begins with a new one."""
    engine = make_engine(device, model=make_model(device, 0.0), accumulate=4)
    optimizer = engine._builder.parts.optimizer  # type: ignore[union-attr]
    real = optimizer.step

    def failing(*args: Any, **options: Any) -> None:
        optimizer.step = real  # type: ignore[method-assign]
        raise BoomError

    optimizer.step = failing  # type: ignore[method-assign]
    steps = engine.steps(data(8))
    assert [next(steps).batches, next(steps).batches] == [1, 2]
    with pytest.raises(BoomError):
        engine.leave() if leaves == "leave" else steps.close()
    steps.close()
    assert engine.is_between_updates
    before = engine.updates
    assert engine.epoch(data(8)).statistics.updates == engine.updates - before == 2
