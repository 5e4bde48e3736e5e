"""Where the engine's parts meet: an error, a state or a policy in the midst of another's work."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from headrace.device import Device
from headrace.engine import Engine
from headrace.errors import LoaderError, NonFiniteError
from headrace.fake import FakeDevice
from headrace.plan import Plan
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


def fail_once(engine: Engine, at: int) -> None:
    """Let the optimizer's step number `at` raise, before it does anything."""
    assert engine._builder.parts is not None
    optimizer = engine._builder.parts.optimizer
    real, calls = optimizer.step, iter(range(1, 10_000))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise ZeroDivisionError("once")
        return real(*args, **kwargs)

    optimizer.step = failing  # type: ignore[method-assign]


class TestRandomness:
    @pytest.mark.parametrize("where", ["between epochs", "after an epoch's last batch"])
    def test_a_loader_draws_the_order_that_it_would_have_drawn(
        self, device: Device, where: str
    ) -> None:
        torch.manual_seed(5)
        whole = make_engine(device, deterministic=True)
        torch.manual_seed(6)
        expected = [whole.epoch(shuffled()).losses for _ in range(3)]
        torch.manual_seed(5)
        engine = make_engine(device, deterministic=True)
        torch.manual_seed(6)
        for _ in engine.steps(shuffled()):
            stored = copy.deepcopy(engine.state_dict())
        if where == "between epochs":
            stored = copy.deepcopy(engine.state_dict())
        torch.manual_seed(99)
        other = make_engine(device, deterministic=True)
        other.load_state_dict(stored)
        if where != "between epochs":
            assert other.epoch(shuffled()).statistics.batches == 0
        assert [other.epoch(shuffled()).losses for _ in range(2)] == expected[1:]
        assert same(weights(other), weights(whole))

    def test_before_an_epochs_first_batch(self, device: Device) -> None:
        """The loader has begun, and drawn its order: it draws the same again."""
        stored: list[dict[str, Any]] = []

        def save(problem: BaseException) -> None:
            stored.append(copy.deepcopy(engine.state_dict()))

        def failing(model: Any, batch: Any) -> torch.Tensor:
            raise ZeroDivisionError

        torch.manual_seed(5)
        engine = make_engine(device, deterministic=True, loss=failing, on_error=save)
        torch.manual_seed(6)
        with pytest.raises(ZeroDivisionError):
            engine.epoch(shuffled())
        torch.manual_seed(5)
        whole = make_engine(device, deterministic=True)
        torch.manual_seed(6)
        expected = whole.epoch(shuffled()).losses
        torch.manual_seed(99)
        other = make_engine(device, deterministic=True)
        assert other.load_state_dict(stored[0]) == 0
        assert other.epoch(shuffled()).losses == expected


class TestGroups:
    def test_max_steps_counts_the_group_that_is_open(self, device: Device) -> None:
        engine = make_engine(device, accumulate=4)
        for info in engine.steps(data(16)):
            if info.batch == 1:
                stored = copy.deepcopy(engine.state_dict())
                break
        other = make_engine(device, accumulate=4)
        other.load_state_dict(stored)
        assert other.epoch(data(16), max_steps=2).statistics.batches == 6
        assert other.updates == 2

    @pytest.mark.parametrize("plan", ["pipeline", "streams4", "graph"])
    def test_a_last_update_that_fails_leaks_nothing(self, device: Device, plan: str) -> None:
        options: dict[str, Any] = {"accumulate": 4, "deterministic": True}
        engine = make_engine(device, plan, model=make_model(device, 0.0), **options)
        fail_once(engine, 2)
        with pytest.raises(ZeroDivisionError):
            engine.epoch(data(6))
        engine.epoch(data(8))
        other = make_engine(device, plan, model=make_model(device, 0.0), **options)
        other.epoch(data(4))
        other.epoch(data(8))
        assert same(weights(engine), weights(other))

    def test_a_last_group_that_misses_a_parameter(self, device: Device) -> None:
        """A gradient that a graph keeps at zero is none: the optimizer must not move its weight."""

        def some(model: Any, batch: Any) -> torch.Tensor:
            whole = model(batch[0]) if len(batch[0]) == 5 else model[0](batch[0])
            return whole.square().mean()

        found = []
        for plan in ("pipeline", "graph"):
            engine = make_engine(
                device, plan, model=make_model(device, 0.0), loss=some, accumulate=2
            )
            engine.epoch([*data(20), *data(1, rows=3)])
            found.append(weights(engine))
        assert same(*found)

    def test_fp16_after_an_update_that_failed(self, device: Device) -> None:
        engine = make_engine(device, precision="fp16", clip_norm=1.0)
        fail_once(engine, 2)
        with pytest.raises(ZeroDivisionError):
            engine.epoch(data(3))
        assert engine.epoch(data(3)).statistics.batches == 3

    def test_ctrl_c_in_a_replay_is_no_moment_to_save(self) -> None:
        told: list[BaseException] = []
        with FakeDevice() as device:
            engine = make_engine(device, "graph", on_error=told.append)
            engine.epoch(data(12))
            assert engine.graphs is not None
            assert engine.graphs.replays > 0
            assert engine._builder.parts is not None
            group = engine._builder.parts.group
            gathered = group.end_step

            def interrupted() -> None:
                group.end_step = gathered  # type: ignore[method-assign]
                raise KeyboardInterrupt

            group.end_step = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                engine.epoch(data(12))
        assert told == []  # the weights have moved, and no batch was counted


class TestNonFiniteCounts:
    @pytest.mark.parametrize("plan", ["pipeline", "graph"])
    def test_are_those_of_the_device_after_a_resume(self, device: Device, plan: str) -> None:
        def fresh() -> Engine:
            return make_engine(
                device, plan, model=make_model(device, 0.0), on_nonfinite="tolerate:2"
            )

        engine = fresh()
        engine.epoch(bad_batches(16, 2, 12))
        stored = copy.deepcopy(engine.state_dict())
        other = fresh()
        other.load_state_dict(stored)
        with pytest.raises(NonFiniteError, match="at batch 5 of epoch 2"):
            other.epoch(bad_batches(20, 4))
        other.load_state_dict(stored)  # back again, in the same engine: as many are left
        assert other.epoch(data(4)).statistics.batches == 4

    @pytest.mark.parametrize("plan", ["baseline", "streams4", "pipeline", "graph"])
    @pytest.mark.parametrize("every", [1, 10])
    def test_a_last_partial_group_counts(self, device: Device, plan: str, every: int) -> None:
        engine = make_engine(
            device,
            Plan.preset(plan).replace(deferred_every=every),
            model=make_model(device, 0.0),
            accumulate=4,
            on_nonfinite="tolerate:1",
        )
        result = engine.epoch(bad_batches(6, 5))
        assert len(result.losses) == 6
        with pytest.raises(NonFiniteError, match="loss not finite at batch 6 of epoch 2; 1 such"):
            engine.epoch(bad_batches(6, 5))


class TestLoaders:
    def test_keep_their_state_under_max_steps(self, device: Device) -> None:
        engine, loader = make_engine(device), Stateful(data(13))
        for info in engine.steps(loader, max_steps=8):
            if info.batch == 4:
                stored = copy.deepcopy(engine.state_dict())
                break
        assert stored["loader"] == {"at": 5}
        other, again = make_engine(device), Stateful(data(13))
        other.load_state_dict(stored)
        assert other.epoch(again, max_steps=3).statistics.batches == 3
        assert again.at == 8

    def test_one_that_was_only_late_leaves_no_thread(self, device: Device) -> None:
        goes_on, ended = threading.Event(), threading.Event()

        def late() -> Iterator[Any]:
            try:
                yield data(1)[0]
                goes_on.wait(60)
                yield data(1)[0]
            finally:
                ended.set()

        engine = make_engine(device, loader_timeout=0.05)
        with pytest.raises(LoaderError, match=r"waiting for batch 2 of this pass"):
            engine.epoch(late())
        threads = [thread for thread in threading.enumerate() if thread.name == "headrace-loader"]
        goes_on.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert ended.is_set()


def test_a_module_that_is_frozen_stays_so(device: Device) -> None:
    model = make_model(device, 0.0)
    frozen = next(iter(model.children()))
    frozen.eval()
    engine = make_engine(device, model=model)
    engine.evaluate(data(2))
    assert [module.training for module in model.modules()] == [
        module is not frozen for module in model.modules()
    ]


def test_the_scalers_state_is_a_wait_in_the_ledger(device: Device) -> None:
    engine = make_engine(device, precision="fp16")
    engine.epoch(data(2))
    engine.state_dict()
    assert device.ledger.statistics()["scaler_state"].count == 1


# --- anything, anywhere ---------------------------------------------------------------------------


class BreakError(Exception):
    """What the tests raise."""


def options_of(draw: Any) -> dict[str, Any]:
    return {
        "accumulate": draw(st.sampled_from([1, 2, 3])),
        "on_nonfinite": draw(st.sampled_from(["report", "skip", "tolerate:30"])),
        "precision": draw(st.sampled_from(["fp32", "fp32", "fp16"])),
        "ema_decay": draw(st.sampled_from([None, 0.9])),
        "clip_norm": draw(st.sampled_from([None, 1.0])),
    }


def everything(engine: Engine) -> list[torch.Tensor]:
    averages = [] if engine.ema is None else [average.clone() for average in engine.ema.averages]
    return [*weights(engine), *averages]


def fresh(device: Device, plan: str, options: dict[str, Any], **more: Any) -> Engine:
    torch.manual_seed(3)
    made = make_engine(device, plan, deterministic=True, **options, **more)
    torch.manual_seed(4)
    return made


@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(draws=st.data(), plan=st.sampled_from([*EAGER, "graph"]), bad=st.sets(st.integers(0, 13)))
def test_a_state_from_anywhere_goes_on_bit_for_bit(draws: Any, plan: str, bad: set[int]) -> None:
    """With averages, a scaler, skipped updates and graphs; evaluated or not in between."""
    options, batches = options_of(draws.draw), bad_batches(14, *bad)
    at = draws.draw(st.integers(0, 13))
    evaluates, elsewhere = draws.draw(st.booleans()), draws.draw(st.booleans())
    with FakeDevice() as device:
        whole = fresh(device, plan, options)
        expected = [*whole.epoch(batches).losses, *whole.epoch(data(5)).losses]
        engine = fresh(device, plan, options)
        seen: list[float] = []
        for info in engine.steps(batches):
            seen += [entry.values["loss"] for entry in info.arrived]
            if info.batch == at:
                stored = copy.deepcopy(engine.state_dict())
                if evaluates:
                    engine.evaluate(data(2))
                break
        torch.manual_seed(99)
        other = fresh(device, plan, options) if elsewhere else engine
        other.load_state_dict(stored)
        seen += [*other.epoch(batches).losses, *other.epoch(data(5)).losses]
        assert repr(seen) == repr(expected)  # NaN is NaN
        for one, two in zip(everything(other), everything(whole), strict=True):
            assert torch.equal(one, two) or (one.isnan() == two.isnan()).all()


@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    draws=st.data(),
    plan=st.sampled_from([*EAGER, "graph"]),
    where=st.sampled_from(["loader", "loss", "backward", "on_step", "left", "max_steps"]),
)
def test_every_batch_once_whatever_ends_the_loop(draws: Any, plan: str, where: str) -> None:
    """What is reported, and what was learned, is that of the batches before."""
    options, at = options_of(draws.draw), draws.draw(st.integers(0, 13))
    if options["precision"] == "fp16":
        options["precision"] = "bf16"
    if plan == "graph" and where in ("loss", "backward"):
        where = "loader"  # a replay calls no loss function
    batches, count = data(14), iter(range(100))

    def loader() -> Iterator[Any]:
        for index, batch in enumerate(batches):
            if where == "loader" and index == at:
                raise BreakError
            yield batch

    def raising(model: Any, batch: Any) -> torch.Tensor:
        fails = where in ("loss", "backward") and next(count) == at
        if fails and where == "loss":
            raise BreakError
        value = loss(model, batch)
        if fails:
            value.register_hook(_raise)
        return value

    def on_step(info: Any) -> None:
        if where == "on_step" and info.batch == at:
            raise BreakError

    with FakeDevice() as device:
        engine = fresh(device, plan, options, loss=raising, on_step=on_step)
        try:
            if where == "left":
                for info in engine.steps(loader()):
                    if info.batch == at:
                        break
            else:
                engine.epoch(loader(), max_steps=at + 1 if where == "max_steps" else None)
        except BreakError:
            assert where in ("loader", "loss", "backward", "on_step")
        assert engine.last_result is not None
        found = engine.last_result.losses
        accumulate = options["accumulate"]
        ended = at + 1 if where in ("on_step", "left") else at
        if where == "max_steps":
            ended = min(14, (at + 1) * accumulate)
        assert len(found) == ended
        torn = where == "backward"  # takes the group with it
        kept = ended - ended % accumulate if torn else ended
        other = fresh(device, plan, options)
        other.epoch(batches[:kept])
        assert found[:kept] == other.last_result.losses  # type: ignore[union-attr]
        assert same(everything(engine), everything(other))
        assert device.pinned.lent == 0
        engine.on_step = None
        engine.epoch(data(3))  # and it can be used on
        assert engine.last_result.statistics.batches == 3


def _raise(gradient: torch.Tensor) -> None:
    raise BreakError


@pytest.mark.parametrize("plan", EAGER)
@pytest.mark.parametrize("policy", ["report", "skip"])
@pytest.mark.parametrize("settles", [False, True])
def test_a_state_after_a_backward_that_failed_is_that_before_its_batch(
    plan: str, policy: str, settles: bool
) -> None:
    """No gradients of others were lost with it: nothing is, and its loss is not reported twice."""
    batches, count, kept = data(14), iter(range(100)), []

    def raising(model: Any, batch: Any) -> torch.Tensor:
        value = loss(model, batch)
        if next(count) == 7:
            value.register_hook(_raise)
        return value

    options = {"on_nonfinite": policy}
    with FakeDevice() as device:
        reported: list[float] = []

        def rescue(problem: BaseException) -> None:
            if settles:
                reported.extend(entry.values["loss"] for entry in engine.settle())
            kept.append(copy.deepcopy(engine.state_dict()))

        def note(info: Any) -> None:
            reported.extend(entry.values["loss"] for entry in info.arrived)

        engine = fresh(device, plan, options, loss=raising, on_error=rescue, on_step=note)
        with pytest.raises(BreakError):
            engine.epoch(batches)
        other = fresh(device, plan, options)
        assert other.load_state_dict(kept[0]) == 7
        found = other.epoch(batches).losses
        whole = fresh(device, plan, options)
        assert [*reported, *found] == list(whole.epoch(batches).losses)
        assert same(everything(other), everything(whole))
