"""Which calls of modules are a model's, and which models are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from headrace.capture import is_inside_a_module, watch_models, why_not


class Watched(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.inside: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inside.append(is_inside_a_module())
        result: torch.Tensor = self.inner(x)
        return result


def calls_of(work: object) -> list[str]:
    found: list[str] = []
    call = nn.Module.__call__
    with watch_models(lambda one: found.append(type(one).__name__), lambda: found.append("end")):
        assert callable(work)
        work()
    assert nn.Module.__call__ is call
    return found


def test_outermost_calls_in_training_are_seen() -> None:
    model = Watched(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    x = torch.ones(1, 2)

    def work() -> None:
        loss = nn.MSELoss()(model(x), x)
        loss.backward()
        with torch.no_grad():
            model(x)
        model.eval()
        model(x)
        assert not is_inside_a_module()

    assert calls_of(work) == ["Watched", "end"]
    assert model.inside == [True, False, False]


def test_a_failing_call_ends() -> None:
    model = Watched(nn.Linear(2, 2))

    def work() -> None:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(1, 3))
        assert not is_inside_a_module()

    assert calls_of(work) == ["Watched", "end"]


def test_calls_inside_a_backward_and_a_trace_are_not_seen() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)

    def work() -> None:
        checkpoint(layer, x, use_reentrant=False).sum().backward()
        torch.jit.trace(layer, x)

    assert calls_of(work) == ["Linear", "end"]  # not again in the backward


def test_compiled_code_does_not_see_the_watch() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    torch._dynamo.reset()
    with watch_models(lambda one: None, lambda: None):
        explained = torch._dynamo.explain(model)(torch.ones(1, 2))
    assert (explained.graph_break_count, explained.graph_count) == (0, 1)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Linear(2, 2), "so small"),
        (nn.Sequential(*(nn.ReLU() for _ in range(4))), None),
        (nn.LSTM(2, 2), None),
        (torch.jit.script(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))), "ScriptModule"),
    ],
)
def test_why_a_model_is_left_alone(model: nn.Module, why: str | None) -> None:
    found = why_not(model)
    assert (found is None) if why is None else (found is not None and why in found)
