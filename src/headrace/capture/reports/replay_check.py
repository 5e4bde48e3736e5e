"""The first replays of a part, each compared with the same call run eagerly.

A model's call runs eagerly right after its replay, over fresh aliases of the weights, on clones of
its arguments and of the buffers, and with the random numbers that the replay began with. Its
outputs and buffers are compared at once, its gradients when the backward is replayed, for the same
gradients of the outputs. An optimizer's step runs eagerly on clones of weights, gradients and
state. What the loop has is what the replay has made: a comparison costs time and memory alone.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from headrace.capture.models.checked_call import CheckedCall
from headrace.capture.reports.differences import CheckReport, Differences, Pair
from headrace.device import Device


class ReplayCheck:
    """Compares the first `count` replays of a part."""

    def __init__(self, device: Device, count: int) -> None:
        self._device, self._left = device, count
        self._differences = Differences(device)

    def report(self) -> CheckReport | None:
        """What was found; None if nothing was compared."""
        return self._differences.report()

    @property
    def replays(self) -> int:
        """How many replays were compared."""
        return self._differences.replays

    def _begins(self) -> bool:
        """Whether to compare the replay that comes now. Counts it."""
        if self._left <= 0:
            return False
        self._left -= 1
        self._differences.next_replay()
        return True

    def call(self, model: torch.nn.Module, host_state: torch.Tensor | None) -> CheckedCall | None:
        """A replay of a model begins. None: it is not compared. `host_state` is the random state of
        the host before it, if it draws there."""
        if not self._begins():
            return None
        return CheckedCall(self._differences, self._device, model, host_state)

    @contextlib.contextmanager
    def step(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Compare a step, which is replayed in the block."""
        if not self._begins():
            yield
            return
        with self._device.ledger.waiting("check"):
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
        self._differences.compare(pairs)
        self._differences.compare(states)


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
