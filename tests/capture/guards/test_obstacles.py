"""What is said of a step that cannot be captured: advice that can be followed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations

from headrace.capture.guards.obstacles import state_obstacle
from headrace.capture.state.state import StepState
from headrace.device import Device
from headrace.fake import FakeDevice
from support.training.engines import make_engine


def obstacle(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, *, fp16: bool = False
) -> str | None:
    with FakeDevice() as device:
        optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
        scalers = (torch.amp.GradScaler("cpu"),) if fp16 else ()
        return state_obstacle(StepState(device, obstacle, (module,), (optimizer,), scalers))


class Counting(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


@pytest.mark.parametrize("make", ["Muon", "Adafactor", "LBFGS", Counting])
def test_fused_is_advised_only_to_an_optimizer_that_has_it(make: Any) -> None:
    made = getattr(torch.optim, make, None) if isinstance(make, str) else make
    if made is None:
        pytest.skip(f"this PyTorch has no {make}")
    layer = torch.nn.Linear(4, 4, bias=False)
    name = made.__name__
    assert obstacle(layer, made(layer.parameters())) == (
        f"{name} may count its steps on the host, which no graph can repeat: {name} has no "
        "fused=True, so use SGD or an optimizer that has a `capturable` setting"
    )


def test_fused_is_advised_to_an_optimizer_that_has_it() -> None:
    layer = torch.nn.Linear(4, 4)
    assert str(obstacle(layer, torch.optim.Adagrad(layer.parameters()))).endswith(
        ": make the optimizer with fused=True, or use SGD or an optimizer that has a `capturable` "
        "setting"
    )
    assert str(obstacle(layer, torch.optim.AdamW(layer.parameters()), fp16=True)).endswith(
        ": make the optimizer with fused=True, or use bf16"
    )
    assert str(obstacle(layer, torch.optim.NAdam(layer.parameters()), fp16=True)).endswith(
        ": NAdam has no fused=True, so use bf16"
    )


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_weight_made_by_an_older_hook_names_its_parametrization(
    fake_device: Device, name: str
) -> None:
    older = torch.nn.Sequential(getattr(torch.nn.utils, name)(torch.nn.Linear(4, 4)))
    assert obstacle(older) == (
        f"torch.nn.utils.{name} makes a new weight of module '0' in each forward, and a graph "
        f"would keep reading an old one: use torch.nn.utils.parametrizations.{name}"
    )
    newer = torch.nn.Sequential(getattr(parametrizations, name)(torch.nn.Linear(4, 4)))
    newer = newer.to(fake_device.torch_device)
    engine = make_engine(fake_device, "graph", model=newer, loss=lambda m, b: m(b).square().mean())
    engine.epoch([torch.ones(2, 4) * n for n in range(8)])
    assert engine.graphs is not None
    assert (engine.graphs.why, engine.graphs.captures) == (None, 1)


def test_a_hook_of_gradient_checkpointing_names_the_call_that_removes_it() -> None:
    class Model(torch.nn.Sequential):
        def enable_input_require_grads(self) -> None:  # as that of transformers
            def make_inputs_require_grads(module: Any, given: Any, output: Any) -> None:
                output.requires_grad_(True)

            self[0].register_forward_hook(make_inputs_require_grads)

    model = Model(torch.nn.Linear(4, 4))
    assert obstacle(model) is None
    model.enable_input_require_grads()
    why = str(obstacle(model))
    assert why.startswith("a hook of module '0' would not run in a replay (")
    assert (
        "): call model.disable_input_require_grads() after gradient_checkpointing_enable();" in why
    )
