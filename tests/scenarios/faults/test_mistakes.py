"""What goes wrong when a loop is moved onto the engine, and what is said: the line and the fix."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import functional
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import headrace as hr
from headrace.device import Device, open_device
from headrace.engine import Engine
from headrace.errors import StepError
from headrace.fake import FakeDevice
from headrace.source_lines import definition, describe_function
from support.training.engines import data, loss, make_engine, make_model, plain_loop, same, weights


def line_of(function: Any, text: str = "") -> str:
    """Where a function of this file is written or, with `text`, the first line in it with that."""
    lines, first = inspect.getsourcelines(function)
    number = next(at for at, line in enumerate(lines) if text in line)
    return f"{__file__}:{first + number}"


def refused(device: Device, bad_loss: Any, **options: Any) -> str:
    """What an engine says of a loss function, when it is made or at its first batch."""
    with pytest.raises(StepError) as found:
        make_engine(device, loss=bad_loss, **options).epoch(data(2))
    return str(found.value)


# --- what is given as a loss ----------------------------------------------------------------------


class Dice(nn.Module):
    def forward(self, prediction: Any, target: Any) -> Any:
        return (prediction - target).mean()


class OfTheModel(nn.Module):
    """A loss function that happens to be a module."""

    def forward(self, model: Any, batch: Any) -> Any:
        return loss(model, batch)


def my_criterion(outputs: Any, targets: Any) -> Any:
    return functional.cross_entropy(outputs, targets)


class TestCriteria:
    @pytest.mark.parametrize(
        ("criterion", "name"),
        [
            (functional.cross_entropy, "cross_entropy"),
            (functools.partial(functional.cross_entropy, label_smoothing=0.1), "cross_entropy"),
            (nn.CrossEntropyLoss(), r"CrossEntropyLoss\(\)"),
            (nn.CrossEntropyLoss, "the class CrossEntropyLoss"),
            (Dice(), r"Dice\(\)"),
            (my_criterion, "my_criterion at .*test_mistakes.py"),
            (lambda y_hat, y: functional.mse_loss(y_hat, y), "<lambda> at .*test_mistakes.py"),
        ],
    )
    def test_are_refused_when_the_engine_is_made(self, criterion: Any, name: str) -> None:
        model = nn.Linear(8, 3)
        with pytest.raises(StepError, match=f"loss is {name}") as found:
            Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), criterion)
        assert f"(given at {__file__}:" in str(found.value)
        assert "the engine calls loss(model, batch)" in str(found.value)
        assert "return criterion(model(inputs), targets)" in str(found.value)

    @pytest.mark.parametrize(
        "criterion",
        [
            lambda a, b: functional.cross_entropy(a, b),
            lambda a, b: (a - b).mean(),
            lambda a, b: -a.log_softmax(-1)[b].mean(),
        ],
    )
    def test_or_by_what_their_first_call_says(self, device: Device, criterion: Any) -> None:
        said = refused(device, criterion)
        assert said.startswith(f"the loss function <lambda> at {__file__}:")
        assert "Sequential" in said
        assert "with the model itself, not its outputs" in said

    def test_other_errors_of_the_first_call_are_the_users_own(self, device: Device) -> None:
        def misspelt(model: nn.Module, batch: Any) -> Any:
            return loss(model, batch).maen()  # type: ignore[operator]

        def of_another_shape(model: nn.Module, batch: Any) -> Any:
            return model(batch[0][:, :3]).mean()

        with pytest.raises(AttributeError, match="no attribute 'maen'"):
            make_engine(device, loss=misspelt).epoch(data(1))
        with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'encode'"):
            make_engine(device, loss=lambda m, b: m.encode(b)).epoch(data(1))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            make_engine(device, loss=of_another_shape).epoch(data(1))

    @pytest.mark.parametrize(
        "fine",
        [
            OfTheModel(),
            functools.partial(lambda scale, m, b: loss(m, b) * scale, 2.0),
            lambda m, b, smoothing=0.1: loss(m, b),
            lambda *args: loss(*args),
            torch.compile(loss, backend="eager"),
            torch.compile(OfTheModel(), backend="eager"),
        ],
    )
    def test_whatever_takes_a_model_and_a_batch_is_a_loss(self, fine: Any) -> None:
        assert len(make_engine(open_device("cpu"), loss=fine).epoch(data(2)).losses) == 2


class TestSignatures:
    def test_three_arguments(self) -> None:
        def of_three(m: Any, x: Any, y: Any) -> Any:
            return functional.cross_entropy(m(x), y)

        said = refused(open_device("cpu"), of_three)
        assert f"of_three at {line_of(of_three)} takes (m: Any, x: Any, y: Any)" in said or (
            f"of_three at {line_of(of_three)} takes (m: 'Any', x: 'Any', y: 'Any')" in said
        )
        assert "Let it take the whole batch" in said

    @pytest.mark.parametrize(
        "wrong", [lambda batch: batch, lambda: None, lambda m, b, *, scale: loss(m, b) * scale]
    )
    def test_any_other_number(self, wrong: Any) -> None:
        said = refused(open_device("cpu"), wrong)
        assert f"the engine calls loss(model, batch), but <lambda> at {__file__}:" in said
        assert "Let it take the whole batch" in said

    def test_no_function_at_all(self) -> None:
        assert "loss is a float (given at" in refused(open_device("cpu"), 0.5)


class TestDefinitions:
    def test_of_whatever_can_be_called(self) -> None:
        class Loss:
            def __call__(self, model: Any, batch: Any) -> Any:
                return loss(model, batch)

            def method(self, model: Any, batch: Any) -> Any:
                return loss(model, batch)

        @functools.wraps(loss)
        def wrapped(*args: Any) -> Any:
            return loss(*args)

        assert str(definition(loss)) == line_of(loss).replace(__file__, loss.__code__.co_filename)
        assert str(definition(Loss())) == line_of(Loss.__call__)
        assert str(definition(Loss().method)) == line_of(Loss.method)
        assert str(definition(functools.partial(my_criterion, 1))) == line_of(my_criterion)
        assert str(definition(OfTheModel())) == line_of(OfTheModel.forward)
        assert str(definition(wrapped)) == str(definition(loss))
        assert definition(torch.add) is None
        assert describe_function(functools.partial(my_criterion)).startswith("my_criterion at ")
        assert describe_function(torch.add) == "add"
        assert describe_function(functional.cross_entropy) == "cross_entropy"


# --- what a loss function does --------------------------------------------------------------------


class TestBackwardInTheLoss:
    @pytest.mark.parametrize("plan", ["baseline", "streams4", "pipeline", "graph", "max"])
    def test_is_refused_at_the_first_batch(self, device: Device, plan: str) -> None:
        def with_backward(model: nn.Module, batch: Any) -> Any:
            value = loss(model, batch)
            value.backward()
            return value

        said = refused(device, with_backward, plan=plan)
        assert f"with_backward at {line_of(with_backward)} calls backward() at " in said
        assert line_of(with_backward, "value.backward()") in said
        assert "only return the loss" in said
        assert "Engine.from_step" in said

    @pytest.mark.parametrize("how", ["retained", "of a copy", "cleared"])
    def test_also_where_it_would_raise_nothing(self, device: Device, how: str) -> None:
        """Gradients of the batch would be there twice; or its graph not any more."""

        def with_backward(model: nn.Module, batch: Any) -> Any:
            value = loss(model, batch)
            if how == "of a copy":
                loss(model, batch).backward()
            else:
                value.backward(retain_graph=how == "retained")
            if how == "cleared":
                model.zero_grad()
            return value

        assert "calls backward() at " in refused(device, with_backward)

    def test_leaves_no_gradients_behind(self, device: Device) -> None:
        def with_backward(model: nn.Module, batch: Any) -> Any:
            value = loss(model, batch)
            value.backward()
            return value

        model = make_model(device)
        with pytest.raises(StepError):
            make_engine(device, model=model, loss=with_backward).epoch(data(1))
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_a_step_of_the_optimizer(self, device: Device) -> None:
        model = make_model(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = [parameter.detach().clone() for parameter in model.parameters()]

        def whole_step(model: nn.Module, batch: Any) -> Any:
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value

        with pytest.raises(StepError, match="the engine calls backward") as found:
            Engine(model, optimizer, whole_step, device=device).epoch(data(2))
        assert f"backward() at {line_of(whole_step, 'value.backward()')}" in str(found.value)
        assert f"optimizer.step() at {line_of(whole_step, 'optimizer.step()')}" in str(found.value)
        assert same(before, [parameter.detach() for parameter in model.parameters()])

    def test_zero_grad_inside_a_group(self, device: Device) -> None:
        """Harmless alone, and it would take from the batches before it what they have left."""

        def clearing(model: nn.Module, batch: Any) -> Any:
            model.zero_grad()
            return loss(model, batch)

        assert (
            list(make_engine(device, loss=clearing).epoch(data()).losses)
            == (plain_loop(device, data())[0])
        )
        said = refused(device, clearing, accumulate=2)
        assert f"clearing at {line_of(clearing)} changed the gradients" in said
        assert "zero_grad()" in said

    def test_gradients_of_something_else_are_fine(self, device: Device) -> None:
        """A gradient penalty, an adversarial input: the model's gradients stay as they were."""

        def adversarial(model: nn.Module, batch: Any) -> Any:
            inputs = batch[0].detach().requires_grad_(True)
            functional.cross_entropy(model(inputs), batch[1]).backward(inputs=[inputs])
            moved = (inputs + 0.01 * inputs.grad.sign()).detach()
            return loss(model, (moved, batch[1]))

        def penalised(model: nn.Module, batch: Any) -> Any:
            inputs = batch[0].detach().requires_grad_(True)
            outputs = model(inputs)
            (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
            return functional.cross_entropy(outputs, batch[1]) + slope.square().mean()

        for fine in (adversarial, penalised):
            assert len(make_engine(device, loss=fine).epoch(data(3)).losses) == 3

    def test_later_calls_are_not_watched(self) -> None:
        """PyTorch is as it was after the first."""
        usual = (torch.autograd.backward, torch.amp.GradScaler.scale, ShardedGradScaler.scale)
        seen: list[bool] = []

        def looking(model: nn.Module, batch: Any) -> Any:
            now = (torch.autograd.backward, torch.amp.GradScaler.scale, ShardedGradScaler.scale)
            seen.append(now == usual)
            return loss(model, batch)

        engine = make_engine(open_device("cpu"), loss=looking)
        engine.epoch(data(3))
        assert seen == [False, True, True]
        optimizer: Any = engine._builder.parts.optimizer  # type: ignore[union-attr]
        assert not optimizer._optimizer_step_pre_hooks
        engine.epoch(data(2))  # another epoch's loss may be another's
        assert seen[3:] == [False, True]


# --- somebody's GradScaler ------------------------------------------------------------------------


class Logged(torch.amp.GradScaler):
    """As libraries derive theirs."""

    def scale(self, outputs: Any) -> Any:
        return super().scale(outputs)


class Halved(torch.amp.GradScaler):
    """One that computes by itself."""

    def scale(self, outputs: Any) -> Any:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        assert self._scale is not None
        return outputs * self._scale


def older_scaler() -> Any:
    with pytest.warns(FutureWarning):
        return torch.cuda.amp.GradScaler(enabled=False)


class TestScalers:
    @pytest.mark.parametrize("plan", ["baseline", "streams4", "pipeline", "graph", "max"])
    def test_a_scaled_loss_is_refused(self, device: Device, plan: str) -> None:
        scaler = torch.amp.GradScaler(device.torch_device.type)

        def scaled(model: nn.Module, batch: Any) -> Any:
            return scaler.scale(loss(model, batch))

        before = weights(engine := make_engine(device, plan, loss=scaled))
        with pytest.raises(StepError, match="65,536 times too large") as found:
            engine.epoch(data(2))
        assert f"scaled at {line_of(scaled)}" in str(found.value)
        assert f"has scaled at {line_of(scaled, 'scaler.scale')}" in str(found.value)
        assert "precision='fp16'" in str(found.value)
        assert same(weights(engine), before)

    @pytest.mark.parametrize("kind", [Logged, Halved])
    @pytest.mark.parametrize(
        "use",
        [
            lambda scaler, value: {"loss": scaler.scale(value), "plain": value},
            lambda scaler, value: scaler.scale(value) / 4,
            lambda scaler, value: scaler.scale(value * 0.7) + scaler.scale(value * 0.3),
            lambda scaler, value: 0.5 * value + scaler.scale(value),
        ],
    )
    def test_whichever_scaler_and_way(self, device: Device, kind: Any, use: Any) -> None:
        scaler = kind(device.torch_device.type, init_scale=2.0**14)
        said = refused(device, lambda model, batch: use(scaler, loss(model, batch)))
        assert re.search(r"gradients would be [\d,]+ times too large", said)

    def test_also_with_fp16(self, device: Device) -> None:
        scaler = torch.amp.GradScaler(device.torch_device.type)
        said = refused(
            device, lambda model, batch: scaler.scale(loss(model, batch)), precision="fp16"
        )
        assert "without a scaler of your own" in said

    @pytest.mark.parametrize(
        "harmless",
        [
            lambda scaler, value: (value, scaler.scale(value))[0],
            lambda scaler, value: scaler.scale(value) / scaler.get_scale(),
            lambda scaler, value: {"loss": value, "scaled": scaler.scale(value).detach()},
        ],
    )
    def test_a_scale_that_does_nothing_passes(self, device: Device, harmless: Any) -> None:
        scaler = torch.amp.GradScaler(device.torch_device.type)
        engine = make_engine(device, loss=lambda m, b: harmless(scaler, loss(m, b)))
        assert list(engine.epoch(data(5)).losses) == plain_loop(device, data(5))[0]

    def test_a_scaler_that_is_off_passes(self, device: Device) -> None:
        for scaler in (torch.amp.GradScaler("cpu", enabled=False), older_scaler()):
            engine = make_engine(device, loss=lambda m, b, s=scaler: s.scale(loss(m, b)))
            assert list(engine.epoch(data(5)).losses) == plain_loop(device, data(5))[0]

    def test_a_step_of_ones_own_may_have_its_own(self, device: Device) -> None:
        model = make_model(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device.torch_device.type)

        def step(batch: Any) -> Any:
            value = loss(model, batch)
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return value.detach()

        assert len(Engine.from_step(step, device=device).epoch(data(3)).losses) == 3


# --- what it returns ------------------------------------------------------------------------------


class TestReturned:
    def test_a_number(self, device: Device) -> None:
        def as_number(model: nn.Module, batch: Any) -> Any:
            return loss(model, batch).item()

        said = refused(device, as_number)
        assert said.startswith(f"the loss function as_number at {line_of(as_number)} returned the")
        assert "without .item()" in said
        assert ".item()" in refused(device, lambda m, b: {"loss": loss(m, b).item()})

    def test_a_tuple(self, device: Device) -> None:
        said = refused(device, lambda m, b: (loss(m, b), m(b[0])))
        assert f"<lambda> at {__file__}:" in said
        assert "returned a tuple of 2 (Tensor, Tensor)" in said
        assert 'return a dict such as {"loss": loss,' in said

    def test_logits_among_the_metrics(self, device: Device) -> None:
        said = refused(device, lambda m, b: {"loss": loss(m, b), "logits": m(b[0])})
        assert "returned 'logits', which has shape (5, 3): expected a single number" in said
        assert "return it under 'outputs'" in said

    def test_a_detached_loss(self, device: Device) -> None:
        said = refused(device, lambda m, b: loss(m, b).detach())
        assert "does not require grad, so backward() cannot work" in said

    def test_nothing(self, device: Device) -> None:
        assert "Is its return statement missing?" in refused(device, lambda m, b: None)

    @pytest.mark.parametrize(
        ("returned", "words"),
        [
            ({"d_loss": 0.5, "g_loss": 0.25}, "a dict without 'loss' (it has d_loss, g_loss)"),
            ((torch.ones(()), torch.ones(())), "a tuple of 2 (Tensor, Tensor)"),
            (0.5, "the number 0.5"),
            ({}, "a dict without 'loss' (it has nothing)"),
        ],
    )
    def test_by_a_step_of_ones_own(self, device: Device, returned: Any, words: str) -> None:
        def step(batch: Any) -> Any:
            return returned

        with pytest.raises(StepError) as found:
            Engine.from_step(step, device=device).epoch(data(1))
        assert str(found.value).startswith(f"the step step at {line_of(step)} returned {words}")

    def test_floats_are_fine_as_metrics(self, device: Device) -> None:
        engine = make_engine(device, loss=lambda m, b: {"loss": loss(m, b), "share": 0.5, "n": 4})
        assert engine.epoch(data(3)).metrics == {"share": 0.5, "n": 4.0}


# --- loaders --------------------------------------------------------------------------------------


def generated(count: int) -> Iterator[Any]:
    yield from data(count)


class Restarting:
    """An iterator that begins anew after its end, as some libraries' loaders do."""

    def __init__(self, count: int) -> None:
        self._count, self._rest = count, iter(data(count))

    def __iter__(self) -> Restarting:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._rest)
        except StopIteration:
            self._rest = iter(data(self._count))
            raise


class TestIterators:
    @pytest.mark.parametrize(
        "make", [lambda: iter(data(3)), lambda: generated(3), lambda: map(tuple, data(3))]
    )
    def test_used_up_by_an_epoch(self, device: Device, make: Any) -> None:
        batches = make()
        engine = make_engine(device)
        engine.epoch(batches)
        with pytest.raises(StepError, match="an earlier epoch has used it up") as found:
            engine.epoch(batches)
        here = line_of(TestIterators.test_used_up_by_an_epoch, "as found")
        first, number = here.rsplit(":", 1)
        assert f"the loader passed at {first}:{int(number) + 1}" in str(found.value)
        assert f"(a {type(batches).__name__})" in str(found.value)
        assert "engine.epoch(loader), not iter(loader)" in str(found.value)
        assert engine.epochs == 1
        assert len(engine.epoch(make()).losses) == 3

    def test_in_a_loop_of_ones_own(self, device: Device) -> None:
        engine, batches = make_engine(device), iter(data(9))
        for _ in engine.steps(batches):
            break
        for _ in engine.steps(batches):
            pass
        with pytest.raises(StepError, match="an earlier epoch has used it up"):
            for _ in engine.steps(batches):
                pass

    def test_in_an_evaluation(self, device: Device) -> None:
        engine, batches = make_engine(device), generated(3)
        engine.evaluate(batches)
        with pytest.raises(StepError, match="an earlier epoch has used it up"):
            engine.evaluate(batches)

    def test_in_pieces_is_fine_until_the_end(self, device: Device) -> None:
        engine, batches = make_engine(device), generated(5)
        counts = [len(engine.epoch(batches, max_steps=2).losses) for _ in range(3)]
        assert counts == [2, 2, 1]
        assert len(engine.epoch(batches, max_steps=0).losses) == 0
        with pytest.raises(StepError, match="an earlier epoch has used it up"):
            engine.epoch(batches, max_steps=2)

    def test_one_that_begins_anew_is_fine(self, device: Device) -> None:
        engine, batches = make_engine(device), Restarting(3)
        assert [len(engine.epoch(batches).losses) for _ in range(3)] == [3, 3, 3]

    def test_an_empty_loader_stays_what_it_was(self, device: Device) -> None:
        engine = make_engine(device)
        empty = iter(())
        for nothing in ([], [], empty, empty, itertools.islice(generated(3), 0)):
            assert engine.epoch(nothing).losses == ()
            assert engine.evaluate(nothing).losses == ()

    def test_an_empty_loader_is_said_once(
        self, device: Device, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A mean of no losses is NaN, which must not look like a diverged run."""

        def said(loader: Any, act: str) -> list[str]:
            caplog.clear()
            engine = make_engine(device)
            for _ in range(2):
                result = getattr(engine, act)(loader)
                assert (result.losses, math.isnan(result.mean_loss)) == ((), True)
            return [one.getMessage() for one in caplog.records if "no batch" in one.getMessage()]

        few, none = TensorDataset(torch.zeros(3, 8)), TensorDataset(torch.zeros(0, 8))
        subset = DataLoader(few, sampler=SubsetRandomSampler([]))
        for loader, why in (
            ([], ""),
            (DataLoader(none), " (its dataset is empty)"),
            (
                DataLoader(few, batch_size=4, drop_last=True),
                " (its dataset has 3 samples, and drop_last drops a batch of less than 4)",
            ),
            (subset, " (its dataset has 3 samples, and its sampler chose none)"),
        ):
            for act in ("epoch", "evaluate"):
                (message,) = said(loader, act)
                assert message.startswith(f"the loader passed at {__file__}:")
                assert message.endswith(
                    f" had no batch{why}: there is no loss, and mean_loss is NaN"
                )

    def test_an_epoch_that_is_continued_at_its_end_is_not_empty(
        self, device: Device, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = make_engine(device)
        for _ in engine.steps(data(2)):
            state = engine.state_dict()
        other = make_engine(device)
        other.load_state_dict(state)
        assert other.epoch(data(2)).losses == ()  # they were handed out before
        assert len(other.epoch(data(2), max_steps=0).losses) == 0
        assert "no batch" not in caplog.text

    def test_of_a_step_of_ones_own(self, device: Device) -> None:
        engine, batches = Engine.from_step(lambda batch: None, device=device), generated(3)
        engine.epoch(batches)
        with pytest.raises(StepError, match="an earlier epoch has used it up"):
            engine.epoch(batches)


# --- models and optimizers ------------------------------------------------------------------------


class TestEvalMode:
    def warnings(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        said = [record.getMessage() for record in caplog.records]
        return [line for line in said if "eval mode" in line]

    def test_is_said_once_and_changes_nothing(
        self, device: Device, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = make_model(device, 0.5).eval()
        engine = make_engine(device, model=model)
        with caplog.at_level(logging.WARNING, "headrace"):
            for _ in range(2):
                engine.epoch(data(3))
        (said,) = self.warnings(caplog)
        assert f"{__file__}:" in said
        assert "call model.train()" in said
        assert not model.training
        expected = make_engine(device, model=make_model(device, 0.0))
        for _ in range(2):
            expected.epoch(data(3))
        assert same(weights(engine), weights(expected))

    def test_parts_may_be_in_it(self, device: Device, caplog: pytest.LogCaptureFixture) -> None:
        model = make_model(device)
        model[2].eval()  # type: ignore[index]
        make_engine(device, model=model).epoch(data(2))
        other = make_model(device).eval()
        other[2].train()  # type: ignore[index]
        make_engine(device, model=other).epoch(data(2))
        assert not self.warnings(caplog)

    def test_an_evaluation_leaves_it_as_it_was(
        self, device: Device, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = make_engine(device)
        engine.evaluate(data(2))
        engine.epoch(data(2))
        assert not self.warnings(caplog)


class TestSchedulers:
    def one_cycle(self, device: Device, plan: str = "pipeline", **options: Any) -> Engine:
        model = make_model(device, 0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=options.pop("total_steps", 3), cycle_momentum=False
        )
        return Engine(
            model, optimizer, loss, plan=plan, device=device, scheduler=scheduler, **options
        )

    def by_hand(self, device: Device, n: int) -> tuple[list[float], list[torch.Tensor]]:
        """Until the scheduler raises, after the fourth update."""
        model, losses = make_model(device, 0.0), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=3, cycle_momentum=False
        )
        for index, batch in enumerate(data(12)[: 4 * n]):
            value = loss(model, tuple(part.to(device.torch_device) for part in batch))
            (value / n).backward()
            losses.append(value.item())
            if (index + 1) % n == 0:
                optimizer.step()
                optimizer.zero_grad()
                if index + 1 < 4 * n:
                    scheduler.step()
        with pytest.raises(ValueError, match="Tried to step 4 times"):
            scheduler.step()
        return losses, [parameter.detach().cpu() for parameter in model.parameters()]

    @pytest.mark.parametrize("accumulate", [1, 2])
    @pytest.mark.parametrize("plan", ["baseline", "streams4", "pipeline", "graph"])
    def test_one_that_runs_out(self, device: Device, plan: str, accumulate: int) -> None:
        """Its last update was made, and counts: the state is that after it."""
        kept: list[Any] = []
        engine = self.one_cycle(
            device,
            plan,
            accumulate=accumulate,
            accumulate_by="count",
            on_error=lambda problem: kept.append(copy.deepcopy(engine.state_dict())),
        )
        with pytest.raises(StepError, match=r"\(OneCycleLR\) ran out after update 4") as found:
            engine.epoch(data(12))
        assert "it was made for 3 steps" in str(found.value)
        assert f"{__file__}:" in str(found.value)
        assert "total_steps = epochs × updates per epoch" in str(found.value)
        assert isinstance(found.value.__cause__, ValueError)
        assert engine.updates == 4
        assert engine.last_result is not None
        assert len(engine.last_result.losses) == 4 * accumulate
        (state,) = kept
        assert state["batch"] == 4 * accumulate
        assert state["step"]["updates"] == 4
        losses, final = self.by_hand(device, accumulate)
        assert list(engine.last_result.losses) == losses
        assert same(weights(engine), final)

    def test_one_that_runs_out_in_a_last_partial_group(self, device: Device) -> None:
        engine = self.one_cycle(device, accumulate=3)
        with pytest.raises(StepError, match="ran out after update 4"):
            engine.epoch(data(10))
        assert engine.updates == 4
        assert engine.last_result is not None
        assert len(engine.last_result.losses) == 10

    def test_one_inside_another(self, device: Device) -> None:
        model = make_model(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kinds = torch.optim.lr_scheduler
        scheduler = kinds.ChainedScheduler(
            [kinds.ConstantLR(optimizer), kinds.OneCycleLR(optimizer, 0.1, total_steps=2)]
        )
        engine = Engine(model, optimizer, loss, device=device, scheduler=scheduler)
        with pytest.raises(StepError, match=r"\(ChainedScheduler\) ran out .* made for 2 steps"):
            engine.epoch(data(6))

    def test_by_epochs(self, device: Device) -> None:
        engine = self.one_cycle(device, scheduler_every="epoch")
        for _ in range(3):
            engine.epoch(data(2))
        with pytest.raises(StepError, match="ran out after epoch 4"):
            engine.epoch(data(2))

    def test_another_error_of_its_own_stays_itself(self, device: Device) -> None:
        """A table that is too short, say; which update it came after is added."""
        model = make_model(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        table = [1.0, 0.5, 0.25]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: table[step])
        engine = Engine(model, optimizer, loss, device=device, scheduler=scheduler)
        with pytest.raises(IndexError) as found:
            engine.epoch(data(6))
        assert "raised by the LambdaLR's step() after update 3" in found.value.__notes__
        assert engine.updates == 3


class TestOthers:
    def test_two_optimizers(self) -> None:
        model = nn.Linear(8, 3)
        both: Any = [torch.optim.SGD(model.parameters(), lr=0.1)] * 2
        with pytest.raises(StepError, match=r"optimizer is a list: expected one torch.*from_step"):
            Engine(model, both, loss)

    def test_lbfgs(self) -> None:
        model = nn.Linear(8, 3)
        with pytest.raises(StepError, match=r"LBFGS needs a closure.*Engine\.from_step"):
            Engine(model, torch.optim.LBFGS(model.parameters()), loss)

    def test_an_unknown_option(self) -> None:
        model = nn.Linear(8, 3)
        with pytest.raises(TypeError, match="max_epochs"):
            Engine(model, torch.optim.SGD(model.parameters()), loss, max_epochs=3)  # type: ignore[call-arg]

    def test_a_compiled_model(self) -> None:
        cpu = open_device("cpu")
        model = make_model(cpu, 0.0)
        compiled: Any = torch.compile(model, backend="eager")
        engine = Engine(compiled, torch.optim.SGD(model.parameters(), lr=0.1), loss, clip_norm=1.0)
        assert len(engine.epoch(data(3)).losses) == 3

    def test_prefetch_without_a_device(self) -> None:
        assert [type(batch) for batch in hr.prefetch(data(2))] == [tuple, tuple]

    def test_a_rate_set_by_hand(self, device: Device) -> None:
        engine = make_engine(device, accumulate=2)
        optimizer: Any = engine._builder.parts.optimizer  # type: ignore[union-attr]
        for info in engine.steps(data(6)):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + info.updates)
        assert engine.updates == 3

    def test_a_host_that_watches_costs_no_wait(self) -> None:
        """The first batch is watched without reading anything back."""
        with FakeDevice() as device:
            waits = make_engine(device).epoch(data(3)).waits
        assert {one.reason for one in waits.reasons} == {"losses", "data"}
