"""What `speed_up` is given: the parts' names and device, and the parts of models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from headrace.capture.parts.accelerated import optimizer_inside

# Replaying a graph takes the host as long as launching the kernels of a few layers.
_MIN_LAYERS = 8


def large_children(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The largest parts of a model that are called, and are large enough for a graph to pay."""
    for name, child in model.named_children():
        layers = sum(1 for one in child.modules() if next(one.children(), None) is None)
        if layers < _MIN_LAYERS or next(child.parameters(), None) is None:
            continue
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            yield from ((f"{name}.{inner}", one) for inner, one in large_children(child))
        else:
            yield name, child


def device_of(
    models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]
) -> torch.device:
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            return torch.device(tensor.device)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                found: torch.device = tensor.device
                return found
    return torch.device("cpu")


def _inside(part: object) -> object:
    return optimizer_inside(part) if isinstance(part, torch.optim.Optimizer) else part


def names_of(parts: Iterable[object]) -> dict[int, str]:
    """A name for each part: its type, numbered where there are several."""
    types_of = {id(one): type(_inside(one)).__name__ for one in parts}
    names: dict[int, str] = {}
    for key, kind in types_of.items():
        alike = [other for other, one in types_of.items() if one == kind]
        names[key] = kind if len(alike) == 1 else f"{kind} {alike.index(key) + 1}"
    return names
