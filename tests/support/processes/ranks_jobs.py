"""What the ranks of `scenarios/ranks/test_ranks.py` do. Each rank is a process.

All ranks of a job train on the same global batches: each takes its share of every batch's rows.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headrace.checkpoint import CheckpointWriter, agreed_checkpoint, load_checkpoint, tensor_file
from headrace.device import Device, open_device
from headrace.engine import Engine
from headrace.engine.graphs.graph_obstacles import capture_obstacle
from headrace.errors import CheckpointError, StepError
from headrace.parallel import Agreement, Ranks, full_state_dict, set_gradient_sync
from headrace.parallel.models import full_tensor
from headrace.plan import LoaderPlan
from headrace.translation import ModelSettings, Translator, translation_loss
from headrace.translation.corpus.encoded import IdPairs
from headrace.translation.corpus.loader import make_loader
from headrace.translation.corpus.packed import PackedPlan, packed_size

WIDTH = 6
# Rows of each global batch. Some batches have fewer rows than there are ranks.
ROWS = (7, 4, 1, 5, 2, 6, 3, 7, 2, 1, 5)


def global_batches() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Inputs, targets and a weight for each row."""
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
    """A rank's rows of a batch; if there are none, one row of weight 0."""
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


def wrapped(model: nn.Module, how: str, device: Device) -> nn.Module:
    if how == "ddp":
        with device.use(device.stream("ddp")):  # as captured DDP steps require
            return DistributedDataParallel(model)
    if how == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.torch_device.type, (dist.get_world_size(),))
        for part in (model[0], model[2], model[4]):  # type: ignore[index]
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def new_engine(how: str, where: str = "cpu", **options: Any) -> Engine:
    device = open_device(where)
    model = wrapped(new_model().to(device.torch_device), how, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    return Engine(model, optimizer, loss, scheduler=scheduler, device=device, **options)


def trained(how: str, options: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Train for two epochs and evaluate. Returns all results."""
    engine = new_engine(how, **options)
    batches = [share(batch, rank, size) for batch in global_batches()]
    results = [engine.epoch(batches) for _ in range(2)]
    found: dict[str, Any] = {
        "losses": [loss for result in results for loss in result.losses],
        "weights": [weight for result in results for weight in result.weights],
        "metrics": results[-1].metrics,
        "updates": engine.updates,
        "evaluated": engine.evaluate(batches).mean_loss,
        "model": {name: value.tolist() for name, value in full_state_dict(engine.model).items()},
    }
    if engine.ema is not None:
        found["ema"] = [full_tensor(average).tolist() for average in engine.ema.state()]
        with engine.ema.applied():
            found["evaluated_averages"] = engine.evaluate(batches).mean_loss
        found["evaluated_again"] = engine.evaluate(batches).mean_loss
    return found


def run(rank: int, size: int, folder: str, job: Callable[..., Any], *args: Any) -> None:
    """Run a job as one rank, and write its result to a file."""
    torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    result = job(rank, size, *args)
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


# --- jobs -----------------------------------------------------------------------------------------


def training(rank: int, size: int, how: str, options: dict[str, Any]) -> dict[str, Any]:
    return trained(how, options, rank, size)


class WithoutLength:
    """A loader without a length."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def uneven(rank: int, size: int, how: str, knows_length: bool, accumulate: int) -> list[float]:
    """Rank 0 has all batches, the others the first five: after those, only rank 0's rows count."""
    engine = new_engine(how, accumulate=accumulate)
    batches = [share(batch, rank, size) for batch in global_batches()]
    mine = batches if rank == 0 else batches[:5]
    loader = mine if knows_length else WithoutLength(mine)
    result = engine.epoch(loader)
    return [*result.losses, engine.evaluate(loader).mean_loss, result.statistics.samples]


class Stateful:
    """A loader that keeps its own state. After a resume its length is still that of an epoch."""

    def __init__(self, batches: list[Any], *, knows_length: bool) -> None:
        self._batches, self.at, self.epoch = batches, 0, 0
        if knows_length:
            self.__class__ = StatefulSized

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self._batches):
            self.at += 1
            yield self._batches[self.at - 1]
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class StatefulSized(Stateful):
    def __len__(self) -> int:
        return len(self._batches)


def stopped(
    loader: Any, at: int, *, max_steps: int | None = None, seed: int = 0
) -> tuple[list[float], Any]:
    """Train a new engine up to batch `at`. Returns the losses, and the state there."""
    engine, seen = new_engine("ddp"), []
    torch.manual_seed(seed)
    for info in engine.steps(loader, max_steps=max_steps):
        seen += [entry.values["loss"] for entry in info.arrived]
        if info.batch == at:
            seen += [entry.values["loss"] for entry in engine.settle()]
            stored = copy.deepcopy(engine.state_dict())
            engine.leave()
            return seen, stored
    raise AssertionError(f"the loop ended before batch {at}")


def uneven_resumed(rank: int, size: int, kind: str, knows_length: bool) -> dict[str, Any]:
    """Stop before, at and after the batch where the shorter share ends, and resume."""
    batches = [share(batch, rank, size) for batch in global_batches()[:8]]
    mine = batches if rank == 0 else batches[:4]

    def loader() -> Any:
        if kind == "stateful":
            return Stateful(mine, knows_length=knows_length)
        return mine if knows_length else WithoutLength(mine)

    whole, one = new_engine("ddp"), loader()
    expected = [loss for _ in range(2) for loss in whole.epoch(one).losses]
    found: dict[str, Any] = {}
    for at in (1, 3, 4, 7):
        seen, stored = stopped(loader(), at)
        other, one = new_engine("ddp"), loader()
        other.load_state_dict(stored)
        for _ in range(2):
            seen += other.epoch(one).losses
        found[str(at)] = [seen == expected, other.updates == whole.updates]
    return found


class StartsAt:
    """A loader with `start_at`. Its length stays that of an epoch."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches, self._first = batches, 0

    def __len__(self) -> int:
        return len(self._batches)

    def start_at(self, batch: int) -> None:
        self._first = batch

    def __iter__(self) -> Iterator[Any]:
        first, self._first = self._first, 0
        return iter(self._batches[first:])


class Noisy:
    """A loader that draws random numbers in this process."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for rows, *others in self._batches:
            yield (rows + 0.1 * torch.randn(rows.shape), *others)


LOADERS = {"plain": list, "no length": WithoutLength, "start_at": StartsAt, "noisy": Noisy}


def stopped_and_resumed(
    rank: int, size: int, kind: str, at: int, max_steps: int | None
) -> dict[str, Any]:
    """Stop after batch `at` of a pass of `max_steps` updates, and resume to the end."""
    mine = [share(batch, rank, size) for batch in global_batches()[:8]]
    loader = LOADERS[kind]
    whole = new_engine("ddp")
    torch.manual_seed(rank)
    expected = [loss for _ in range(2) for loss in whole.epoch(loader(mine)).losses]
    seen, stored = stopped(loader(mine), at, max_steps=max_steps, seed=rank)
    other = new_engine("ddp")
    torch.manual_seed(99)
    other.load_state_dict(stored)
    for _ in range(2):
        seen += other.epoch(loader(mine)).losses
    return {"same": seen == expected, "updates": other.updates - whole.updates}


def one_is_not_finite(rank: int, size: int, how: str) -> dict[str, Any]:
    """The last rank's share of the second batch has a NaN: all ranks skip that update."""
    engine = new_engine(how, on_nonfinite="skip", clip_norm=0.5)
    batches = [share(batch, rank, size) for batch in global_batches()[:4]]
    if rank == size - 1:
        batches[1] = (batches[1][0] * float("nan"), *batches[1][1:])
    result = engine.epoch(batches)
    weights = {name: value.tolist() for name, value in full_state_dict(engine.model).items()}
    return {"non_finite": result.non_finite, "model": weights, "last": result.losses[-1]}


def some_have_no_batches(rank: int, size: int) -> str:
    engine = new_engine("ddp")
    try:
        engine.epoch(global_batches() if rank == 0 else [])
    except StepError as problem:
        return str(problem)
    return "no error"


def inside_a_group(rank: int, size: int, how: str) -> dict[str, Any]:
    """Ask for a state, and leave the loop, after the first of a group's three batches."""
    engine = new_engine(how, accumulate=3)
    batches = [share(batch, rank, size) for batch in global_batches()]
    messages = []
    steps = engine.steps(batches)
    next(steps)
    engine.settle()
    try:
        engine.state_dict()
    except StepError as problem:
        messages.append(str(problem))
    try:
        engine.leave()
    except StepError as problem:
        messages.append(str(problem))
    steps.close()
    losses = engine.last_result.losses if engine.last_result is not None else ()
    weights = {name: value.tolist() for name, value in full_state_dict(engine.model).items()}
    return {"messages": messages, "updates": engine.updates, "model": weights, "losses": losses}


def by_count(rank: int, size: int, how: str, own: int, left: bool) -> dict[str, bool]:
    """Compare `accumulate_by="count"` with a loop by hand. All ranks but the first have `own`
    batches, and then repeat the last one with weight 0. With `left`, leave after one batch."""
    options: dict[str, Any] = {"accumulate": 3, "accumulate_by": "count", "clip_norm": 0.5}
    engine = new_engine(how, **options)
    batches = [share(batch, rank, size) for batch in global_batches()]
    mine = batches if rank == 0 else batches[:own]
    if left:
        steps = engine.steps(mine)
        next(steps)
        engine.leave()
        steps.close()
    else:
        engine.epoch(WithoutLength(mine))
    trained = 1 if left else len(batches)
    hand = new_engine(how)
    training = hand._builder
    model, optimizer = hand.model, training.parts.optimizer
    scheduler = training.schedule._scheduler
    assert scheduler is not None
    for index in range(trained):
        ends = (index + 1) % 3 == 0 or index + 1 == trained
        set_gradient_sync(model, ends)
        value = loss(model, mine[min(index, len(mine) - 1)])["loss"]
        (value / 3 if index < len(mine) else value * 0).backward()
        if ends:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    expected, found = full_state_dict(model), full_state_dict(engine.model)
    return {
        "same": all(torch.equal(found[name], expected[name]) for name in expected),
        "close": all(torch.allclose(found[name], expected[name]) for name in expected),
    }


def left_by_break(rank: int, size: int) -> dict[str, Any]:
    """Each rank leaves its loop with a `break`: none waits for another, and the result has the
    values that have arrived."""
    engine = new_engine("ddp")
    batches = [share(batch, rank, size) for batch in global_batches()]
    for number, _ in enumerate(engine.steps(batches)):
        if number == 2:
            break
    assert engine.last_result is not None
    return {"batches": engine.last_result.statistics.batches}


def exchanged(rank: int, size: int) -> dict[str, Any]:
    """What collectives return, and after which poll all ranks get what one requests."""
    ranks, device = Ranks.of(dist.group.WORLD), open_device("cpu")
    agreement = Agreement(ranks, device, every=2)
    agreed = []
    for update in range(9):
        request = 15 if rank == 1 and update >= 3 else 0
        agreed.append(agreement.poll(request, 0)[0])
    return {
        "all_gather": ranks.all_gather({"rank": rank, "text": "é" * rank * 9}, device.ledger),
        "broadcast": ranks.broadcast(["of", rank], device.ledger),
        "agreed": agreed,
        "settled": agreement.wait(rank, 1 - rank),
        "waits": sorted(reason.reason for reason in device.ledger.statistics().reasons),
    }


def time_limited(rank: int, size: int, folder: str) -> dict[str, Any]:
    """A run whose time limit is over at once, resumed without a limit, beside one without."""
    from headrace.translation import Trainer, TrainSettings
    from support.translation.trainers import SMALL, weights_of

    common: dict[str, Any] = {"cache": Path(folder, "cache"), "quiet": True}
    common["ranks"] = Ranks.of(dist.group.WORLD)
    found = {}
    for name, limit in (("unlimited", 0), ("limited", 1e-3)):
        values = {**SMALL, "data": str(Path(folder, "pairs.tsv")), "time_limit": limit}
        settings = TrainSettings.from_dict(values)
        result = Trainer.create(settings, project=Path(folder), name=name, **common).run()
        found[name] = [result.ended_early, result.updates, result.scores is not None]
    resumed = Trainer.resume(Path(folder, "limited"), changes={"time_limit": 0}, **common).run()
    found["resumed"] = [resumed.ended_early, resumed.updates, resumed.scores is not None]
    both = [weights_of(Path(folder, name)) for name in ("unlimited", "limited")]
    return {**found, "same weights": both[0] == both[1]}


def graphs_refused(rank: int, size: int) -> list[str | None]:
    engines = (new_engine("ddp"), new_engine("fsdp"))
    return [capture_obstacle(engine._builder.parts) for engine in engines]


def deferred_waits(rank: int, size: int) -> dict[str, int]:
    """How often values were summed over ranks: once for ten batches."""
    sums: list[int] = []
    plain = Ranks.all_reduce

    def counted(self: Ranks, tensor: torch.Tensor) -> Any:
        sums.append(tensor.numel())
        return plain(self, tensor)

    Ranks.all_reduce = counted  # type: ignore[method-assign]
    try:
        new_engine("ddp").epoch([share(batch, rank, size) for batch in global_batches()])
    finally:
        Ranks.all_reduce = plain  # type: ignore[method-assign]
    return {"weights": sums.count(1), "values": sum(number > 1 for number in sums)}


def on_cuda(rank: int, size: int, how: str, plan: str) -> dict[str, Any]:
    """Train on the GPU, over NCCL, on enough batches of one shape to capture a graph."""
    engine = new_engine(how, "cuda", plan=plan, clip_norm=0.5)
    batches = [share(global_batches()[0], rank, size)] * 24
    result = engine.epoch(batches)
    report = engine.graphs
    return {
        "losses": result.losses,
        "replays": result.statistics.replays,
        "why": None if report is None else report.why,
    }


# --- packed sentences -----------------------------------------------------------------------------


def packed(rank: int, size: int, how: str, accumulate: int, folder: str) -> dict[str, Any]:
    """Train a translation model on packed batches, stop within the second epoch, and resume."""
    pairs = IdPairs(Path(folder), "train")
    plan = PackedPlan(pairs.lengths, packed_size(pairs.lengths, 60, 12), seed=3)
    loader: Any = make_loader(pairs, plan, LoaderPlan(0), pin=False, share=(rank, size))
    results: list[Any] = []
    states: list[Any] = []

    def new() -> Engine:
        torch.manual_seed(0)
        sizes = ModelSettings(16, 2, 1, 1, 24, 0.0, max_length=16, attention_dropout=0.0)
        device = open_device("cpu")
        model = wrapped(Translator(sizes, 17, 17), how, device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return Engine(
            model, optimizer, translation_loss(), accumulate=accumulate, clip_norm=1.0, device="cpu"
        )

    def train(engine: Engine, epoch: int, first: int, stop: int | None) -> None:
        loader.sampler.set_epoch(epoch)
        loader.sampler.start_at(first)
        for info in engine.steps(loader, first_batch=first):
            if info.batch + 1 == stop:
                engine.settle()
                states.append(copy.deepcopy(engine.state_dict()))
                engine.leave()
        results.append(engine.last_result)

    engine = new()
    train(engine, 0, 0, None)
    train(engine, 1, 0, 3)
    resumed = new()
    first = resumed.load_state_dict(states[0])
    train(resumed, 1, first, None)
    loader.sampler.set_epoch(0)
    weights = full_state_dict(resumed.model)
    return {
        "first": first,
        "batches": len(plan.epoch(1)),
        "losses": [loss for result in results for loss in result.losses],
        "weights": [weight for result in results for weight in result.weights],
        "evaluated": resumed.evaluate(loader).mean_loss,
        "model": {name: value.tolist() for name, value in weights.items()},
    }


def packed_on_cuda(rank: int, size: int, how: str, folder: str) -> dict[str, Any]:
    """Train on packed batches of one shape with flex_attention, compiled and captured."""
    pairs = IdPairs(Path(folder), "train")
    size_of = packed_size(pairs.lengths, 100, 12)
    plan = PackedPlan(pairs.lengths, size_of)
    epoch, dataset = plan.epoch(0), plan.dataset(pairs)
    torch.manual_seed(0)
    sizes = ModelSettings(64, 4, 1, 1, 96, 0.0, max_length=16, attention_dropout=0.0)
    device = open_device("cuda")
    model = wrapped(Translator(sizes, 17, 17).to(device.torch_device), how, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    engine = Engine(model, optimizer, translation_loss(), plan="max", device=device)
    result = engine.epoch([dataset[epoch[at % len(epoch)]] for at in range(24)])
    assert engine.compiled is not None
    return {
        "losses": result.losses,
        "replays": result.statistics.replays,
        "uncompiled": engine.compiled.why,
    }


# --- checkpoints ----------------------------------------------------------------------------------


def killed(rank: int, size: int, how: str, options: dict[str, Any], folder: str, at: int) -> None:
    """Save after `at` batches of the second epoch, train on, and die as if by SIGKILL."""
    engine = new_engine(how, **options)
    batches = [share(batch, rank, size) for batch in global_batches()]
    engine.epoch(batches)
    writer = CheckpointWriter(engine.device, Path(folder), ranks=engine.ranks)
    for info in engine.steps(batches):
        if info.batch + 1 == at:
            engine.settle()
            writer.save({"engine": engine.state_dict(), "note": "kept"}, engine.updates, wait=True)
            engine.ranks.barrier(engine.device.ledger)
        if info.batch + 1 == at + 2:
            os._exit(9)


def resumed(rank: int, size: int, how: str, options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Resume from the newest checkpoint, whichever ranks wrote it."""
    engine = new_engine(how, **options)
    path = agreed_checkpoint(Path(folder), engine.ranks, engine.device.ledger)
    assert path is not None
    state = load_checkpoint(path, parts=engine.ranks.several)
    assert state["note"] == "kept"
    first = engine.load_state_dict(state["engine"])
    batches = [share(batch, rank, size) for batch in global_batches()]
    result = engine.epoch(batches[first:], first_batch=first)
    return {
        "path": path.name,
        "losses": result.losses,
        "evaluated": engine.evaluate(batches).mean_loss,
        "model": {name: value.tolist() for name, value in full_state_dict(engine.model).items()},
    }


def many(rank: int, size: int, jobs: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Run several jobs in the same processes, one after the other."""
    return [job(rank, size, *args) for job, args in jobs]


def cannot_write(rank: int, size: int, folder: str) -> str:
    """Rank 1 cannot write its file: all ranks raise its error."""
    engine = new_engine("ddp")
    writer = CheckpointWriter(engine.device, Path(folder), ranks=engine.ranks)
    writer.save({"engine": engine.state_dict()}, 1, wait=True)
    plain = tensor_file.write_tensors

    def full(path: Path, tensors: Any) -> Any:
        raise OSError(28, "No space left on device")

    if rank == 1:
        tensor_file.write_tensors = full
    try:
        writer.save({"engine": engine.state_dict()}, 2, wait=True)
    except CheckpointError as problem:
        return str(problem)
    finally:
        tensor_file.write_tensors = plain
        writer.close()
    return "no error"
