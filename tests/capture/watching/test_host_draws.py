"""Numbers that a model draws on the host to decide something: drawn again before each replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.capture.watching.host_draws import HostDraws
from headrace.fake import fake_cuda
from support.graphs.sped_up import batch, compare, fused, small


class Layers(nn.Module):
    """Draws a number for each layer. `uses` says what becomes of a layer's output."""

    def __init__(self, uses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(small(4, 4) for _ in range(3))
        self.uses = uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.uses(torch.rand([]), layer(x))
        return x


def dropped_below(limit: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda drawn, x: x * 2 if drawn < limit else x


def train(uses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], steps: int) -> Any:
    """The report of a run that is equal to the plain one, with the host's generator."""

    def make(device: Any) -> Any:
        model = Layers(uses).to(device.torch_device)
        optimizer = fused(model)

        def step(at: int) -> Any:
            loss = model(batch(device, at)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), torch.rand([])

        return (model, optimizer), step

    with fake_cuda() as device:
        return compare(device, make, steps).parts[0]


def test_draws_that_decide_the_same_each_time_are_repeated() -> None:
    part = train(dropped_below(0.0), 8)
    assert (part.replays, part.captures) == (6, 1)


def test_a_call_that_decides_otherwise_runs_eagerly() -> None:
    part = train(dropped_below(0.05), 60)  # one call in seven drops a layer
    assert part.replays > 20
    assert part.eager["numbers that it draws on the host ask for other work"] > 2


@pytest.mark.parametrize(
    "uses",
    [
        dropped_below(0.5),
        lambda drawn, x: x * float(drawn),
        lambda drawn, x: x * drawn,
        lambda drawn, x: x + drawn.to(x.device),
        lambda drawn, x: x * (1 + torch.rand(3).sum() - drawn > 0),
    ],
)
def test_other_draws_keep_a_model_eager(uses: Any) -> None:
    assert train(uses, 12).replays == 0


def test_a_forward_that_is_computed_again_decides_as_it_did() -> None:
    def run(*, sped_up: bool) -> Any:
        torch.manual_seed(0)
        model = Layers(dropped_below(0.02)).cuda()
        found = []
        handle = hr.speed_up(model, device=device) if sped_up else None
        for at in range(9):
            x = batch(device, at).requires_grad_()
            out = model(x).square().sum()
            if at == 8:  # the graph's backward cannot be differentiated
                (slope,) = torch.autograd.grad(out, x, create_graph=True)
                out = slope.square().sum()
            out.backward()
            found.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
            model.zero_grad()
        if handle is not None:
            assert handle.report().parts[0].replays
            handle.close()
        return found, torch.rand([])

    with fake_cuda() as device:
        # Last digits differ: the paths of a double backward are added in another order.
        torch.testing.assert_close(run(sped_up=True), run(sped_up=False), rtol=1e-5, atol=1e-5)


def record(work: Callable[[], object]) -> HostDraws:
    draws = HostDraws()

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            draws.record(func, args, kwargs, result)
            return result

    with Recorder():
        work()
    draws.end()
    return draws


def test_what_is_read_is_compared_and_the_generator_put_back() -> None:
    torch.manual_seed(0)
    draws = record(lambda: bool(torch.rand([]) < 0.5))  # 0.496
    assert draws.are_all
    torch.manual_seed(0)
    assert draws.repeat()
    torch.manual_seed(1)  # 0.757
    before = torch.get_rng_state()
    assert not draws.repeat()
    assert torch.equal(torch.get_rng_state(), before)
    draws.begin()
    assert torch.rand([]) < 0.5


@pytest.mark.parametrize(
    "work",
    [
        lambda: None,
        lambda: torch.rand(2),
        lambda: torch.rand([]).add_(1),
        lambda: torch.rand([]) + torch.ones(2),
        lambda: torch.rand([], generator=torch.Generator()),
        lambda: torch.empty([]).uniform_(),
        lambda: torch.set_rng_state(torch.Generator().manual_seed(3).get_state()),
    ],
)
def test_draws_that_are_not_understood(work: Any) -> None:
    assert not record(work).are_all
