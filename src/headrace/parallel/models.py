"""Models that are spread over ranks: DDP's, whose weights are on each of them, and FSDP2's, of
whose weights each rank has a shard. What they differ in from a plain model is here."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from headrace.errors import StepError
from headrace.parallel.ranks import SINGLE, Ranks

Spread = Literal["plain", "ddp", "fsdp"]


def spread_of(model: torch.nn.Module) -> Spread:
    """How a model is spread."""
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    older = _known("torch.distributed.fsdp", "FullyShardedDataParallel")
    if older is not None and any(isinstance(module, older) for module in model.modules()):
        raise StepError(
            "the model is wrapped in FullyShardedDataParallel, the older FSDP: expected "
            "fully_shard(model), or DistributedDataParallel"
        )
    if next(_sharded_modules(model), None) is None:
        return "plain"
    if not isinstance(model, _known("torch.distributed.fsdp", "FSDPModule") or ()):
        raise StepError(
            "only parts of the model are sharded: call fully_shard(model) on the whole, after its "
            "parts"
        )
    return "fsdp"


def where(model: torch.nn.Module) -> torch.device:
    """The device that a model lies on."""
    if not isinstance(model, torch.nn.Module):
        raise StepError(f"model is a {type(model).__name__}: expected a torch.nn.Module")
    for parameter in model.parameters():
        return parameter.device
    return torch.device("cpu")


def ranks_of(model: torch.nn.Module) -> Ranks:
    """The ranks that a model is spread over."""
    spread = spread_of(model)
    if spread == "ddp":
        assert isinstance(model, DistributedDataParallel)
        return Ranks.of(model.process_group)
    if spread == "fsdp":
        shard: Any = next(p for p in model.parameters() if is_sharded(p))
        mesh = shard.device_mesh
        if mesh.ndim == 1:
            return Ranks.of(mesh.get_group())
        if mesh.size() == dist.get_world_size():  # sharded within nodes, replicated among them
            return Ranks.of(dist.group.WORLD)
        raise StepError(
            f"the model is sharded over a mesh of {tuple(mesh.shape)}, with "
            f"{dist.get_world_size()} ranks in all: expected a mesh of one dimension, or of all"
        )
    return SINGLE


def data_parallel(model: torch.nn.Module, group: Any = None) -> DistributedDataParallel:
    """DDP around a model whose buffers, if any, never change: they are not sent each step."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {name: False, "process_group": group}
    return DistributedDataParallel(model, **options)


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself, without DDP around it."""
    if isinstance(model, DistributedDataParallel):
        inner: torch.nn.Module = model.module
        return inner
    return model


def synchronise_gradients(model: torch.nn.Module, wanted: bool) -> None:
    """Whether the next batch's backward averages gradients over ranks, or keeps them to itself.
    To be said before its forward."""
    if isinstance(model, DistributedDataParallel):
        # What `no_sync()` does; a block cannot reach from one batch's forward into its backward.
        model.require_backward_grad_sync = wanted
        return
    for module in _sharded_modules(model):
        module.set_requires_gradient_sync(wanted, recurse=False)


def reshard(model: torch.nn.Module) -> None:
    """Let go of whole weights that a forward without a backward left: they would hide changes."""
    for module in _sharded_modules(model):
        module.reshard()


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block the model is in eval mode; after it, each module is as it was: one that is
    frozen in eval mode stays so."""
    modes = [(module, module.training) for module in model.modules()]
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)  # which a model may have made its own
        for module, mode in modes:
            module.training = mode
        reshard(model)


# --- shards ---------------------------------------------------------------------------------------


def is_sharded(tensor: torch.Tensor) -> bool:
    kind = _known("torch.distributed.tensor", "DTensor")
    return kind is not None and isinstance(tensor, kind)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: the very memory. Of a plain tensor, all of it."""
    if not is_sharded(tensor):
        return tensor
    part: torch.Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


def locals_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [local(tensor) for tensor in tensors]


def place(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where a shard begins in its whole tensor, and its shape."""
    chunks: Any = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    if not chunks:  # a rank without a row of it
        return (0,) * tensor.dim(), (0, *tensor.shape[1:])
    return tuple(chunks[0].offsets), tuple(chunks[0].sizes)


def shard_like(example: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A tensor that is sharded as `example` is, of which this rank's part is `part`."""
    tensor: Any = example
    result: torch.Tensor = type(tensor).from_local(
        part,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return result


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, on every rank: all of them have to ask for it."""
    if not is_sharded(tensor):
        return tensor
    full: torch.Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return full


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's state by name, whole, on every rank: all of them have to ask for it."""
    return {name: whole(value) for name, value in bare(model).state_dict().items()}


def _sharded_modules(model: torch.nn.Module) -> Iterator[Any]:
    kind = _known("torch.distributed.fsdp", "FSDPModule")
    if kind is not None:
        yield from (module for module in model.modules() if isinstance(module, kind))


def _known(module: str, name: str) -> Any:
    """A class of PyTorch's, if the program has loaded it: else nothing can be one, and loading it
    takes a second."""
    return getattr(sys.modules.get(module), name, None)
