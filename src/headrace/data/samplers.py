"""The samplers and random generators inside a loader."""

from __future__ import annotations

from typing import Any

import torch

_MAX_SAMPLERS = 8


def with_samplers(loader: Any) -> list[Any]:
    """A loader and all samplers inside it. A batch sampler has a sampler of its own, and Accelerate
    wraps another batch sampler around it."""
    found = [loader]
    for owner in found:
        for name in ("sampler", "batch_sampler"):
            part = getattr(owner, name, None)
            if part is not None and all(part is not other for other in found):
                found.append(part)
        if len(found) > _MAX_SAMPLERS:  # an object that has every attribute
            break
    return found


def generators_of(loader: Any) -> list[torch.Generator]:
    """The `torch.Generator`s that were passed to a DataLoader and its samplers."""
    found = [getattr(owner, "generator", None) for owner in with_samplers(loader)]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())
