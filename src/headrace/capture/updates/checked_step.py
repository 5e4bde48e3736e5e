"""An optimizer's step that is compared with its replay: it runs eagerly on clones of weights,
gradients and state."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from headrace.capture.reports.differences import Differences, Pair
from headrace.device import Device


@contextlib.contextmanager
def checked_step(
    differences: Differences, device: Device, optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    """Compare a step, which is replayed in the block."""
    if not differences.begins():
        yield
        return
    with device.ledger.waiting("check"):
        twin, weights = _twin(optimizer)
    step: Any = type(twin).step
    if getattr(step, "hooked", False):  # hooks are for the loop's own steps
        step = step.__wrapped__
    step(twin)
    yield
    pairs: list[Pair] = []
    states: list[Pair] = []
    for number, (weight, other) in enumerate(weights):
        pairs.append((f"weight {number}", weight.detach(), other.detach()))
        for name, value in twin.state[other].items():
            mine = optimizer.state[weight].get(name)
            if isinstance(value, torch.Tensor) and isinstance(mine, torch.Tensor):
                states.append((f"{name} of weight {number}", mine, value.to(mine.device)))
    differences.compare(pairs)
    differences.compare(states)


def _twin(
    optimizer: torch.optim.Optimizer,
) -> tuple[torch.optim.Optimizer, list[tuple[torch.Tensor, torch.Tensor]]]:
    """An optimizer with clones of weights, gradients and state, and the pairs of weights."""
    kind = type(optimizer)
    twin: Any = object.__new__(kind)
    vars(twin).update({name: one for name, one in vars(optimizer).items() if name != "step"})
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    groups: list[dict[str, Any]] = []
    state: dict[Any, dict[str, Any]] = defaultdict(dict)
    for group in optimizer.param_groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        clones = []
        for weight in group["params"]:
            clone = weight.detach().clone().requires_grad_(weight.requires_grad)
            if weight.grad is not None:
                clone.grad = weight.grad.detach().clone()
            clones.append(clone)
            pairs.append((weight, clone))
            if weight in optimizer.state:
                own = optimizer.state[weight]
                state[clone] = {n: _cloned(one, on_device) for n, one in own.items()}
        groups.append({**group, "params": clones})
    vars(twin).update(param_groups=groups, state=state)
    return twin, pairs


def _cloned(value: Any, on_device: bool) -> Any:
    """A value of an optimizer's state. One that is not capturable counts steps on the host."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if on_device or value.dim() else value.to("cpu", copy=True)
