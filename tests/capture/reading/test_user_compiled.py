"""Models that the user compiled with CUDA graphs inside, and those that no compiler takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.capture.reading.user_compiled import has_own_graphs
from headrace.fake import FakeDevice

WITH_GRAPHS: list[dict[str, Any]] = [
    {"mode": "reduce-overhead"},
    {"mode": "max-autotune"},
    {"options": {"triton.cudagraphs": True}},
]
WITHOUT: list[dict[str, Any]] = [
    {},
    {"mode": "max-autotune-no-cudagraphs"},
    {"backend": "eager"},
]


class CompilingFake(FakeDevice):
    compiles = True


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """Compiled functions run as they were written: what they were compiled with is asked, not what
    the compiler makes of them."""
    with torch.compiler.set_stance("force_eager"):
        yield
    torch.compiler.reset()


def test_what_has_graphs_of_its_own() -> None:
    for options in WITH_GRAPHS + WITHOUT:
        module, in_place = nn.Linear(2, 2), nn.Linear(2, 2)
        in_place.compile(**options)
        for compiled in (
            torch.compile(module, **options),
            torch.compile(abs, **options),
            in_place._compiled_call_impl,
        ):
            assert has_own_graphs(compiled) is (options in WITH_GRAPHS), options
    assert not has_own_graphs(nn.Linear(2, 2))


def square(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def whole(model: nn.Module) -> tuple[Any, Any]:
    return torch.compile(model, mode="reduce-overhead"), square


def part(model: Any) -> tuple[Any, Any]:
    model[0] = torch.compile(model[0], mode="reduce-overhead")
    return model, square


def in_place(model: nn.Module) -> tuple[Any, Any]:
    model.compile(mode="reduce-overhead")
    return model, square


def loss_function(model: nn.Module) -> tuple[Any, Any]:
    return model, torch.compile(square, mode="reduce-overhead")


def called_by_the_loss(model: nn.Module) -> tuple[Any, Any]:
    penalty = torch.compile(torch.tanh, mode="max-autotune")
    return model, lambda model, batch: square(model, batch) + penalty(batch).mean()


def without_graphs(model: nn.Module) -> tuple[Any, Any]:
    return torch.compile(model), square


@pytest.mark.parametrize(
    ("compile_it", "name"),
    [
        (whole, "OptimizedModule"),
        (part, "Sequential.0"),
        (in_place, "Sequential"),
        (loss_function, "square"),
        (called_by_the_loss, "penalty"),
        (without_graphs, None),
    ],
)
def test_such_a_model_is_not_captured_twice(
    compile_it: Callable[[nn.Module], tuple[Any, Any]],
    name: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with CompilingFake() as device:
        batches = [torch.randn(3, 4) for _ in range(5)]
        for plan in ("graph", "max"):
            made = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device.torch_device)
            model, loss = compile_it(made)
            optimizer = torch.optim.SGD(made.parameters(), lr=0.1, fused=True)
            engine = hr.Engine(model, optimizer, loss, plan=plan, device=device)
            engine.epoch(batches)
            assert engine.graphs is not None
            if name is None:
                assert engine.graphs.why is None
                continue
            assert engine.graphs.replays == 0
            assert engine.graphs.why is not None
            assert f"{name} was compiled with CUDA graphs of its own" in engine.graphs.why
            if plan == "max":
                assert engine.compiled is not None
                assert engine.compiled.why == engine.graphs.why

        # Not captured, not compiled: once each. What parts say is their own.
        said = [one for one in caplog.messages if "graphs of its own" in one]
        of_the_step = [one for one in said if one.startswith(("plan graph: the step", "the step"))]
        assert len(of_the_step) == (0 if name is None else 2)

        @hr.graphed(device=device)
        def step(batch: torch.Tensor) -> None:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()

        for batch in batches:
            step(batch.to(device.torch_device))
        assert (step.report().replays == 0) is (name is not None)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed, self.cells, self.out = nn.Linear(4, 8), kind(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.cells(self.embed(x))[0])
        return out


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_models_are_captured_and_not_compiled(
    kind: type[nn.RNNBase], caplog: pytest.LogCaptureFixture
) -> None:
    found = {}
    for plan in ("pipeline", "graph", "max"):
        with CompilingFake() as device:
            torch.manual_seed(0)
            model = Recurrent(kind).to(device.torch_device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
            engine = hr.Engine(model, optimizer, square, plan=plan, device=device)
            found[plan] = engine.epoch([torch.randn(3, 2, 4) for _ in range(6)]).losses
        if plan != "pipeline":
            assert engine.graphs is not None
            assert engine.graphs.why is None
            assert engine.graphs.replays > 0
    assert found["graph"] == found["max"] == found["pipeline"]
    assert engine.compiled is not None
    assert not engine.compiled.compiled
    expected = f"PyTorch's compiler refuses nn.{kind.__name__} (cells)"
    assert engine.compiled.why is not None
    assert engine.compiled.why.startswith(expected)
    assert sum(expected in text for text in caplog.messages) == 1
