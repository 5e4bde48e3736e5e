"""What the ranks of `test_ranks.py` do, each in a process of its own.

All of a job's ranks train on the same global batches: a rank takes its share of each one's rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headrace.engine import Engine
from headrace.wrapped import whole, whole_weights

WIDTH = 6
ROWS = (7, 4, 1, 5, 2, 6, 3, 7, 2, 1, 5)  # of each global batch: some have fewer than ranks


def global_batches() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Rows, what they should become, and how much each row counts."""
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, WIDTH, generator=draw),
            torch.randn(rows, 3, generator=draw),
            torch.randint(1, 9, (rows,), generator=draw).float(),
        )
        for rows in ROWS
    ]


def share(batch: tuple[torch.Tensor, ...], rank: int, size: int) -> tuple[torch.Tensor, ...]:
    """A rank's rows of a batch; if there are none, one that counts for nothing."""
    mine = tuple(part[rank::size] for part in batch)
    if len(mine[0]):
        return mine
    return tuple(torch.zeros_like(part[:1]) for part in batch)


def loss(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    rows, wanted, counts = batch
    errors = (model(rows) - wanted).pow(2).sum(1)
    weight = counts.sum()
    clamped = weight.clamp(min=1)
    return {
        "loss": (errors * counts).sum() / clamped,
        "weight": weight,
        "first": (errors.detach() * counts).sum() / clamped + 1,
    }


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)
    )


def spread(model: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (model[0], model[2], model[4]):  # type: ignore[index]
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def new_engine(how: str, **options: Any) -> Engine:
    model = spread(new_model(), how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    return Engine(model, optimizer, loss, scheduler=scheduler, **options)


def trained(how: str, options: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Two epochs and an evaluation, and all that they came to."""
    engine = new_engine(how, **options)
    batches = [share(batch, rank, size) for batch in global_batches()]
    results = [engine.epoch(batches) for _ in range(2)]
    found: dict[str, Any] = {
        "losses": [loss for result in results for loss in result.losses],
        "weights": [weight for result in results for weight in result.weights],
        "metrics": results[-1].metrics,
        "updates": engine.updates,
        "evaluated": engine.evaluate(batches).mean_loss,
        "model": {name: value.tolist() for name, value in whole_weights(engine.model).items()},
    }
    if engine.ema is not None:
        found["ema"] = [whole(average).tolist() for average in engine.ema.state()]
        with engine.ema.applied():
            found["evaluated_averages"] = engine.evaluate(batches).mean_loss
        found["evaluated_again"] = engine.evaluate(batches).mean_loss
    return found


def run(rank: int, size: int, folder: str, job: Callable[..., Any], *args: Any) -> None:
    """A rank of a job: its result goes to a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    result = job(rank, size, *args)
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


# --- jobs -----------------------------------------------------------------------------------------


def many_trainings(rank: int, size: int, cases: list[Any]) -> list[Any]:
    return [trained(how, options, rank, size) for how, options in cases]
