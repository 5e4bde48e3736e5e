"""Training loops with and without `speed_up`, compared bit for bit."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.device import Device

Parts = Sequence[nn.Module | torch.optim.Optimizer]
#: Makes a loop's parts, and its step: it gets the step's number and returns values to compare.
Made = tuple[Parts, Callable[[int], Any]]


def small(*sizes: int, dropout: float = 0.2) -> nn.Sequential:
    """A small network with dropout."""
    sizes = sizes or (4, 8, 2)
    layers: list[nn.Module] = []
    for one, other in itertools.pairwise(sizes):
        layers += [nn.Linear(one, other), nn.Dropout(dropout), nn.Tanh()]
    return nn.Sequential(*layers)


def fused(*models: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    parameters = [p for model in models for p in model.parameters()]
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def batch(device: Device, at: int, rows: int = 6, width: int = 4) -> torch.Tensor:
    source = torch.Generator().manual_seed(at)
    return torch.randn(rows, width, generator=source).to(device.torch_device)


def train(
    device: Device, make: Callable[[Device], Made], *, sped_up: bool, steps: int
) -> tuple[list[Any], hr.SpeedUpReport | None]:
    """What each step returned, and at the end all weights, buffers and gradients; the report."""
    torch.manual_seed(0)
    parts, step = make(device)
    scope: Any = contextlib.nullcontext()
    if sped_up:
        scope = hr.speed_up(*parts, plan="graph", device=device)
    with scope as handle:
        found = [host(step(at)) for at in range(steps)]
        for part in parts:
            if isinstance(part, nn.Module):
                found.append(host([*part.parameters(), *part.buffers()]))
                found.append(host([p.grad for p in part.parameters()]))
        return found, None if handle is None else handle.report()


def compare(
    device: Device, make: Callable[[Device], Made], steps: int = 7, *, exact: bool = True
) -> hr.SpeedUpReport:
    """Train both ways, and require that all is equal, or close if not `exact`. Returns the
    report."""
    plain, _ = train(device, make, sped_up=False, steps=steps)
    sped_up, report = train(device, make, sped_up=True, steps=steps)
    assert report is not None
    for at, (one, other) in enumerate(zip(sped_up, plain, strict=True)):
        same = repr(one) == repr(other) if exact else flat(one) == pytest.approx(flat(other))
        assert same, f"differs at {at}:\n{report}"
    return report


def host(value: Any) -> Any:
    """A nested value with the content of its tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist()
    if isinstance(value, dict):
        return {name: host(one) for name, one in value.items()}
    return [host(one) for one in value] if isinstance(value, list | tuple) else value


def flat(value: Any) -> list[Any]:
    """The numbers of a nested value."""
    if isinstance(value, list):
        return [number for one in value for number in flat(one)]
    return [value]
