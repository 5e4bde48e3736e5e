"""What a graph of a model depends on is compared without Python code for each parameter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from headrace.capture.guards.module_guards import ModuleGuards
from headrace.capture.state.memory import StateMemory
from headrace.capture.state.state import StepState
from headrace.device import open_device


def deep(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(layers)))


def python_calls(call: Callable[[], Any]) -> int:
    """How many Python functions run in a call."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def test_the_comparison_runs_no_python_code_by_parameter() -> None:
    one, other = ModuleGuards(deep(2)), ModuleGuards(deep(50))
    assert one.hold()
    assert other.hold()
    assert python_calls(one.hold) == python_calls(other.hold) < 10
    assert python_calls(one.modes) == python_calls(other.modes)


def test_nor_does_that_of_an_update() -> None:
    memories = []
    for layers in (2, 50):
        model = deep(layers)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state = StepState(open_device("cpu"), optimizer.step, (), (optimizer,))
        memories.append(StateMemory(state))
    for memory in memories:
        assert not memory.has_moved()
    calls = [python_calls(memory.has_moved) for memory in memories]
    assert calls[0] == calls[1] < 10


def test_a_new_submodule_a_hook_and_a_buffer_are_changes() -> None:
    def add(model: nn.Module) -> None:
        model.add_module("extra", nn.ReLU())

    def hook(model: nn.Module) -> None:
        model.register_forward_hook(lambda *_: None)

    def buffer(model: nn.Module) -> None:
        model.register_buffer("seen", torch.zeros(1))

    def later_hook(model: nn.Module) -> None:
        next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)

    for change in (add, hook, buffer, later_hook):
        model = deep(2)
        guards = ModuleGuards(model)
        assert guards.hold()
        change(model)
        assert not guards.hold(), change.__name__


def test_aliases_keep_ties_and_are_taken_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.LSTM(2, 2))
    model[1].weight = model[0].weight
    real = model[0].weight
    flat = list(model[2]._flat_weights)
    guards = ModuleGuards(model)
    with guards.aliases() as aliases:
        assert model[0].weight is model[1].weight is aliases[0]
        assert aliases[0] is not real
        assert aliases[0].data_ptr() == real.data_ptr()
        assert model[2]._flat_weights[0] is model[2].weight_ih_l0
        assert not model[2]._weights_have_changed()
    assert model[0].weight is model[1].weight is real
    assert all(one is other for one, other in zip(model[2]._flat_weights, flat, strict=True))
    assert not model[2]._weights_have_changed()
