"""A model's forward and backward as graphs: the eager loop's numbers, or eager with the reason.

What must be right, and the test that fails without it; those of other files with the file:

| the loop keeps its loss or outputs | what_the_loop_keeps_stays_as_it_was |
| memory that a pool's other graphs reuse | a_validation_and_another_model_between |
| several calls wait for their backward | several_calls_before_one_backward |
| backward passes that name inputs, or come twice | gradients_of_the_parameters_are_never_none, |
|   | a_second_backward_without_the_graph_raises, a_double_backward_after_the_capture_is_right |
| one buffer a parameter, added to as autograd adds | shapes_in_turns_share_the_gradients, |
|   | accumulation_adds_to_the_same_gradients, a_gradient_that_somebody_holds_is_not_overwritten |
| gradients for a hook each; those of inputs | a_hook_of_a_parameter_is_eager, |
|   | a_generator_is_trained_through_a_discriminator |
| autocast's cache of weights | tied_weights_and_autocast, two_calls_in_one_autocast_block |
| scalers; parameter groups stay the user's | test_graphed_update: a_gradient_scaler, |
|   | the_groups_stay_the_users |
| hooks for saved tensors, anomaly mode, functorch | hooks_for_saved_tensors_and_anomaly_mode_… |
| checkpoints inside, random numbers between | attention_with_dropout_and_checkpoints |
| outputs keep their aliasing | duplicates_arguments_and_parameters_stay_themselves, |
|   | chunks_may_be_written_in_place, what_copies_cannot_stand_for_is_eager, test_outputs |
| modes, requires_grad and settings in the key | a_change_is_noticed, |
|   | settings_of_pytorch_have_graphs_of_their_own, settings_of_forward_and_backward |
| no gradient where the plain loop has none | a_loss_of_some_outputs |
| modules inside modules | test_parts: what_cannot_be_captured_as_a_whole_is_divided |
| a forecast of memory | memory_that_would_not_fit_is_not_captured |
| cuBLAS workspaces (GPU) | test_freed_memory |
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import headrace as hr
from headrace.capture.models import eager
from headrace.device import Device
from headrace.fake import FakeDevice
from support.graphs.sped_up import Made, batch, compare, fused, small


def made(
    device: Device,
    model: nn.Module,
    loss_of: Callable[[nn.Module, torch.Tensor], Any],
    *,
    rows: Callable[[int], int] = lambda at: 6,
    before: Callable[[int], object] = lambda at: None,
) -> Made:
    """A loop with one model: loss, backward, update."""
    model.to(device.torch_device)
    optimizer = fused(model)

    def step(at: int) -> Any:
        before(at)
        loss = loss_of(model, batch(device, at, rows(at)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return (model, optimizer), step


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def missed(report: hr.SpeedUpReport) -> int:
    """How many backward passes of the first model ran eagerly."""
    counts = report.parts[0].eager
    return sum(count for why, count in counts.items() if "its backward had other" in why)


def replays(report: hr.SpeedUpReport) -> int:
    return report.parts[0].replays


def why(report: hr.SpeedUpReport) -> str:
    part = report.parts[0]
    assert part.replays == 0
    return f"{part.why} {part.eager}"


def test_later_calls_are_replays(capturing: Device) -> None:
    report = compare(capturing, lambda device: made(device, small(), squares))
    assert [part.replays for part in report.parts] == [5, 4]
    assert report.parts[0].eager == {"the first calls of a shape": 2}


def test_what_the_loop_keeps_stays_as_it_was(capturing: Device) -> None:
    """Loss, outputs, views of outputs and gradients of earlier steps."""

    def make(device: Device) -> Made:
        model, kept = small().to(device.torch_device), []
        optimizer = fused(model)

        def step(at: int) -> Any:
            outputs = model(batch(device, at))
            loss = outputs.square().mean()
            loss.backward()
            first = next(model.parameters())
            kept.extend([loss, outputs, outputs[1:], first.grad])
            optimizer.step()
            optimizer.zero_grad()
            return [one.detach().clone() for one in kept]

        return (model, optimizer), step

    assert replays(compare(capturing, make)) == 5


def test_shapes_in_turns_share_the_gradients(capturing: Device) -> None:
    report = compare(
        capturing,
        lambda device: made(device, small(), squares, rows=lambda at: (6, 3)[at % 2]),
        steps=9,
    )
    assert report.parts[0].captures == 2
    assert report.parts[1].captures == 1  # one set of gradient buffers: one graph of the update


@pytest.mark.parametrize("calls", [2, 3, 9])
def test_several_calls_before_one_backward(capturing: Device, calls: int) -> None:
    """Each waiting call has memory of its own, and what has none runs eagerly."""

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([model(x * n).square().mean() for n in range(1, calls + 1)]).sum()

    if calls > 8:  # gradients of an eager call are added at another time
        loss_of = separately(calls)
    report = compare(capturing, lambda device: made(device, small(), loss_of))
    assert replays(report) > 0
    assert ("8 calls wait for their backward already" in report.parts[0].eager) == (calls == 9)
    assert ("in another order" in str(report.parts[0].rounding)) == (calls == 9)


def separately(calls: int) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """All forwards first, then a backward for each."""

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        losses = [model(x * n).square().mean() for n in range(1, calls + 1)]
        for loss in losses[:-1]:
            loss.backward()
        return losses[-1]

    return loss_of


def test_a_validation_and_another_model_between(capturing: Device) -> None:
    def make(device: Device) -> Made:
        model, other = small().to(device.torch_device), small().to(device.torch_device)
        optimizer = fused(model, other)

        def step(at: int) -> Any:
            loss = model(batch(device, at)).square().mean()
            model.eval()
            checked = model(batch(device, at + 1)).square().mean()
            model.train()
            second = other(batch(device, at)).square().mean()
            second.backward()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), second.detach(), checked.detach()

        return (model, other, optimizer), step

    report = compare(capturing, make)
    assert report.parts[0].eager["the model is in eval()"] == 7
    assert replays(report) == 5


@pytest.mark.parametrize("to_none", [True, False])
def test_accumulation_adds_to_the_same_gradients(capturing: Device, to_none: bool) -> None:
    def make(device: Device) -> Made:
        model = small().to(device.torch_device)
        optimizer = fused(model)

        def step(at: int) -> Any:
            for part in range(3):
                model(batch(device, 3 * at + part)).square().mean().backward()
            gradients = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            return gradients

        return (model, optimizer), step

    report = compare(capturing, make)
    assert replays(report) == 18
    assert report.parts[0].eager["checked again"] == 1
    assert report.parts[1].replays > 0


def test_a_gradient_that_somebody_holds_is_not_overwritten(capturing: Device) -> None:
    def make(device: Device) -> Made:
        model, held = small().to(device.torch_device), []

        def step(at: int) -> Any:
            model(batch(device, at)).square().mean().backward()
            parameters = list(model.parameters())
            held.append([parameters[0].grad, parameters[1].grad.view(-1)])
            model.zero_grad()
            return held

        return (model,), step

    assert replays(compare(capturing, make)) == 5


def test_a_generator_is_trained_through_a_discriminator(capturing: Device) -> None:
    def make(device: Device) -> Made:
        where = device.torch_device
        generator, critic = small(4, 8, 4).to(where), small(4, 8, 1).to(where)
        optimizers = fused(generator), fused(critic)

        def step(at: int) -> Any:
            fake = generator(batch(device, at))
            d_loss = critic(batch(device, at)).mean() - critic(fake.detach()).mean()
            optimizers[1].zero_grad()
            d_loss.backward()
            optimizers[1].step()
            critic.requires_grad_(False)  # frozen and unfrozen at each step
            optimizers[0].zero_grad()
            g_loss = critic(fake).mean()
            g_loss.backward()
            optimizers[0].step()
            critic.requires_grad_(True)
            return d_loss.detach(), g_loss.detach(), fake.detach().clone()

        return (generator, critic, *optimizers), step

    report = compare(capturing, make)
    assert [part.replays > 0 for part in report.parts] == [True] * 4
    assert report.parts[1].why is None


# --- backward passes that look at the graph -------------------------------------------------------


def test_gradients_of_the_parameters_are_never_none(capturing: Device) -> None:
    def make(device: Device) -> Made:
        model = small().to(device.torch_device)
        parameters = list(model.parameters())

        def step(at: int) -> Any:
            loss = model(batch(device, at)).square().mean()
            found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            loss.backward(inputs=parameters[1:])
            gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
            model.zero_grad()
            return found, gradients

        return (model,), step

    report = compare(capturing, make)
    assert replays(report) == 5


def test_a_gradient_of_the_input_leaves_the_parameters_alone(capturing: Device) -> None:
    def make(device: Device) -> Made:
        model = small().to(device.torch_device)

        def step(at: int) -> Any:
            x = batch(device, at).requires_grad_()
            found = torch.autograd.grad(model(x).sum(), x)
            return found, [p.grad for p in model.parameters()]

        return (model,), step

    assert replays(compare(capturing, make)) == 5


def test_two_backwards_of_one_graph(capturing: Device) -> None:
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward(retain_graph=True)
        return loss

    assert replays(compare(capturing, lambda device: made(device, small(), loss_of))) == 5


def test_a_second_backward_without_the_graph_raises(capturing: Device) -> None:
    model = small().to(capturing.torch_device)
    with hr.speed_up(model, device=capturing) as handle:
        for at in range(4):
            loss = model(batch(capturing, at)).square().mean()
            loss.backward()
        assert handle.report().parts[0].replays == 2
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_a_double_backward_from_the_start_is_eager(capturing: Device) -> None:
    report = compare(capturing, lambda device: made(device, small(dropout=0.0), penalized(0)))
    assert "differentiated again" in why(report)


def test_a_double_backward_after_the_capture_is_right(capturing: Device) -> None:
    """The forward is computed once more, with the random numbers of then. Its gradients are summed
    in another order than the eager loop's, once."""
    report = compare(capturing, lambda device: made(device, small(), penalized(4)), exact=False)
    assert replays(report) == 3
    assert "differentiated again" in str(report.parts[0].why)


def penalized(first: int) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """A loss that has a gradient penalty from the call `first` on."""
    calls = iter(range(100))

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        out = model(x)
        if next(calls) % 50 < first:
            return out.square().mean()
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + slope.square().mean()

    return loss_of


def test_an_output_that_had_no_gradient_before(capturing: Device) -> None:
    calls = iter(range(100))

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"one": self.one(x).tanh(), "other": self.other(x).tanh()}

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        loss: torch.Tensor = out["one"].square().mean()
        return loss + out["other"].square().mean() if next(calls) % 8 > 3 else loss

    report = compare(capturing, lambda device: made(device, TwoHeads(), loss_of), steps=8)
    assert replays(report) == 6
    assert report.parts[0].captures == 2


def test_an_output_whose_node_has_gradients_of_another_output_only(capturing: Device) -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.mix(x).tanh().unbind(0)

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)[0].square().mean()  # type: ignore[no-any-return]

    report = compare(capturing, lambda device: made(device, Halves(), loss_of))
    assert (replays(report), report.parts[0].why) == (5, None)


# --- outputs --------------------------------------------------------------------------------------


@dataclass
class Result:
    hidden: torch.Tensor
    again: torch.Tensor
    scale: float


class Returns(nn.Module):
    """Returns what `choose` makes of its input, its hidden state and itself."""

    def __init__(self, choose: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.layer, self.choose = nn.Linear(4, 4), choose

    def forward(self, x: torch.Tensor) -> Any:
        return self.choose(self, x, self.layer(x * self.weight).tanh())


def test_duplicates_arguments_and_parameters_stay_themselves(capturing: Device) -> None:
    model = Returns(lambda self, x, h: (Result(h, h, 0.5), x, self.weight, h.detach()))
    model.to(capturing.torch_device)
    with hr.speed_up(model, device=capturing) as handle:
        for at in range(4):
            x = batch(capturing, at)
            result, argument, weight, detached = model(x)
            result.hidden.sum().backward()
        assert handle.report().parts[0].replays == 2
        assert isinstance(result, Result)
        assert result.hidden is result.again
        assert argument is x
        assert weight is model.weight
        assert detached.data_ptr() == result.hidden.data_ptr()


def test_chunks_may_be_written_in_place(capturing: Device) -> None:
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        mean, width = model(x)
        return (mean * 2 + width.exp()).square().mean()

    def make(device: Device) -> Made:
        return made(device, Returns(lambda self, x, h: h.chunk(2, dim=1)), loss_of)

    assert replays(compare(capturing, make)) == 5


@pytest.mark.parametrize(
    ("choose", "reason"),
    [
        (lambda self, x, h: (h, h.view(-1)), "two tensors that share memory"),
        (lambda self, x, h: (h, x.view(-1)), "a view of an argument"),
        (lambda self, x, h: (h, {1, 2}), "a set"),
    ],
)
def test_what_copies_cannot_stand_for_is_eager(capturing: Device, choose: Any, reason: str) -> None:
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x)[0].square().mean()
        return loss

    report = compare(capturing, lambda device: made(device, Returns(choose), loss_of), steps=5)
    assert reason in why(report)


# --- eager, with the reason -----------------------------------------------------------------------


class Reads(nn.Module):
    """A model that does something no graph repeats."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(4, 2), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.layer(x))


def drop_on_host(x: torch.Tensor) -> torch.Tensor:
    return x[torch.randperm(6)]


def test_a_shuffle_on_the_host_is_eager(capturing: Device) -> None:
    report = compare(capturing, lambda device: made(device, Reads(drop_on_host), squares), 5)
    assert "CPU generator" in why(report) or "waits" in why(report)


def test_a_host_wait_is_eager(capturing: Device) -> None:
    def make(device: Device) -> Made:
        reads = Reads(lambda x: x * float(x.detach().abs().max().item() > 0))
        return made(device, reads, squares)

    report = compare(capturing, make, 5)
    assert "the host waits for the device" in why(report)
    assert "test_graphed_model.py" in why(report)


def test_a_hook_of_a_parameter_is_eager(capturing: Device) -> None:
    def make(device: Device) -> Made:
        model = small()
        next(model.parameters()).register_hook(lambda gradient: gradient * 2)
        return made(device, model, squares)

    assert "a hook of parameter" in why(compare(capturing, make, 5))


def test_a_hook_that_comes_later_is_noticed(capturing: Device) -> None:
    def make(device: Device) -> Made:
        model = small()

        def before(at: int) -> None:
            if at == 4:
                next(model.parameters()).register_hook(lambda gradient: gradient * 2)

        return made(device, model, squares, before=before)

    report = compare(capturing, make)
    assert replays(report) == 2
    assert "a hook of parameter" in str(report.parts[0].why)


def test_hooks_for_saved_tensors_and_anomaly_mode_are_eager(capturing: Device) -> None:
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
            return squares(model, x)

    assert "hooks for saved tensors" in why(
        compare(capturing, lambda device: made(device, small(), loss_of), 5)
    )


# --- changes --------------------------------------------------------------------------------------


def unfrozen(model: nn.Sequential) -> None:
    model[0].requires_grad_(not model[0].weight.requires_grad)


def other_dropout(model: nn.Sequential) -> None:
    model[1].p = 0.5


def moved(model: nn.Sequential) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def replaced(model: nn.Sequential) -> None:
    model[2] = nn.ReLU()


def partly_eval(model: nn.Sequential) -> None:
    model[1].eval()


def loaded(model: nn.Sequential) -> None:
    model.load_state_dict({name: one * 0.5 for name, one in model.state_dict().items()})


@pytest.mark.parametrize("change", [unfrozen, other_dropout, moved, replaced, partly_eval, loaded])
def test_a_change_is_noticed(capturing: Device, change: Callable[[nn.Sequential], None]) -> None:
    def make(device: Device) -> Made:
        model = small()
        return made(device, model, squares, before=lambda at: change(model) if at == 4 else None)

    report = compare(capturing, make, steps=9)
    assert report.parts[0].why is None
    assert replays(report) >= 4


def test_frozen_batch_normalization_and_buffers(capturing: Device) -> None:
    def make(device: Device) -> Made:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

        def before(at: int) -> None:
            model[1].train(at % 4 != 3)

        return made(device, model, squares, before=before)

    assert replays(compare(capturing, make, steps=12)) > 5


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x).tanh())


def test_tied_weights_and_autocast(capturing: Device) -> None:
    """The cast of a weight that is used twice is cached, in a capture as outside; none that was
    made before is used."""

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return model(x).float().square().mean()

    assert replays(compare(capturing, lambda device: made(device, Tied(), loss_of))) == 5


def test_calls_whose_gradients_are_sums_say_how_they_round(capturing: Device) -> None:
    """The plain loop adds all four gradients of the weight in turn, two graphs two of each."""

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return squares(model, x) + squares(model, x * 2)

    report = compare(capturing, lambda device: made(device, Tied(), loss_of), exact=False)
    assert "use a weight more than once" in str(report.parts[0].rounding)


class Attention(nn.Module):
    """Attention with dropout, after layers that the backward recomputes if it `checkpoints`."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.first, self.checkpoints = small(4, 4), checkpoints
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x[None]
        if self.checkpoints:
            hidden = checkpoint(self.first, hidden, use_reentrant=False)
        out: torch.Tensor = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return out


@pytest.mark.parametrize("checkpoints", [False, True])
def test_attention_with_dropout_and_checkpoints(capturing: Device, checkpoints: bool) -> None:
    """Its backward runs outside of autocast, as the loop's; what is recomputed draws what the
    forward drew, and eager draws between two steps are the plain loop's."""

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            out = model(torch.nn.functional.dropout(x, 0.1))
        return out.float().square().mean()

    report = compare(capturing, lambda device: made(device, Attention(checkpoints), loss_of), 8)
    # The fake device does not let a capture go back to an earlier random state, as CUDA does.
    assert replays(report) == 6 or "set_rng_state" in why(report)


def test_settings_of_pytorch_have_graphs_of_their_own(capturing: Device) -> None:
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x)
        return out.square().mean()

    def make(device: Device) -> Made:
        parts, step = made(device, small(4, 4), loss_of)

        def with_setting(at: int) -> Any:
            before = torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(at in (6, 7, 8))
            try:
                return step(at)
            finally:
                torch.use_deterministic_algorithms(before)

        return parts, with_setting

    report = compare(capturing, make, 12)
    assert report.parts[0].captures == 2


class Island(nn.Module):
    """Its second layer computes in full precision, also where autocast is on."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x)
        with torch.autocast(x.device.type, enabled=False):
            out: torch.Tensor = self.other(hidden.float())
        return out


@pytest.mark.parametrize("inside", ["never", "always", "at times"])
def test_a_backward_outside_or_inside_of_autocast(capturing: Device, inside: str) -> None:
    """Autocast would round what the backward computes in full precision."""

    def loss_of(model: nn.Module, x: torch.Tensor) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16):
            return model(x).square().mean()

    def build(device: Device) -> Made:
        parts, step = made(device, Island(), loss_of)

        def in_autocast(at: int) -> Any:
            on = inside == "always" or (inside == "at times" and at % 2 == 0)
            with torch.autocast(device.torch_device.type, torch.bfloat16, enabled=on):
                return step(at)

        return parts, in_autocast

    report = compare(capturing, build, 7)
    assert replays(report) > 0


class _Asks(torch.autograd.Function):
    """Its forward and its backward ask whether cuDNN may be used."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * (2 if torch.backends.cudnn.enabled else 3)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (5 if torch.backends.cudnn.enabled else 7)


class Asking(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        asked: torch.Tensor = _Asks.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return asked


@pytest.mark.parametrize("backward", ["outside", "at times", "later", "once more"])
def test_settings_of_forward_and_backward(capturing: Device, backward: str) -> None:
    """There is a graph for all those that were seen; another backward runs eagerly, after a forward
    with the settings of the call."""

    def build(device: Device) -> Made:
        model = Asking(4, 4).to(device.torch_device)
        optimizer = fused(model)

        def step(at: int) -> Any:
            x, found = batch(device, at), []
            inside = (backward == "at times" or (backward == "later" and at > 3)) and at % 2 == 1
            with torch.backends.cudnn.flags(enabled=False):
                loss = model(x).square().mean()
                if inside:
                    loss.backward()
            if backward == "once more" and at > 3:
                (first,) = torch.autograd.grad(loss, [model.weight], create_graph=True)
                loss = loss + first.square().sum()
                found.append(first.detach())
            if not inside:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return [loss.detach(), *found]

        return (model, optimizer), step

    report = compare(capturing, build, 8)
    assert report.parts[0].replays > 0
    assert missed(report) == (backward == "later")


class Heads(nn.Module):
    """Two heads on one body: a loss of one of them leaves the other without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 3)
        self.norm, self.place = nn.BatchNorm1d(4), nn.Embedding(3, 4)
        self.register_buffer("places", torch.arange(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(self.body(x)).tanh() + self.place(self.places).sum(0)
        return self.one(hidden), self.other(hidden)


@pytest.mark.parametrize("loss_of", ["one in turn", "later", "later, in sums", "each"])
def test_a_loss_of_some_outputs(capturing: Device, loss_of: str) -> None:
    """What gets no gradient in the plain loop gets none, and no zeros, which would move it on by
    momentum and weight decay. A backward that no graph has is eager, and adds as the graphs do."""

    def build(device: Device) -> Made:
        model = Heads().to(device.torch_device)
        optimizer = fused(model)

        def step(at: int) -> Any:
            made, found = model(batch(device, at)), []
            if loss_of == "each":
                for one in made:
                    optimizer.zero_grad()
                    one.square().mean().backward(retain_graph=True)
                    found.append([p.grad for p in model.parameters()])
            else:
                is_other = at % 2 == 1 if loss_of == "one in turn" else at in (5, 7)
                loss = made[is_other].square().mean()
                if loss_of == "later, in sums":
                    loss.backward()
                    more = (model(batch(device, at + part))[is_other] for part in range(1, 4))
                    loss = torch.stack([one.square().mean() for one in more]).sum()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return [found, [p.detach().clone() for p in model.parameters()]]

        return (model, optimizer), step

    report = compare(capturing, build, 9)
    assert report.parts[0].replays > 0
    assert missed(report) == {"later": 1, "later, in sums": 3}.get(loss_of, 0)


def test_a_number_that_is_another_each_time(capturing: Device) -> None:
    """A factor that grows with the progress of the training, as domain adaptation has it."""

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
            return super().forward(x) * factor

    model = Scaled(4, 4).to(capturing.torch_device)
    with hr.speed_up(model, device=capturing) as handle:
        for at in range(32):
            model(batch(capturing, 0), factor=at / 32).sum().backward()
        assert "argument 'factor' is another each time (0.875, then 0.90625" in why(handle.report())


def test_a_sparse_argument(capturing: Device) -> None:
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, neighbors: torch.Tensor) -> torch.Tensor:
            return torch.mm(neighbors, self.linear(x))

    def loss_of(model: nn.Module, x: torch.Tensor) -> Any:
        neighbors = (x @ x.T > 0.3).float().to_sparse()
        return model(x, neighbors).square().mean()

    report = compare(capturing, lambda device: made(device, Convolution(), loss_of), 6)
    assert "a batch holds a sparse tensor" in why(report)


def test_two_calls_in_one_autocast_block(capturing: Device) -> None:
    """An eager loop's second call takes the casts of the first; graphs make their own."""

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return model(x).float().square().mean() + model(x * 2).float().square().mean()

    model = small(dropout=0.0).to(capturing.torch_device)
    with hr.speed_up(model, device=capturing) as handle:
        for at in range(4):
            loss_of(model, batch(capturing, at)).backward()
        part = handle.report().parts[0]
    assert part.replays == 6
    assert "casts the weights" in str(part.rounding)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_model(capturing: Device, kind: type[nn.Module]) -> None:
    """It keeps weak references to its weights, and lays them out anew if they are others."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = kind(4, 3, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.cells(x[:, None])[0]
            return out

    report = compare(capturing, lambda device: made(device, Recurrent(), squares), 6)
    assert (replays(report), report.parts[0].why) == (4, None)


def test_lazy_parameters_are_made_by_the_first_call(capturing: Device) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Tanh())
    with hr.speed_up(model, device=capturing) as handle:
        model.to(capturing.torch_device)
        for at in range(5):
            model(batch(capturing, at)).square().mean().backward()
        part = handle.report().parts[0]
    assert part.eager["its lazy parameters are made by the first call"] == 1
    assert part.replays == 2


def test_graphs_are_dropped_while_a_call_waits(capturing: Device) -> None:
    """Its backward still has its graph, its gradients and its memory."""

    def make(device: Device) -> Made:
        model = small().to(device.torch_device)

        def step(at: int) -> Any:
            first = model(batch(device, at)).square().mean()
            if at == 4:
                moved(model)
            model(batch(device, at + 1)).square().mean().backward()
            first.backward()
            found = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            return found

        return (model,), step

    assert replays(compare(capturing, make, 9)) > 6


def test_weights_that_are_swapped_in_each_step(capturing: Device) -> None:
    """As sharpness-aware optimizers swap them: no graph is captured again and again."""

    def make(device: Device) -> Made:
        model = small().to(device.torch_device)

        def step(at: int) -> Any:
            for weight in model.parameters():
                weight.data = weight.data.clone()
            loss = squares(model, batch(device, at))
            loss.backward()
            model.zero_grad()
            return loss.detach()

        return (model,), step

    report = compare(capturing, make, 12)
    assert "'0.weight' of it gets other memory, as p.data = …" in str(report.parts[0].why)
    assert report.parts[0].captures == 0


def test_a_weight_that_hooks_make_is_no_tensor_of_another_device(capturing: Device) -> None:
    """Until the first call, it is where it was made."""

    def make(device: Device) -> Made:
        with warnings.catch_warnings(action="ignore"):
            layer = nn.utils.weight_norm(nn.Linear(4, 4))  # type: ignore[no-untyped-call]
        return made(device, nn.Sequential(layer), squares)

    report = compare(capturing, make, 4)
    assert "parametrizations.weight_norm" in str(report.parts[0].why)


def test_a_model_on_another_device_is_eager(capturing: Device) -> None:
    model = small().to(capturing.torch_device)
    model.extra = nn.Parameter(torch.ones(1))
    with hr.speed_up(model, device=capturing) as handle:
        model(batch(capturing, 0)).mean().backward()
        assert "are not on" in str(handle.report().parts[0].why)


def test_memory_that_would_not_fit_is_not_captured() -> None:
    def steps(device: FakeDevice, model: nn.Module) -> None:
        for _ in range(4):
            x = batch(device, 0, 64, 8)
            model(x).square().mean().backward()
            model.zero_grad()

    with FakeDevice() as device:
        steps(device, small(8, 64, 2).to(device.torch_device))
        peak = device.peak_memory()
    with FakeDevice(memory_bytes=int(1.04 * peak)) as device:
        model = small(8, 64, 2).to(device.torch_device)
        with hr.speed_up(model, device=device) as handle:
            steps(device, model)
            part = handle.report().parts[0]
    assert part.replays == 0
    assert "a graph would need about" in str(part.why)


def test_what_changes_again_and_again_is_said(capturing: Device) -> None:
    def make(device: Device) -> Made:
        model = small()

        def before(at: int) -> None:
            model[1].p = 0.01 * at

        return made(device, model, squares, before=before)

    report = compare(capturing, make, steps=12)
    assert ".p changes from batch to batch" in why(report)


def test_parameters_of_functional_call_are_eager(capturing: Device) -> None:
    """Its weights are results of the weights: gradients flow through both."""

    def make(device: Device) -> Made:
        model = small().to(device.torch_device)
        optimizer = fused(model)

        def step(at: int) -> Any:
            half = {name: one * 0.5 for name, one in model.named_parameters()}
            out = torch.func.functional_call(model, half, (batch(device, at),))
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return out.detach()

        return (model, optimizer), step

    report = compare(capturing, make, steps=6)
    assert "functional_call" in why(report)


def test_inside_ddp_a_model_is_eager(capturing: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP's own forward sets this while it calls the model that it wraps."""
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", object())
    report = compare(capturing, lambda device: made(device, small(), squares), steps=5)
    assert "inside DistributedDataParallel" in why(report)


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (2 if gradient.sum().item() < 1e9 else 0)


def test_a_host_wait_in_the_backward_is_eager(capturing: Device) -> None:
    report = compare(
        capturing, lambda device: made(device, Reads(ReadsInBackward.apply), squares), steps=5
    )
    assert "the capture failed" in why(report)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_distributed_model_is_eager(
    capturing: Device, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(eager, "parallelism_of", lambda model: kind)
    report = compare(capturing, lambda device: made(device, small(), squares), steps=5)
    assert f"wrapped in {kind.upper()}" in why(report)


@dataclass
class Settings:
    scale: float = 1.0


def test_what_the_code_of_a_module_reads_is_compared(capturing: Device) -> None:
    """Also an attribute of another object, and the cell of a closure."""
    settings = Settings()

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * settings.scale

    def make(device: Device) -> Made:
        settings.scale = 1.0

        def before(at: int) -> None:
            settings.scale = 1.0 if at < 5 else 0.5

        return made(device, Reads(scaled), squares, before=before)

    report = compare(capturing, make, steps=10)
    assert report.parts[0].captures == 2


def test_a_tensor_of_the_host_that_is_an_attribute_is_compared(capturing: Device) -> None:
    """It is no parameter nor buffer, so it stays there when the model is moved."""

    def make(device: Device) -> Made:
        model = Reads(lambda x: x * model.scale.to(x.device))
        model.scale = torch.ones(2)

        def before(at: int) -> None:
            if at == 6:
                model.scale[1] = 0.5

        return made(device, model, squares, before=before)

    report = compare(capturing, make, steps=12)
    assert (report.parts[0].captures, report.parts[0].why) == (2, None)


def test_what_no_comparison_sees_is_found_by_checking_again(
    capturing: Device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A number that is read from a file."""
    path = tmp_path / "scale"
    path.write_text("1.0")
    model = Reads(lambda x: x * float(path.read_text())).to(capturing.torch_device)
    with hr.speed_up(model, device=capturing) as handle:
        for at in range(15):
            if at == 5:
                path.write_text("0.5")
            model(batch(capturing, at)).square().mean().backward()
        part = handle.report().parts[0]
    assert part.eager["checked again"] == 1
    assert "a step that was checked differs from its graph" in caplog.text
    assert part.captures == 2
