"""`@eager`: calls of a marked function are noted while a step is watched."""

from __future__ import annotations

import io

import torch

import headrace as hr
from headrace.device import Device
from headrace.engine import Engine
from headrace.plan import Plan
from support.graphs.sped_up import batch
from support.training.engines import data, loss, make_engine

log = io.StringIO()


@hr.eager
def picks(x: torch.Tensor) -> float:
    return x.sum().item()


@hr.eager
def record(x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """Write a letter."""
    log.write("x")
    return x * scale


def test_the_function_stays_as_it_was() -> None:
    assert (record.__name__, record.__doc__) == ("record", "Write a letter.")
    assert torch.equal(record(torch.ones(2), scale=3.0), torch.full((2,), 3.0))


def test_a_watch_says_where_it_is_called(capturing: Device) -> None:
    with capturing.watch() as obstacles:
        record(torch.ones(2))
    record(torch.ones(2))
    (obstacle,) = obstacles
    assert "record at " in obstacle.what
    assert "which is marked @eager, is called" in obstacle.what
    assert obstacle.site is not None
    assert obstacle.site.file == __file__


def test_what_else_is_in_the_way_inside_it_is_not_told(capturing: Device) -> None:
    x = torch.ones(2, device=capturing.torch_device)
    with capturing.watch() as obstacles:
        picks(x)
    assert len(obstacles) == 1
    with capturing.watch() as obstacles:
        picks(x)
        x.sum().item()
    assert [("marked" in one.what) for one in obstacles] == [True, False]


def test_the_marked_function_runs_at_every_step_and_its_module_has_no_graph(
    capturing: Device,
) -> None:
    """Without the mark, a graph would write at its first calls only: nothing else shows them."""
    model = torch.nn.Linear(4, 4).to(capturing.torch_device)

    class Counted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return record(self.inner(x))

    before = len(log.getvalue())
    with hr.speed_up(counted := Counted(), device=capturing) as handle:
        for at in range(6):
            counted(batch(capturing, at)).sum().backward()
        (part,) = handle.report().parts
    assert len(log.getvalue()) - before == 6
    assert "which is marked @eager" in str(part.why)


def test_a_step_whose_loss_calls_it_is_captured_in_parts(capturing: Device) -> None:
    def counted(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return record(loss(model, batch).reshape(1)).sum()

    before = len(log.getvalue())
    engine: Engine = make_engine(capturing, Plan.preset("graph"), loss=counted)
    engine.epoch(data(8))
    assert len(log.getvalue()) - before == 8
    assert engine.graphs is not None
    assert engine.graphs.way == "parts"
    assert "which is marked @eager" in str(engine.graphs.why)
    engine.close()
