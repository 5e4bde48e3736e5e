"""Which modules a loop calls itself."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

from headrace.integrations.outermost import OutermostCalls


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


def test_the_outermost_trained_modules_in_the_order_of_their_calls() -> None:
    outer, other, frozen, small = Outer(), block(), block().requires_grad_(False), nn.Linear(2, 2)
    calls, x = OutermostCalls(), torch.ones(1, 2)
    with calls.watch():
        other(outer(frozen(small(x)))).sum().backward()
        other(outer(x))
    assert list(map(id, calls.modules)) == [id(outer), id(other)]
    block()(x)
    assert len(calls.modules) == 2
    assert not torch_module._global_forward_pre_hooks
    assert not torch_module._global_forward_hooks


def test_calls_that_do_not_train_and_calls_that_raise() -> None:
    calls, model, evaluated = OutermostCalls(), block(), block().eval()
    with calls.watch():
        with torch.no_grad():
            model(torch.ones(1, 2))
        evaluated(torch.ones(1, 2))
        try:
            model(torch.ones(1, 3))
        except RuntimeError:
            calls.modules.clear()
        model[0](torch.ones(1, 2))  # called directly now, and too small
        model(torch.ones(1, 2))
    assert list(map(id, calls.modules)) == [id(model)]
