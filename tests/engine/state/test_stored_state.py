"""An engine that is stopped, stored and restored continues as if it had never stopped."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.device import Device, open_device
from headrace.engine import Engine
from headrace.errors import StepError
from headrace.fake import Costs, FakeDevice
from support.training.engines import EAGER, data, loss, make_model, same, weights
from support.training.scheduled_engines import BATCHES, make, uninterrupted


def clone(state: Any) -> Any:
    return copy.deepcopy(state)


def interrupted(device: Device, plan: str, epochs: int, at: int, **options: Any) -> Any:
    """Train, stop after `at` batches in all, and continue in another engine."""
    torch.manual_seed(3)
    engine = make(device, plan, **options)
    torch.manual_seed(4)
    losses: list[float] = []
    stored = None
    while stored is None:
        values: list[float] = []
        for info in engine.steps(BATCHES):
            values += [entry.values["loss"] for entry in info.arrived]
            if info.epoch * len(BATCHES) + info.batch + 1 == at:
                values += [entry.values["loss"] for entry in engine.settle()]
                stored = clone(engine.state_dict())
                break
        if stored is None:
            assert engine.last_result is not None
            values = list(engine.last_result.losses)
        losses += values
    torch.manual_seed(99)  # another process has other random states
    random.seed(99)
    numpy.random.seed(99)
    other = make(device, plan, **options)
    done = other.load_state_dict(stored)
    assert other.epochs * len(BATCHES) + done == at
    while other.epochs < epochs:
        result = other.epoch(BATCHES[done:], first_batch=done)
        losses += result.losses
        done = 0
    return losses, weights(other), other


class TestResume:
    @pytest.mark.unsanitized
    @pytest.mark.parametrize("accumulate", [1, 3])
    @pytest.mark.parametrize("plan", [*EAGER, "graph"])
    def test_as_if_it_had_never_stopped(self, device: Device, plan: str, accumulate: int) -> None:
        expected = uninterrupted(device, plan, 3, accumulate=accumulate)
        found = interrupted(device, plan, 3, at=17, accumulate=accumulate)
        assert found[0] == expected[0]
        assert same(found[1], expected[1])
        for one, other in zip(found[2].ema.averages, expected[2].ema.averages, strict=True):
            assert torch.equal(one, other)

    @settings(max_examples=20, deadline=None)
    @given(at=st.integers(1, 25), plan=st.sampled_from(["pipeline", "event", "graph"]))
    def test_wherever_training_stops(self, at: int, plan: str) -> None:
        if at % len(BATCHES) == 0:
            at += 1  # an epoch's last batch is not followed by a step of the same loop
        expected = uninterrupted(open_device("cpu"), plan, 2, accumulate=1)
        found = interrupted(open_device("cpu"), plan, 2, at=at, accumulate=1)
        assert found[0] == expected[0]
        assert same(found[1], expected[1])

    def test_under_another_plan(self) -> None:
        with FakeDevice() as device:
            expected = uninterrupted(device, "pipeline", 2)
            first = make(device, "graph")
            torch.manual_seed(4)
            first.epoch(BATCHES)
            stored = clone(first.state_dict())
            other = make(device, "event")
            assert other.load_state_dict(stored) == 0
            losses = other.epoch(BATCHES).losses
        assert list(losses) == expected[0][len(BATCHES) :]

    def test_fp16_scaling_is_part_of_the_state(self, device: Device) -> None:
        engine = make(device, "pipeline", precision="fp16")
        engine.epoch(BATCHES[:3])
        state = clone(engine.state_dict())
        assert state["scaler"]["scale"] > 0
        other = make(device, "pipeline", precision="fp16")
        other.load_state_dict(state)
        assert other.state_dict()["scaler"] == state["scaler"]


class TestPosition:
    def test_batches_are_numbered_from_first_batch_on(self, device: Device) -> None:
        engine = make(device, "pipeline")
        seen = [info.batch for info in engine.steps(BATCHES[5:], first_batch=5)]
        assert seen == list(range(5, 13))
        assert engine.last_result is not None
        assert len(engine.last_result.losses) == 8

    def test_the_state_counts_batches_trained_on(self, device: Device) -> None:
        """Not those that were prefetched."""
        asked = []

        def loader() -> Iterator[Any]:
            for index, batch in enumerate(BATCHES):
                asked.append(index)
                yield batch

        engine = make(device, "pipeline")
        for info in engine.steps(loader()):
            if info.batch == 4:
                assert engine.state_dict()["batch"] == 5
                assert len(asked) > 5
                break


class TestBadState:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("random", {"host": 1}),
            ("random_at_start", {"host": torch.zeros(3)}),
            ("drawn_ahead", [{}]),
            ("drawn_ahead", 3),
            ("drawn_last", {}),
            ("generators", [{"seed": 1, "state": torch.zeros(2)}]),
            ("epoch_loss", "xy"),
            ("epoch_loss", [1.0]),
            ("skipped_updates", None),
            ("deferred", [{"steps": [1], "numbers": [], "names": [], "rows": None}]),
            ("deferred", [{"steps": [1], "numbers": [{}], "names": ["a"], "rows": torch.ones(2)}]),
        ],
    )
    def test_a_mistake_in_a_part_that_only_a_pass_needs(
        self, device: Device, name: str, value: object
    ) -> None:
        """Loading the state is refused, and leaves the random generators as they were."""
        engine = make(device, "pipeline")
        next(steps := engine.steps(BATCHES))
        state = clone(engine.state_dict())
        steps.close()
        torch.manual_seed(7)
        with pytest.raises(StepError, match="the stored state does not fit this engine"):
            make(device, "pipeline").load_state_dict(state | {name: value})
        found = torch.rand(2)
        torch.manual_seed(7)
        make(device, "pipeline")
        assert torch.equal(found, torch.rand(2))

    def test_the_values_of_an_open_group_may_be_read_at_once(self) -> None:
        """They are put together on the engine's stream, and the caller reads them on its own."""
        with FakeDevice() as device:
            engine = make(device, "streams4", accumulate=2, on_nonfinite="skip")
            for _ in engine.steps(BATCHES):
                stored = clone(engine.state_dict())
                break
        assert stored["deferred"][-1]["names"] == ["loss", "skipped"]

    def test_a_state_that_is_not_an_engines(self, device: Device) -> None:
        engine = make(device, "pipeline")
        with pytest.raises(StepError, match="not an engine's state of format 1: found None"):
            engine.load_state_dict({"model": {}})

    def test_a_state_of_an_engine_with_other_parts(self, device: Device) -> None:
        state = clone(make(device, "pipeline").state_dict())
        model = make_model(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine = Engine(model, optimizer, loss, device=device)
        with pytest.raises(StepError, match="scheduler: this engine has none, the stored state"):
            engine.load_state_dict(state)

    def test_an_engine_made_from_a_step_has_no_state(self, device: Device) -> None:
        engine = Engine.from_step(lambda batch: None, device=device)
        with pytest.raises(StepError, match="from_step has no state"):
            engine.state_dict()


def test_a_state_may_be_loaded_more_than_once(device: Device) -> None:
    """Training does not change a loaded state, so a run can return to it again."""
    model = make_model(device, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    engine = Engine(model, optimizer, loss, plan="pipeline", device=device)
    engine.epoch(data(3))
    state = copy.deepcopy(engine.state_dict())
    found = []
    for _ in range(3):
        engine.load_state_dict(state)
        found.append(engine.epoch(data(4)).losses)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("accumulate", [1, 3, 4, 5])
def test_a_group_fuller_than_accumulate_is_refused(device: Device, accumulate: int) -> None:
    model = make_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, optimizer, loss, device=device, accumulate=4)
    for info in engine.steps(data(8)):
        if info.batch == 2:
            state = copy.deepcopy(engine.state_dict())
            break
    other = Engine(model, optimizer, loss, device=device, accumulate=accumulate)
    if accumulate > 3:
        assert other.load_state_dict(state) == 3
        return
    with pytest.raises(StepError, match=f"3 batches into a group: accumulate = {accumulate}"):
        other.load_state_dict(state)


def test_rates_do_not_count_batches_before_the_resume() -> None:
    """The values that a stored state had not handed out yet took their time earlier."""

    def weighted(model: torch.nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": loss(model, batch), "weight": 3}

    with FakeDevice(costs=Costs(kernel_us=1000, by_name={})) as device:
        model = make_model(device)
        options: dict[str, Any] = {"plan": "pipeline", "device": device}
        engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), weighted, **options)
        for info in engine.steps(data(9)):
            if info.batch == 6:
                state = copy.deepcopy(engine.state_dict())
                break
        assert sum(len(block["steps"]) for block in state["deferred"]) == 7
        engine.load_state_dict(state)
        result = engine.epoch(data(9)[7:], first_batch=7)
    assert len(result.losses) == 9
    figures = result.statistics
    assert figures.weight_per_s == pytest.approx(2 * 3 / figures.elapsed_s)
