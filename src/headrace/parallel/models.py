"""Models that train on several ranks: what they need that a plain model does not.

With DDP each rank has all weights; with FSDP2 each rank has a shard of them.
"""

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

Parallelism = Literal["plain", "ddp", "fsdp"]


def parallelism_of(model: torch.nn.Module) -> Parallelism:
    """How a model is distributed over ranks."""
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    fsdp1 = _loaded("torch.distributed.fsdp", "FullyShardedDataParallel")
    if fsdp1 is not None and any(isinstance(module, fsdp1) for module in model.modules()):
        raise StepError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1): expected "
            "fully_shard(model), or DistributedDataParallel"
        )
    if next(_sharded_modules(model), None) is None:
        return "plain"
    if not isinstance(model, _loaded("torch.distributed.fsdp", "FSDPModule") or ()):
        raise StepError(
            "only parts of the model are sharded: call fully_shard(model) on the whole model after "
            "its parts"
        )
    return "fsdp"


def device_of(model: torch.nn.Module) -> torch.device:
    """The device that a model's weights are on."""
    if not isinstance(model, torch.nn.Module):
        raise StepError(f"model is a {type(model).__name__}: expected a torch.nn.Module")
    for parameter in model.parameters():
        return parameter.device
    return torch.device("cpu")


def ranks_of(model: torch.nn.Module) -> Ranks:
    """The ranks that train a model."""
    parallelism = parallelism_of(model)
    if parallelism == "ddp":
        assert isinstance(model, DistributedDataParallel)
        return Ranks.of(model.process_group)
    if parallelism == "fsdp":
        shard: Any = next(p for p in model.parameters() if is_sharded(p))
        mesh = shard.device_mesh
        if mesh.ndim == 1:
            return Ranks.of(mesh.get_group())
        if mesh.size() == dist.get_world_size():  # HSDP: sharded within nodes, replicated across
            return Ranks.of(dist.group.WORLD)
        raise StepError(
            f"the model is sharded over a mesh of {tuple(mesh.shape)}, with "
            f"{dist.get_world_size()} ranks in all: expected one dimension, or all ranks"
        )
    return SINGLE


def wrap_ddp(model: torch.nn.Module, group: Any = None) -> DistributedDataParallel:
    """Wrap a model with DDP. Its buffers must never change: they are not broadcast each step."""
    accepted = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in accepted else "broadcast_buffers"
    options: dict[str, Any] = {name: False, "process_group": group}
    return DistributedDataParallel(model, **options)


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DDP, or the model itself."""
    if isinstance(model, DistributedDataParallel):
        inner: torch.nn.Module = model.module
        return inner
    return model


def set_gradient_sync(model: torch.nn.Module, wanted: bool) -> None:
    """Choose whether the next backward averages gradients over ranks. Call before the forward."""
    if isinstance(model, DistributedDataParallel):
        # As `no_sync()` does. Its `with` block would have to span forward and backward, which are
        # in different functions.
        model.require_backward_grad_sync = wanted
        return
    for module in _sharded_modules(model):
        module.set_requires_gradient_sync(wanted, recurse=False)


def reshard(model: torch.nn.Module) -> None:
    """Free the full weights that a forward without a backward gathered: they would go stale."""
    for module in _sharded_modules(model):
        module.reshard()


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put the model in eval mode inside the block. Afterwards each module has its own mode again:
    one that was frozen in eval mode stays so."""
    modes = [(module, module.training) for module in model.modules()]
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)  # a model may override it
        for module, mode in modes:
            module.training = mode
        reshard(model)


# --- shards ---------------------------------------------------------------------------------------


def is_sharded(tensor: torch.Tensor) -> bool:
    kind = _loaded("torch.distributed.tensor", "DTensor")
    return kind is not None and isinstance(tensor, kind)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor, sharing its memory. A plain tensor is returned as it is."""
    if not is_sharded(tensor):
        return tensor
    shard: torch.Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return shard


def local_shards(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [local_shard(tensor) for tensor in tensors]


def shard_region(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The offset of this rank's shard in the full tensor, and the shard's shape."""
    chunks: Any = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    if not chunks:  # this rank has no rows of it
        return (0,) * tensor.dim(), (0, *tensor.shape[1:])
    return tuple(chunks[0].offsets), tuple(chunks[0].sizes)


def shard_like(example: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """A tensor sharded as `example` is, with `shard` as this rank's shard."""
    tensor: Any = example
    result: torch.Tensor = type(tensor).from_local(
        shard,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return result


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, on every rank. All ranks must call this."""
    if not is_sharded(tensor):
        return tensor
    full: torch.Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return full


def full_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's state dict with full tensors, on every rank. All ranks must call this."""
    return {name: full_tensor(value) for name, value in unwrap(model).state_dict().items()}


def _sharded_modules(model: torch.nn.Module) -> Iterator[Any]:
    kind = _loaded("torch.distributed.fsdp", "FSDPModule")
    if kind is not None:
        yield from (module for module in model.modules() if isinstance(module, kind))


def _loaded(module: str, name: str) -> Any:
    """A class of PyTorch's, or None if its module was never imported. Then no object can be an
    instance of it; importing it here would take a second."""
    return getattr(sys.modules.get(module), name, None)
