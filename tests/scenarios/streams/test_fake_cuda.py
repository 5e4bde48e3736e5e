"""The engine on `fake_cuda()`: device/cuda.py itself, with its streams, events and graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr
from headrace.device import open_device
from headrace.errors import CaptureError
from headrace.fake import FakeCuda, fake_cuda
from headrace.races import Race

PLANS = ("baseline", "interval", "event", "streams4", "pipeline", "graph")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "one by one": {"capturable": True, "foreach": False},
    "in lists": {"capturable": True, "foreach": True},
}
by_optimizer = pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
Batch = tuple[torch.Tensor, torch.Tensor]


class Training:
    """A model with dropout, whose random numbers come from the device, and its batches."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Dropout(0.4), torch.nn.Linear(16, 2)
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **options)
        data = TensorDataset(torch.randn(72, 4), torch.randint(0, 2, (72,)))
        self.loader: DataLoader[Batch] = DataLoader(data, batch_size=3, pin_memory=True)

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def step(self, batch: Batch) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def losses(self, step: Callable[[Batch], torch.Tensor]) -> list[float]:
        moved = ([one.cuda(non_blocking=True) for one in batch] for batch in self.loader)
        return [step((inputs, targets)).item() for inputs, targets in moved]


def eager(options: dict[str, Any]) -> list[float]:
    """The losses of the plain loop."""
    with fake_cuda():
        training = Training(**options)
        return training.losses(training.step)


@by_optimizer
def test_every_plan_trains_as_the_plain_loop_without_a_race(options: dict[str, Any]) -> None:
    expected = eager(options)
    for plan in PLANS:
        with fake_cuda():
            training = Training(**options)
            engine = hr.Engine(training.model, training.optimizer, training.loss, plan=plan)
            result = engine.epoch(training.loader)
            assert result.device == "cuda:0"
            assert engine.graphs is None or engine.graphs.why is None
        assert list(result.losses) == expected
        # The tenth replay is an eager step instead, to check the graph again.
        assert result.statistics.replays == (21 if plan == "graph" else 0)


@by_optimizer
def test_a_step_of_the_users_own_is_replayed(options: dict[str, Any]) -> None:
    with fake_cuda():
        training = Training(**options)
        step = hr.graphed(training.step)
        losses = training.losses(step)
        assert (step.report().why, step.report().replays) == (None, 20)
    assert losses == eager(options)


def draw_normal(x: torch.Tensor) -> torch.Tensor:
    one = torch.ones_like(x)
    drawn: torch.Tensor = torch.distributions.Normal(x, one, validate_args=False).rsample()
    return drawn


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "randn": lambda x: torch.randn(x.shape, device=x.device),
    "randn_like": torch.randn_like,
    "normal_": lambda x: torch.empty(x.shape, device=x.device).normal_(),
    "rsample": draw_normal,
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_random_numbers_of_the_device_are_captured(
    draw: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def train(wrap: Callable[[Any], Any]) -> tuple[list[float], Any]:
        torch.manual_seed(1)
        step = wrap(lambda x: (x + draw(x)).square().mean())
        return [step(torch.ones(4, device="cuda")).item() for _ in range(6)], step

    with fake_cuda():
        losses, step = train(hr.graphed)
        assert (step.report().why, step.report().replays > 0) == (None, True)
        assert losses == train(lambda step: step)[0]


@pytest.mark.parametrize(
    ("obstacle", "why"),
    [
        (lambda x: x * float(x.sum()), "the host waits for the device at {file}"),
        (lambda x: x * torch.rand(4).sum(), "random numbers from torch's CPU generator"),
        (lambda x: x + torch.ones(4).to(x.device), "host memory is copied to the device"),
    ],
)
def test_what_no_graph_repeats_is_named(
    obstacle: Callable[[torch.Tensor], torch.Tensor], why: str
) -> None:
    with fake_cuda(check=False):
        step = hr.graphed(lambda x: obstacle(x).sum())
        for _ in range(6):
            step(torch.ones(4, device="cuda"))
        assert why.format(file=__file__) in str(step.report().why)


def test_a_capture_that_fails_leaves_the_device_as_it_was() -> None:
    with fake_cuda():
        x = torch.ones(4, device="cuda")
        device = open_device("cuda")
        pool = device.graph_pool()
        state = torch.cuda.get_rng_state()
        for work in (lambda: (torch.rand_like(x), x.sum().item()), lambda: 1 / 0):
            with pytest.raises(CaptureError, match="the step could not be captured"):
                device.capture(work, pool)
            assert torch.equal(torch.cuda.get_rng_state(), state)
        graph, result = device.capture(lambda: x * 2, pool)
        graph.replay()
        assert result.tolist() == [2.0] * 4


class TestRacesAroundAReplay:
    """The step reads a tensor, which another stream writes before each call of it."""

    def run(self, fake: FakeCuda, wait: bool, call: Callable[..., Any]) -> list[Race]:
        scale, side = torch.ones((), device="cuda"), torch.cuda.Stream()
        step, calls = call(scale)
        for _ in range(8):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                scale.mul_(0.5)
            if wait:
                torch.cuda.current_stream().wait_stream(side)
            calls()
        assert step.replays > 0
        return fake.races

    @staticmethod
    def graphed(scale: torch.Tensor) -> tuple[Any, Callable[[], object]]:
        training = Training(fused=True)
        step = hr.graphed(lambda batch: training.step(batch) * scale)
        batch = torch.ones(3, 4, device="cuda"), torch.zeros(3, dtype=torch.long, device="cuda")
        return step, lambda: step(batch)

    @staticmethod
    def engine(scale: torch.Tensor) -> tuple[Any, Callable[[], object]]:
        training = Training(fused=True)

        def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
            return training.loss(model, batch) * scale

        engine = hr.Engine(training.model, training.optimizer, loss, plan="graph")
        batches = [(torch.ones(3, 4), torch.zeros(3, dtype=torch.long))] * 2

        class Replays:
            @property
            def replays(self) -> int:
                return engine.graphs.replays

        return Replays(), lambda: engine.epoch(batches)

    @pytest.mark.parametrize("kind", ["graphed", "engine"])
    def test_they_are_reported_at_the_users_lines(self, kind: str) -> None:
        with fake_cuda(check=False) as fake:
            races = self.run(fake, False, getattr(self, kind))
        replays = [race for race in races if race.second.captured_at is not None]
        assert replays
        for race in replays:
            assert (race.kind, race.first.where) == ("write-read", "side")
            assert race.first.site.file == race.second.site.file == __file__
            assert "torch.cuda.current_stream().wait_stream(side) before" in race.missing

    @pytest.mark.parametrize("kind", ["graphed", "engine"])
    def test_there_is_none_with_the_wait(self, kind: str) -> None:
        with fake_cuda() as fake:
            assert self.run(fake, True, getattr(self, kind)) == []
