"""Stored tensors, sharded like those that they are loaded into."""

from __future__ import annotations

from typing import Any

import torch

from headrace.checkpoint import StoredTensor
from headrace.parallel import is_sharded, shard_like, shard_region


def for_this_optimizer(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A stored optimizer state for this optimizer: sharded like its parameters, and with its own
    `capturable`, which depends on the plan and device and not on what was learned."""
    groups = [dict(group) for group in state["param_groups"]]
    for group, own in zip(groups, optimizer.param_groups, strict=False):
        if "capturable" in own:
            group["capturable"] = own["capturable"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    by_parameter = {
        number: _for_parameter(values, parameters[number])
        if isinstance(number, int) and number < len(parameters)
        else values
        for number, values in state["state"].items()
    }
    return {**state, "state": by_parameter, "param_groups": groups}


def _for_parameter(values: Any, parameter: torch.Tensor) -> Any:
    """An optimizer's stored state of one parameter, sharded if the parameter is."""
    if not isinstance(values, dict):
        return values
    placed = {
        name: sharded_like(value, parameter if _shape(value) == tuple(parameter.shape) else None)
        for name, value in values.items()
    }
    # Copies: PyTorch's optimizers write into the tensors that they are given.
    return {
        name: value.clone() if isinstance(value, torch.Tensor) and value is values[name] else value
        for name, value in placed.items()
    }


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor | StoredTensor) else None


def sharded_like(stored: Any, target: torch.Tensor | None) -> Any:
    """A stored tensor, sharded like `target`: the whole tensor, or this rank's part of it."""
    if target is None or not is_sharded(target) or _shape(stored) != tuple(target.shape):
        return stored.whole() if isinstance(stored, StoredTensor) else stored
    if is_sharded(stored):
        return stored
    offset, shape = shard_region(target)
    if isinstance(stored, StoredTensor):
        part = stored.part(offset, shape)
    else:
        ends = (begin + size for begin, size in zip(offset, shape, strict=True))
        part = stored[tuple(map(slice, offset, ends))]
    return shard_like(target, part.to(target.device))
