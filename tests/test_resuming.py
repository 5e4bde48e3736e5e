"""What a restored engine takes up again: loaders of all kinds, what they drew, and the epoch's
sums; and that a state taken after an error has all of it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import data, loss, make_engine, make_model, same, weights
from test_faults import bad_batches
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from headrace.buffers import KeptBuffers
from headrace.checkpoint import CheckpointWriter, latest_checkpoint, load_checkpoint
from headrace.deferred import _Block
from headrace.device import Device, open_device
from headrace.engine import Engine
from headrace.errors import NonFiniteError, StepError
from headrace.plan import Plan
from headrace.randomstates import host_states, set_host_states
from headrace.testing import FakeDevice

BATCHES = 10
Loaders = Callable[[], Any]


class BoomError(Exception):
    pass


def pairs() -> TensorDataset:
    features, labels = (torch.cat([batch[at] for batch in data(BATCHES)]) for at in (0, 1))
    return TensorDataset(features, labels)


class Augmented(Dataset[Any]):
    """Draws from all of the host's generators, in whatever process it is."""

    def __init__(self) -> None:
        self._pairs = pairs()

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, at: int) -> Any:
        features, label = self._pairs[at]
        noise = random.random() + numpy.random.randn() + torch.rand(())
        return features + 0.1 * float(noise), label


class OwnEpochs:
    """A loader that keeps its own state, and goes on to its next epoch by itself."""

    def __init__(self) -> None:
        self.epoch = self.at = 0

    def __iter__(self) -> Iterator[Any]:
        draw = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(BATCHES, generator=draw).tolist()
        batches = data(BATCHES)
        while self.at < BATCHES:
            self.at += 1
            yield batches[order[self.at - 1]]
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


def own_generator() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(7)
    return DataLoader(pairs(), batch_size=5, shuffle=True, generator=draw)


def samplers_generator() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(8)
    return DataLoader(pairs(), batch_size=5, sampler=RandomSampler(pairs(), generator=draw))


def augmented() -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=5, shuffle=True)


def generated() -> Any:
    """No DataLoader: a class with a generator, which draws."""

    class Drawn:
        def __iter__(self) -> Iterator[Any]:
            for features, labels in data(BATCHES):
                yield features + 0.1 * torch.randn(features.shape), labels

    return Drawn()


LOADERS = [own_generator, samplers_generator, augmented, generated, OwnEpochs]


def seeded(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def new(device: Device, plan: str | Plan = "pipeline", **options: Any) -> Engine:
    """An engine whose model draws dropout's masks."""
    seeded(3)
    engine = make_engine(device, plan, deterministic=True, **options)
    seeded(4)
    return engine


def losses_of(engine: Engine, loader: Any, epochs: int) -> list[float]:
    return [one for _ in range(epochs) for one in engine.epoch(loader).losses]


def stopped(engine: Engine, loader: Any, at: int) -> tuple[list[float], Any]:
    """The losses that came back so far, and the state, after batch `at` of all."""
    seen: list[float] = []
    while engine.epochs < at // BATCHES:
        seen += engine.epoch(loader).losses
    if at % BATCHES == 0:
        return seen, copy.deepcopy(engine.state_dict())
    for info in engine.steps(loader):
        seen += [entry.values["loss"] for entry in info.come_back]
        if info.batch + 1 == at % BATCHES:
            return seen, copy.deepcopy(engine.state_dict())
    raise AssertionError("not reached")


class Steps:
    """So many steps of an engine: then it is in the midst of them, unless the epoch has ended."""

    def __init__(self, engine: Engine, loader: Any, most: int) -> None:
        self.losses: list[float] = []
        self._steps = engine.steps(loader)
        for _ in range(most):
            info = next(self._steps, None)
            if info is None:
                assert engine.last_result is not None
                self.losses = list(engine.last_result.losses)
                break
            self.losses += [entry.values["loss"] for entry in info.come_back]


class TestLoaders:
    @pytest.mark.parametrize("loader", LOADERS)
    @pytest.mark.parametrize("plan", ["baseline", "pipeline", "streams4"])
    @pytest.mark.parametrize("at", [3, 9, 10, 14])
    def test_in_a_new_process(self, device: Device, plan: str, loader: Loaders, at: int) -> None:
        """In the midst of an epoch, and between two: order and noise are those of a run that was
        not interrupted, and so are dropout's masks, which a CPU draws from the same generator."""
        whole = new(device, plan)
        expected = losses_of(whole, loader(), 3)
        seen, stored = stopped(new(device, plan), loader(), at)
        other, again = new(device, plan), loader()
        seeded(99)
        other.load_state_dict(stored)
        while other.epochs < 3:
            seen += other.epoch(again).losses
        assert seen == expected
        assert same(weights(other), weights(whole))

    def test_what_workers_draw(self) -> None:
        """They are seeded when the loader begins, and load what came before once more."""

        def workers() -> DataLoader[Any]:
            context = torch.multiprocessing.get_context("fork")
            return DataLoader(
                Augmented(),
                batch_size=5,
                shuffle=True,
                num_workers=2,
                multiprocessing_context=context,
            )

        device = open_device("cpu")
        expected = losses_of(new(device), workers(), 2)
        seen, stored = stopped(new(device), workers(), 14)
        other = new(device)
        seeded(99)
        other.load_state_dict(stored)
        assert seen + losses_of(other, workers(), 1) == expected

    @pytest.mark.parametrize("loader", LOADERS)
    def test_in_the_same_engine_and_loader(self, device: Device, loader: Loaders) -> None:
        whole, one = new(device), loader()
        expected = losses_of(whole, one, 2)
        engine, one = new(device), loader()
        seen, stored = stopped(engine, one, 6)
        one = loader() if isinstance(one, OwnEpochs) else one  # such a one is not to be rolled back
        engine.load_state_dict(stored)
        assert seen + losses_of(engine, one, 2) == expected

    @settings(deadline=None, max_examples=25)
    @given(
        at=st.integers(1, 19),
        depth=st.integers(0, 3),
        other_depth=st.integers(0, 3),
        again=st.integers(1, 6),
    )
    def test_what_was_fetched_ahead_is_drawn_again(
        self, at: int, depth: int, other_depth: int, again: int
    ) -> None:
        """Also if more was fetched ahead than is now, and if it is stopped once more before all of
        that was trained on. Without dropout the device's draws are not the loader's."""

        def made(ahead: int) -> Engine:
            plan = Plan.preset("pipeline").but(prefetch_depth=ahead)
            return new(device, plan, model=make_model(device, 0.0))

        with FakeDevice() as device:
            expected = losses_of(made(depth), augmented(), 2)
            seen, stored = stopped(made(depth), augmented(), at)
            between = made(other_depth)
            seeded(98)
            between.load_state_dict(stored)
            steps = Steps(between, augmented(), again)
            seen += steps.losses
            stored = copy.deepcopy(between.state_dict())
            last = made(depth)
            seeded(99)
            last.load_state_dict(stored)
            while last.epochs < 2:
                seen += last.epoch(augmented()).losses
            assert seen == expected

    def test_another_number_of_generators_is_said(
        self, device: Device, caplog: pytest.LogCaptureFixture
    ) -> None:
        _, stored = stopped(new(device), own_generator(), 10)
        other = new(device)
        other.load_state_dict(stored)
        other.epoch(augmented())
        assert "has 0 generators of its own, and had 1" in caplog.text

    def test_an_epoch_cut_short_leaves_no_loaders_state(self, device: Device) -> None:
        engine = new(device)
        engine.epoch(OwnEpochs(), max_steps=4)
        assert engine.state_dict()["loader"] is None

    def test_a_list_costs_no_look_at_the_generators(
        self, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks: list[int] = []
        monkeypatch.setattr("headrace.loading.host_states", lambda: looks.append(1))
        engine = new(device)
        engine.epoch(data(6))
        assert not looks
        engine.epoch(generated())
        assert looks

    def test_through_a_file(self, device: Device, tmp_path: Path) -> None:
        expected = losses_of(new(device), augmented(), 2)
        seen, stored = stopped(new(device), augmented(), 4)
        with CheckpointWriter(device, tmp_path, keep=1) as writer:
            writer.save(stored, 4)
        newest = latest_checkpoint(tmp_path)
        assert newest is not None
        other = new(device)
        other.load_state_dict(load_checkpoint(newest))
        assert seen + losses_of(other, augmented(), 2) == expected


class TestAFailedBeginning:
    """An epoch that fails before its first batch leaves the place as it was."""

    def test_the_loader_is_not_there_yet(self, device: Device) -> None:
        def broken() -> Iterator[Any]:
            raise OSError("the mount is not there yet")
            yield

        expected = losses_of(new(device), own_generator(), 2)
        seen, stored = stopped(new(device), own_generator(), 4)
        other = new(device)
        other.load_state_dict(stored)
        with pytest.raises(OSError, match="not there yet"):
            other.epoch(broken())
        again = other.state_dict()
        assert (again["batch"], again["epoch_loss"]) == (4, stored["epoch_loss"])
        assert torch.equal(again["random"]["host"], stored["random"]["host"])
        assert seen + losses_of(other, own_generator(), 2) == expected

    def test_the_loader_is_another(self, device: Device) -> None:
        _, stored = stopped(new(device), data(BATCHES), 5)
        other = new(device)
        other.load_state_dict(stored)
        with pytest.raises(StepError, match="has 3 batches, and 5 of this epoch were trained on"):
            other.epoch(data(3))
        assert other.epoch(data(BATCHES)).statistics.batches == 5


class TestTheEpochsLoss:
    @pytest.mark.parametrize("at", [1, 7, 9])
    @pytest.mark.parametrize("settles", [True, False])
    def test_a_plateau_is_told_of_the_whole_epoch(
        self, device: Device, at: int, settles: bool
    ) -> None:
        def made() -> tuple[Engine, torch.optim.Optimizer]:
            model = make_model(device, 0.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, factor=0.1, threshold=0.0
            )
            return Engine(
                model,
                optimizer,
                loss,
                device=device,
                scheduler=schedule,
                scheduler_every="epoch",
                deterministic=True,
            ), optimizer

        whole, optimizer = made()
        losses_of(whole, data(BATCHES), 3)
        engine, _ = made()
        engine.epoch(data(BATCHES))
        for info in engine.steps(data(BATCHES)):
            if info.batch == at:
                if settles:
                    engine.settle()
                stored = copy.deepcopy(engine.state_dict())
                break
        other, others = made()
        other.load_state_dict(stored)
        while other.epochs < 3:
            other.epoch(data(BATCHES))
        assert others.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        assert same(weights(other), weights(whole))
        assert other.state_dict()["scheduler"] == whole.state_dict()["scheduler"]


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
    engine.on_step = lambda info: seen.extend(entry.step for entry in info.come_back)
    with pytest.raises(expected):
        engine.epoch(batches)
    return seen, kept[0]


def pending_in(state: Any) -> list[int]:
    return [step for block in state["deferred"] for step in block["steps"]]


class TestAfterAnError:
    def test_losses_that_ended_the_loop_are_in_the_state(self, device: Device) -> None:
        seen, stored = rescued(device, bad_batches(60, 12), NonFiniteError, on_nonfinite="stop")
        assert seen + pending_in(stored) == list(range(stored["batch"]))
        other = new(device, model=make_model(device, 0.0), on_nonfinite="stop")
        other.load_state_dict(stored)
        with pytest.raises(NonFiniteError, match="batch 12 of epoch 0"):
            other.epoch(bad_batches(60, 12))

    def test_a_loss_that_ended_the_callers_loop_ends_it_once(self, device: Device) -> None:
        engine = new(device, model=make_model(device, 0.0), on_nonfinite="stop")
        steps = engine.steps(bad_batches(60, 2))
        while next(steps).batch < 4:
            pass
        with pytest.raises(NonFiniteError, match="batch 2"):
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
        plain = getattr(_Block, name)

        def failing(*args: Any) -> Any:
            monkeypatch.setattr(_Block, name, plain)
            raise BoomError

        with FakeDevice() as device:
            monkeypatch.setattr(_Block, name, failing)
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
        kept = KeptBuffers(model)
        kept.keep()
        assert len(kept._copies) == 5
        model.norm(torch.randn(4, 2))
        kept.keep()
        assert len(kept._copies) == 3
        model.late.add_(1)  # type: ignore[operator]
        assert not kept.put_back()  # it was not kept
        kept.keep()
        model.late.add_(1)  # type: ignore[operator]
        kept.keep()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model.late.add_(1)  # type: ignore[operator]
        model.norm(torch.randn(4, 2))
        assert kept.put_back()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class TestGates:
    @pytest.mark.parametrize("at", [4, 5])
    def test_more_than_is_tolerated_among_values_not_yet_reported(
        self, device: Device, at: int
    ) -> None:
        def made() -> Engine:
            return new(device, model=make_model(device, 0.0), on_nonfinite="tolerate:1")

        engine, batches = made(), bad_batches(6, 2, 3)
        steps = engine.steps(batches)
        while next(steps).batch < at:
            pass
        stored = copy.deepcopy(engine.state_dict())
        with pytest.raises(NonFiniteError):
            steps.close()
        other = made()
        other.load_state_dict(stored)
        with pytest.raises(NonFiniteError, match="batch 3 of epoch 0; 1 such"):
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
        assert stored["left_out"] == 1
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


DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: float(torch.rand(())),
    "python": random.random,
    "python's normal": lambda: random.gauss(0, 1),
    "python's bits": lambda: random.getrandbits(1),
    "python's seed": lambda: random.seed(5),
    "numpy": numpy.random.rand,
    "numpy's normal": numpy.random.randn,
    "numpy's seed": lambda: numpy.random.seed(5),
    "nothing": lambda: None,
}


class TestHostStates:
    def test_a_normal_number_in_stock_is_part_of_them(self) -> None:
        """NumPy makes two at a time: the second is drawn without a trace in the generator."""
        numpy.random.seed(1)
        host_states()
        numpy.random.randn()
        with_stock = host_states()
        second = numpy.random.randn()
        without = host_states()
        third = numpy.random.randn()
        set_host_states(with_stock)
        assert numpy.random.randn() == second
        set_host_states(without)
        assert numpy.random.randn() == third

    @given(draws=st.lists(st.sampled_from(sorted(DRAWS)), max_size=12))
    def test_go_back(self, draws: list[str]) -> None:
        """To any moment between draws of all kinds, some of which leave few traces."""
        states, drawn = [host_states()], []
        for name in draws:
            drawn.append(DRAWS[name]())
            states.append(host_states())
        for at, state in enumerate(states):
            set_host_states(state)
            assert [DRAWS[name]() for name in draws[at:]] == drawn[at:]


class TestOlderStates:
    def test_of_format_2(self) -> None:
        """Written by Headrace before loaders' generators and the epoch's sums were part of it."""
        from test_engine_state import BATCHES as EACH
        from test_engine_state import make, uninterrupted

        device = open_device("cpu")
        options = {"accumulate": 3, "on_nonfinite": "skip"}
        expected = uninterrupted(device, "pipeline", 2, **options)
        folder = Path(__file__).parent / "fixtures/checkpoints-v2/step-00000001"
        state = load_checkpoint(folder)
        assert state["engine"]["format"] == 2
        engine = make(device, "pipeline", **options)
        assert engine.load_state_dict(state["engine"]) == 5
        losses = [*engine.epoch(EACH).losses, *engine.epoch(EACH).losses]
        assert losses == pytest.approx(expected[0], rel=1e-6)  # another CPU may round otherwise
