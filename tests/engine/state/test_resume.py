"""A restored engine continues loaders of all kinds, their random numbers and the epoch's sums, also
from a state taken after an error."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from headrace.checkpoint import CheckpointWriter, latest_checkpoint, load_checkpoint
from headrace.device import Device, open_device
from headrace.engine import Engine
from headrace.errors import LoaderError, StepError
from headrace.fake import FakeDevice
from headrace.plan import Plan
from support.training.engines import bad_batches, data, loss, make_model, same, weights
from support.training.loaders import (
    BATCHES,
    LOADERS,
    Augmented,
    BoomError,
    Loaders,
    OwnEpochs,
    augmented,
    generated,
    own_generator,
    pairs,
)
from support.training.resumed_engines import losses_of, new, pending_in, seeded, stopped


class Steps:
    """Takes `count` steps and leaves the loop open, unless the epoch has ended by then."""

    def __init__(self, engine: Engine, loader: Any, count: int) -> None:
        self.losses: list[float] = []
        self._steps = engine.steps(loader)
        for _ in range(count):
            info = next(self._steps, None)
            if info is None:
                assert engine.last_result is not None
                self.losses = list(engine.last_result.losses)
                break
            self.losses += [entry.values["loss"] for entry in info.arrived]


def without_dropout(device: Device, depth: int) -> Engine:
    plan = Plan.preset("pipeline").replace(prefetch_depth=depth)
    return new(device, plan, model=make_model(device, 0.0))


@functools.cache
def uninterrupted_losses(depth: int) -> list[float]:
    with FakeDevice() as device:
        return losses_of(without_dropout(device, depth), augmented(), 2)


class TestLoaders:
    @pytest.mark.parametrize("loader", LOADERS)
    @pytest.mark.parametrize("plan", ["baseline", "pipeline", "streams4"])
    def test_in_a_new_process(self, device: Device, plan: str, loader: Loaders) -> None:
        """Stopped within an epoch or between two. Order, noise and dropout masks (which a CPU draws
        from the same generator) are those of an uninterrupted run."""
        whole = new(device, plan)
        expected = losses_of(whole, loader(), 3)
        for at in (3, 9, 10, 14):
            seen, stored = stopped(new(device, plan), loader(), at)
            other, again = new(device, plan), loader()
            seeded(99)
            other.load_state_dict(stored)
            while other.epochs < 3:
                seen += other.epoch(again).losses
            assert seen == expected, f"stopped after {at} batches"
            assert same(weights(other), weights(whole)), f"stopped after {at} batches"

    def test_what_workers_draw(self) -> None:
        """Workers are seeded when the loader begins, and load the earlier batches again."""

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
        one = loader() if isinstance(one, OwnEpochs) else one  # it cannot be rolled back
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
        """Also with another prefetch depth, and if training stops again before all of it was
        trained on. Without dropout, only the loader draws."""

        def made(ahead: int) -> Engine:
            return without_dropout(device, ahead)

        with FakeDevice() as device:
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
        assert seen == uninterrupted_losses(depth)

    def test_a_loader_made_for_each_epoch_keeps_its_seed(self, device: Device) -> None:
        def of(epoch: int) -> DataLoader[Any]:
            draw = torch.Generator().manual_seed(epoch)
            return DataLoader(pairs(), batch_size=5, shuffle=True, generator=draw)

        def rest(engine: Engine) -> list[float]:
            found: list[float] = []
            while engine.epochs < 3:
                found += engine.epoch(of(engine.epochs)).losses
            return found

        expected = rest(new(device))
        for at in (10, 14):
            engine = new(device)
            seen = list(engine.epoch(of(0)).losses)
            if at == 14:
                for info in engine.steps(of(1)):
                    seen += [entry.values["loss"] for entry in info.arrived]
                    if info.batch == 3:
                        stored = copy.deepcopy(engine.state_dict())
                        break
            else:
                stored = copy.deepcopy(engine.state_dict())
            other = new(device)
            other.load_state_dict(stored)
            assert seen + rest(other) == expected

    def test_an_evaluation_before_each_epoch(self, device: Device) -> None:
        def train_to(engine: Engine, epochs: int) -> list[float]:
            found: list[float] = []
            while engine.epochs < epochs:
                engine.evaluate(DataLoader(pairs(), batch_size=5))  # draws a seed
                found += engine.epoch(DataLoader(pairs(), batch_size=5, shuffle=True)).losses
            return found

        expected = train_to(new(device), 3)
        engine = new(device)
        seen = train_to(engine, 1)
        stored = copy.deepcopy(engine.state_dict())
        other = new(device)
        seeded(99)
        other.load_state_dict(stored)
        assert seen + train_to(other, 3) == expected

    def test_a_loader_that_draws_after_its_last_batch(self, device: Device) -> None:
        class Drawing:
            def __iter__(self) -> Iterator[Any]:
                yield from generated()
                torch.rand(3)

        expected = losses_of(new(device), Drawing(), 2)
        seen, stored = stopped(new(device), Drawing(), 9)
        other = new(device)
        other.load_state_dict(stored)
        assert seen + losses_of(other, Drawing(), 2) == expected

    @pytest.mark.parametrize("plan", ["baseline", "pipeline"])
    @pytest.mark.parametrize("fails_in", ["loader", "send"])
    def test_a_batch_that_failed_is_drawn_again(
        self, device: Device, plan: str, fails_in: str
    ) -> None:
        """Also if part of it was drawn already."""
        fails = [False]

        class Moving:
            def __init__(self, tensor: torch.Tensor, bad: bool) -> None:
                self._tensor, self._bad = tensor, bad

            def to(self, target: Any) -> torch.Tensor:
                if self._bad:
                    raise BoomError
                return self._tensor.to(target)

        class Failing:
            def __iter__(self) -> Iterator[Any]:
                for at, (features, labels) in enumerate(data(BATCHES)):
                    noisy = features + 0.1 * torch.randn(features.shape)
                    bad = at == 6 and fails[0]
                    if bad and fails_in == "loader":
                        raise BoomError
                    yield Moving(noisy, bad), labels

        def made(**options: Any) -> Engine:
            return new(device, plan, model=make_model(device, 0.0), **options)

        expected = losses_of(made(), Failing(), 1)
        fails[0] = True
        kept: list[Any] = []
        seen: list[float] = []
        engine = made(on_error=lambda problem: kept.append(copy.deepcopy(engine.state_dict())))
        engine.on_step = lambda info: seen.extend(e.values["loss"] for e in info.arrived)
        with pytest.raises(BoomError):
            engine.epoch(Failing())
        assert kept[0]["batch"] == 6  # the batches before it were trained on first
        fails[0] = False
        other = made()
        seeded(99)
        other.load_state_dict(kept[0])
        assert seen + losses_of(other, Failing(), 1) == expected

    @pytest.mark.parametrize("fails_at", [4, 5, 6])
    @pytest.mark.parametrize("fails_in", ["loader", "send"])
    def test_a_loader_that_fails_again_at_a_batch_fetched_ahead(
        self, device: Device, fails_at: int, fails_in: str
    ) -> None:
        """Batches that were still to be drawn again are drawn again by the next engine."""
        fails = [False]

        class Moving:
            def to(self, target: Any) -> torch.Tensor:
                raise BoomError

        class Failing:
            def __iter__(self) -> Iterator[Any]:
                for at, (features, labels) in enumerate(generated()):
                    bad = at == fails_at and fails[0]
                    if bad and fails_in == "loader":
                        raise BoomError
                    yield Moving() if bad else features, labels

        def made(**options: Any) -> Engine:
            return new(device, model=make_model(device, 0.0), **options)

        expected = losses_of(made(), Failing(), 1)
        seen, stored = stopped(made(), Failing(), 4)
        assert len(stored["drawn_ahead"]) == (2 if device.asynchronous else 1)
        kept: list[Any] = []
        again = made(on_error=lambda problem: kept.append(copy.deepcopy(again.state_dict())))
        again.on_step = lambda info: seen.extend(e.values["loss"] for e in info.arrived)
        seeded(98)
        again.load_state_dict(stored)
        fails[0] = True
        with pytest.raises(BoomError):
            again.epoch(Failing())
        fails[0] = False
        other = made()
        seeded(99)
        other.load_state_dict(kept[0])
        assert seen + losses_of(other, Failing(), 1) == expected

    @pytest.mark.parametrize("max_steps", [None, 3])
    def test_the_timeout_counts_for_dropped_batches(self, max_steps: int | None) -> None:
        goes_on = threading.Event()

        class Hanging:
            def __iter__(self) -> Iterator[Any]:
                for at, batch in enumerate(data(BATCHES)):
                    if at == 2:
                        goes_on.wait(60)
                    yield batch

        device = open_device("cpu")
        _, stored = stopped(new(device), data(BATCHES), 5)
        other = new(device, loader_timeout=0.05)
        other.load_state_dict(stored)
        with pytest.raises(LoaderError, match=r"batch 3 of this pass"):
            other.epoch(Hanging(), max_steps=max_steps)
        threads = [one for one in threading.enumerate() if one.name == "headrace-loader"]
        goes_on.set()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)

    @pytest.mark.parametrize("drawn", [False, True])
    def test_a_loader_that_could_not_begin(self, device: Device, drawn: bool) -> None:
        """The next pass draws again what it had drawn until then."""
        fails = [False]

        class Shuffling:
            def __iter__(self) -> Iterator[Any]:
                if fails[0] and not drawn:
                    raise BoomError
                order = torch.randperm(BATCHES).tolist()
                if fails[0]:
                    raise BoomError
                return iter([data(BATCHES)[at] for at in order])

        expected = losses_of(new(device), Shuffling(), 2)
        kept: list[Any] = []
        engine = new(
            device, on_error=lambda problem: kept.append(copy.deepcopy(engine.state_dict()))
        )
        seen = losses_of(engine, Shuffling(), 1)
        fails[0] = True
        with pytest.raises(BoomError):
            engine.epoch(Shuffling())
        fails[0] = False
        other = new(device)
        seeded(99)
        other.load_state_dict(kept[0])
        assert seen + losses_of(other, Shuffling(), 1) == expected

    def test_the_user_chooses_another_position(self, device: Device) -> None:
        _, stored = stopped(new(device), data(BATCHES), 5)
        other = new(device)
        other.load_state_dict(stored)
        next(steps := other.steps(data(BATCHES), first_batch=0))
        state = other.state_dict()
        assert (state["batch"], state["own_batch"]) == (1, 1)
        steps.close()

    def test_another_number_of_generators_is_logged(
        self, device: Device, caplog: pytest.LogCaptureFixture
    ) -> None:
        _, stored = stopped(new(device), own_generator(), 10)
        other = new(device)
        other.load_state_dict(stored)
        other.epoch(augmented())
        assert "has 0 generators of its own, and had 1" in caplog.text

    def test_an_epoch_cut_short_stores_no_loader_state(self, device: Device) -> None:
        engine = new(device)
        engine.epoch(OwnEpochs(), max_steps=4)
        assert engine.state_dict()["loader"] is None

    @pytest.mark.parametrize("plan", ["baseline", "pipeline", "streams4"])
    def test_a_loader_whose_state_dict_raises_has_no_state(self, device: Device, plan: str) -> None:
        """Its batches are dropped and its generator is restored, as without the method."""

        def loader() -> Any:
            draw = torch.Generator().manual_seed(7)
            return Raising(pairs(), batch_size=5, shuffle=True, generator=draw)

        expected = losses_of(new(device, plan), loader(), 2)
        assert expected == losses_of(new(device, plan), own_generator(), 2)
        for at in (3, 10, 14):
            seen, stored = stopped(new(device, plan), loader(), at)
            assert stored["loader"] is None
            other, again = new(device, plan), loader()
            seeded(99)
            other.load_state_dict(stored)
            while other.epochs < 2:
                seen += other.epoch(again).losses
            assert seen == expected, f"stopped after {at} batches"

    def test_a_state_that_the_loader_refuses(self, device: Device) -> None:
        _, stored = stopped(new(device), OwnEpochs(), 4)
        other = new(device)
        other.load_state_dict(stored)
        with pytest.raises(BoomError) as caught:
            other.epoch(Raising(pairs(), batch_size=5))
        assert "Raising.load_state_dict refused" in caught.value.__notes__[0]

    def test_set_epoch_is_called_on_the_loader_and_all_samplers(self, device: Device) -> None:
        calls: list[tuple[str, int]] = []

        class EpochSampler(RandomSampler):
            def set_epoch(self, epoch: int) -> None:
                calls.append(("sampler", epoch))

        class EpochLoader(DataLoader[Any]):
            def set_epoch(self, epoch: int) -> None:
                calls.append(("loader", epoch))

        inner = BatchSampler(EpochSampler(pairs()), 5, drop_last=False)  # type: ignore[arg-type]
        loader = EpochLoader(pairs(), batch_sampler=inner)
        engine = new(device)
        engine.epoch(loader)
        engine.epoch(loader)
        assert calls == [("loader", 0), ("sampler", 0), ("loader", 1), ("sampler", 1)]

    def test_random_states_are_not_read_for_a_list(
        self, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks: list[int] = []
        monkeypatch.setattr("headrace.data.loader_rng.host_rng_states", lambda: looks.append(1))
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


class Raising(DataLoader[Any]):
    """Has the methods of a loader with a state, but they raise, as Accelerate's may."""

    def state_dict(self) -> Any:
        raise BoomError

    def load_state_dict(self, state: Any) -> None:
        raise BoomError


class TestAFailedBeginning:
    """An epoch that fails before its first batch leaves the position as it was."""

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

    def test_the_loader_is_too_short(self, device: Device) -> None:
        _, stored = stopped(new(device), data(BATCHES), 5)
        other = new(device)
        other.load_state_dict(stored)
        with pytest.raises(
            StepError, match="ended after 3 batches, and 5 of this epoch were trained on"
        ):
            other.epoch(data(3))
        assert other.epoch(data(BATCHES)).statistics.batches == 5

    @pytest.mark.parametrize("fails", ["start_at", "load_state_dict", "max_steps"])
    def test_the_loader_cannot_be_brought_to_the_position(self, device: Device, fails: str) -> None:
        class Refusing(OwnEpochs):
            def load_state_dict(self, state: dict[str, int]) -> None:
                raise BoomError

        class Telling(list[Any]):
            def start_at(self, batch: int) -> None:
                raise BoomError

        loader = Telling(data(BATCHES)) if fails == "start_at" else OwnEpochs()
        _, stored = stopped(new(device), OwnEpochs(), 4)
        if fails == "start_at":
            stored["loader"] = None
        other = new(device)
        other.load_state_dict(stored)
        refused = Refusing() if fails == "load_state_dict" else loader
        with pytest.raises((BoomError, TypeError)):
            other.epoch(refused, max_steps="x" if fails == "max_steps" else None)  # type: ignore[arg-type]
        assert other.state_dict()["batch"] == 4
        assert other.epoch(OwnEpochs()).statistics.batches == 6

    def test_an_open_group_stays_open(self, device: Device) -> None:
        def broken() -> Iterator[Any]:
            raise BoomError
            yield

        def made() -> Engine:
            return new(device, accumulate=2)

        whole = made()
        expected = losses_of(whole, data(BATCHES), 1)
        seen, stored = stopped(made(), data(BATCHES), 3)
        other = made()
        other.load_state_dict(stored)
        with pytest.raises(BoomError):
            other.epoch(broken())
        assert other.updates == 1
        assert seen + losses_of(other, data(BATCHES), 1) == expected
        assert same(weights(other), weights(whole))

    def test_updates_left_out_are_counted_once(self, device: Device) -> None:
        def broken() -> Iterator[Any]:
            raise BoomError
            yield

        def made() -> Engine:
            return new(device, model=make_model(device, 0.0), on_nonfinite="tolerate:1")

        _, stored = stopped(made(), bad_batches(BATCHES, 2), 4)
        assert pending_in(stored) == [0, 1, 2, 3]
        other = made()
        other.load_state_dict(stored)
        with pytest.raises(BoomError):
            other.epoch(broken())
        assert len(other.epoch(bad_batches(BATCHES, 2)).losses) == BATCHES

    def test_on_error_is_called(self, device: Device) -> None:
        class Gone:
            def __iter__(self) -> Iterator[Any]:
                raise BoomError

        kept: list[Any] = []
        engine = new(
            device, on_error=lambda problem: kept.append(copy.deepcopy(engine.state_dict()))
        )
        engine.epoch(data(BATCHES))
        with pytest.raises(BoomError):
            engine.epoch(Gone())
        assert (kept[0]["epoch"], kept[0]["batch"]) == (1, 0)
        other = new(device)
        other.load_state_dict(kept[0])
        assert other.epoch(data(BATCHES)).losses == new_after_one(device).epoch(data(10)).losses


def new_after_one(device: Device) -> Engine:
    engine = new(device)
    engine.epoch(data(BATCHES))
    return engine


class TestOtherLoops:
    """An engine has one training loop at a time: another loop or a loaded state ends it."""

    def test_loading_a_state_ends_an_open_loop(self, device: Device) -> None:
        whole = new(device)
        expected = losses_of(whole, data(BATCHES), 2)
        engine = new(device)
        held = engine.steps(data(BATCHES))
        for info in held:
            if info.batch == 4:
                stored = copy.deepcopy(engine.state_dict())
            if info.batch == 6:
                break
        engine.load_state_dict(stored)
        assert next(held, None) is None
        assert losses_of(engine, data(BATCHES), 2) == expected
        assert same(weights(engine), weights(whole))

    def test_loading_a_state_inside_the_loop_ends_it(self, device: Device) -> None:
        engine = new(device)
        for info in engine.steps(data(BATCHES)):
            if info.batch == 4:
                stored = copy.deepcopy(engine.state_dict())
            if info.batch == 6 and engine.epochs == 0:
                engine.load_state_dict(stored)  # this loop is over
        assert (engine.updates, engine.epochs) == (5, 0)
        other = engine.steps(data(BATCHES))
        assert next(other).batch == 5
        engine.epoch(data(3))
        assert next(other, None) is None

    def test_a_second_loop_inside_on_step_is_refused(self, device: Device) -> None:
        engine = new(device)
        engine.on_step = lambda info: engine.epoch(data(3))
        with pytest.raises(StepError, match="already in a training loop"):
            engine.epoch(data(3))


class TestTheEpochsLoss:
    @pytest.mark.parametrize("at", [1, 7, 9])
    @pytest.mark.parametrize("settles", [True, False])
    def test_a_plateau_scheduler_gets_the_whole_epochs_loss(
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
