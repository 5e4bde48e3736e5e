"""Loops in which something changes, or is used in an odd way, between two steps.

Each takes the loop and the step's number, and does something at the steps from 5 on, when the parts
are captured. What `step` returns is compared with the plain loop's.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headrace.device import Device
from support.graphs.sped_up import batch, fused, small


@dataclasses.dataclass
class Inner:
    scale: float
    mode: str
    x: torch.Tensor


@dataclasses.dataclass
class Outer:
    inner: Inner
    nothing: None = None


class Flexible(nn.Module):
    """Takes tensors, numbers, text and nested dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Any, scale: Any = 1.0, mode: str = "tanh") -> torch.Tensor:
        if isinstance(x, Outer):
            x, scale, mode = x.inner.x, x.inner.scale, x.inner.mode
        hidden = self.drop(self.norm(self.linear(x))) * scale
        if mode == "plain":
            return hidden
        return hidden.tanh() if mode == "tanh" else hidden.relu()


class Loop:
    """One model and optimizer; a change may replace what it wants of `step`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.model = Flexible().to(device.torch_device)
        self.other = small(4, 4).to(device.torch_device)
        self.optimizer = fused(self.model, self.other)
        self.kept: list[Any] = []
        self.to_none = True

    def x(self, at: int) -> torch.Tensor:
        return batch(self.device, at)

    def forward(self, at: int) -> torch.Tensor:
        out: torch.Tensor = self.other(self.model(self.x(at)))
        return out

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self, at: int) -> Any:
        loss = self.forward(at).square().mean()
        self.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.to_none)
        return loss.detach()


Change = Callable[[Loop, int], Any]
CHANGES: dict[str, Change] = {}


def change(function: Change) -> Change:
    CHANGES[function.__name__.replace("_", " ")] = function
    return function


@change
def half_and_back(loop: Loop, at: int) -> Any:
    if at == 6:
        loop.model.double()
        loop.other.double()
    if at in (6, 7):
        return loop.other(loop.model(loop.x(at).double())).sum().detach()
    if at == 8:
        loop.model.float()
        loop.other.float()
    return loop.step(at)


@change
def load_state_dict_with_assign(loop: Loop, at: int) -> Any:
    if at == 6:
        state = {name: value.clone() * 0.5 for name, value in loop.model.state_dict().items()}
        loop.model.load_state_dict(state, assign=True)
        loop.optimizer = fused(loop.model, loop.other)
    return loop.step(at)


@change
def a_parameter_is_replaced(loop: Loop, at: int) -> Any:
    if at == 6:
        loop.model.linear.weight = nn.Parameter(loop.model.linear.weight.detach() * 0.5)
        loop.optimizer.param_groups[0]["params"][0] = loop.model.linear.weight
    return loop.step(at)


@change
def add_param_group(loop: Loop, at: int) -> Any:
    if at == 0:
        del loop.optimizer.param_groups[0]["params"][-1]
    if at == 6:
        last = list(loop.other.parameters())[-1]
        loop.optimizer.add_param_group({"params": [last], "lr": 1e-3})
    return loop.step(at)


@change
def both_kinds_of_zero_grad(loop: Loop, at: int) -> Any:
    loop.to_none = at % 3 == 0
    return loop.step(at)


@change
def gradients_that_are_kept_to_the_next_step(loop: Loop, at: int) -> Any:
    found = loop.step(at)
    kept = [one.grad for one in loop.kept]
    loop.kept = list(loop.model.parameters())
    return found, [None if one is None else one.clone() for one in kept]


@change
def two_backwards_with_retain_graph(loop: Loop, at: int) -> Any:
    loss = loop.forward(at).square().mean()
    loss.backward(retain_graph=True)
    if at % 2:
        loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return loss.detach()


@change
def an_output_whose_backward_comes_steps_later(loop: Loop, at: int) -> Any:
    out = loop.forward(at)
    loop.kept.append(out.sum())
    if at % 3 == 2:
        for one in loop.kept:
            one.backward()
        loop.kept.clear()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return out.detach()


@change
def outputs_written_in_place(loop: Loop, at: int) -> Any:
    out = loop.model(loop.x(at), mode="plain")
    out.mul_(0.5)
    loss = loop.other(out.clone()).sum()
    out.add_(1.0)
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return loss.detach(), out.detach().clone()


@change
def views_of_an_output_as_input(loop: Loop, at: int) -> Any:
    out = loop.model(loop.x(at))
    loss = loop.other(out[1:4]).sum() + loop.other(out.view(2, 3, 4)[0]).sum()
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return loss.detach()


@change
def expanded_and_strided_inputs(loop: Loop, at: int) -> Any:
    x = loop.x(at)
    kinds = [x.t().contiguous().t(), x[:1].expand(6, 4), x.repeat(2, 1)[::2], x]
    loss = loop.model(kinds[at % 4]).sum()
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return loss.detach()


@change
def numbers_and_text_as_arguments(loop: Loop, at: int) -> Any:
    scale: Any = (1.0, 2, -0.0, True)[at % 4]
    mode = "relu" if at % 8 > 5 else "tanh"
    loss = loop.model(loop.x(at), scale, mode=mode).sum()
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return loss.detach()


@change
def a_number_on_the_host_as_a_tensor(loop: Loop, at: int) -> Any:
    scale = torch.tensor(1.0 if at < 8 else 2.0, device="cpu")
    loss = loop.model(loop.x(at), scale).sum()
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return loss.detach()


@change
def nested_dataclasses(loop: Loop, at: int) -> Any:
    asked = Outer(Inner(1.0 if at < 8 else 0.5, "tanh", loop.x(at)))
    loss = loop.model(asked).sum()
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return loss.detach()


@change
def no_grad_in_training_mode(loop: Loop, at: int) -> Any:
    with torch.no_grad():
        seen = loop.forward(at + 100).sum()
    return loop.step(at), seen


@change
def inference_mode_between(loop: Loop, at: int) -> Any:
    with torch.inference_mode():
        seen = float(loop.model(loop.x(at + 100)).sum().cpu())
    return loop.step(at), seen


@change
def an_input_made_in_inference_mode(loop: Loop, at: int) -> Any:
    with torch.inference_mode():
        x = loop.x(at)
    with torch.no_grad():
        seen = loop.model(x).sum()
    return loop.step(at), seen


@change
def a_momentum_that_changes(loop: Loop, at: int) -> Any:
    if at >= 6:
        loop.model.norm.momentum = 0.5
    return loop.step(at)


@change
def a_dropout_that_changes(loop: Loop, at: int) -> Any:
    if at >= 6:
        loop.model.drop.p = 0.6
    return loop.step(at)


@change
def tied_to_another_model_in_mid_run(loop: Loop, at: int) -> Any:
    if at == 6:
        loop.other[0].weight = loop.model.linear.weight
    return loop.step(at)


@change
def parametrized_in_mid_run(loop: Loop, at: int) -> Any:
    if at == 6:
        nn.utils.parametrizations.weight_norm(loop.model.linear)
        loop.optimizer = fused(loop.model, loop.other)
    return loop.step(at)


@change
def spectral_norm(loop: Loop, at: int) -> Any:
    if at == 0:
        nn.utils.parametrizations.spectral_norm(loop.model.linear)
        loop.optimizer = fused(loop.model, loop.other)
    return loop.step(at)


@change
def a_learning_rate_on_the_device(loop: Loop, at: int) -> Any:
    group = loop.optimizer.param_groups[0]
    if at == 0:
        group["lr"] = torch.tensor(1e-2, device=loop.device.torch_device)
    group["lr"].mul_(0.9)
    return loop.step(at)


@change
def an_average_of_the_weights(loop: Loop, at: int) -> Any:
    if at == 0:
        loop.kept.append(torch.optim.swa_utils.AveragedModel(loop.model))
    found = loop.step(at)
    loop.kept[0].update_parameters(loop.model)
    loop.kept[0].eval()
    with torch.no_grad():
        return found, loop.kept[0](loop.x(at)).sum()


@change
def a_scaler_that_skips(loop: Loop, at: int) -> Any:
    if at == 0:
        kind = loop.device.torch_device.type
        loop.kept.append(torch.amp.GradScaler(kind, init_scale=8.0, growth_interval=3))
    scaler = loop.kept[0]
    loss = loop.forward(at).square().mean() * (float("inf") if at in (5, 7) else 1.0)
    scaler.scale(loss).backward()
    scaler.unscale_(loop.optimizer)
    norm = nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5, foreach=True)
    scaler.step(loop.optimizer)
    scaler.update()
    loop.optimizer.zero_grad()
    return loss.detach(), norm, scaler.get_scale()


@change
def anomaly_mode_for_a_step(loop: Loop, at: int) -> Any:
    with torch.autograd.set_detect_anomaly(at == 6):
        return loop.step(at)


@change
def a_seed_in_mid_run(loop: Loop, at: int) -> Any:
    if at in (5, 8):
        torch.manual_seed(at)
    return loop.step(at)


@change
def a_fork_of_the_random_state(loop: Loop, at: int) -> Any:
    kind = loop.device.torch_device.type
    with torch.random.fork_rng(devices=[0] if kind == "cuda" else []):
        seen = loop.model(loop.x(at)).sum().detach()
    return loop.step(at), seen


@change
def a_copy_that_trains_on(loop: Loop, at: int) -> Any:
    if at == 6:
        loop.model = copy.deepcopy(loop.model)
        loop.optimizer = fused(loop.model, loop.other)
    return loop.step(at)


@change
def a_hook_of_a_gradients_node(loop: Loop, at: int) -> Any:
    if at == 6:
        node = torch.autograd.graph.get_gradient_edge(loop.model.linear.weight).node
        loop.kept.append(node)
        node.register_prehook(lambda gradients: tuple(one * 0.5 for one in gradients))
    return loop.step(at)


@change
def a_hook_of_all_modules(loop: Loop, at: int) -> Any:
    if at == 6:
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, out: out * 0.5 if isinstance(module, nn.Linear) else None
        )
        loop.kept.append(handle)
    if at == 9:
        loop.kept[0].remove()
    return loop.step(at)


@change
def the_state_of_an_optimizer_is_cleared(loop: Loop, at: int) -> Any:
    if at == 6:
        loop.optimizer.state.clear()
    return loop.step(at)


@change
def a_part_of_the_state_is_replaced(loop: Loop, at: int) -> Any:
    if at == 6:
        state = loop.optimizer.state[loop.model.linear.weight]
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])
    return loop.step(at)


@change
def the_memory_of_a_gradient_is_replaced(loop: Loop, at: int) -> Any:
    loss = loop.forward(at).square().mean()
    loss.backward()
    for one in loop.model.parameters():
        assert one.grad is not None
        one.grad.data = one.grad.data * 0.5
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return loss.detach()


@change
def another_forward_on_the_instance(loop: Loop, at: int) -> Any:
    if at == 6:
        plain = loop.model.linear.forward
        loop.model.linear.forward = lambda x: plain(x) * 0.5  # type: ignore[method-assign]
    return loop.step(at)


@change
def another_class_of_a_layer(loop: Loop, at: int) -> Any:
    if at == 6:
        loop.model.drop.__class__ = nn.Identity  # type: ignore[assignment]
    return loop.step(at)


@change
def a_layer_is_frozen_and_thawed(loop: Loop, at: int) -> Any:
    loop.model.linear.requires_grad_(at not in (6, 7))
    return loop.step(at)
