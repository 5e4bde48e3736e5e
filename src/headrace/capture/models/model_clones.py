"""Clones of a model's tensors that are no parameters, for a forward that runs once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class ModelClones:
    """Clones of the buffers of a model, and of tensors that are attributes, as they are now."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._clones: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
        for name, holder, key in _tensors_of(model):
            one = holder[key]
            self._clones.setdefault(id(one), (name, one, one.clone()))

    def pairs(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Each tensor with its name and its clone."""
        return list(self._clones.values())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """In the block the model has the clones, and what it writes there reaches only them."""
        undo = []
        try:
            for _, holder, key in _tensors_of(self._model):
                real = holder[key]
                if id(real) in self._clones:
                    undo.append((holder, key, real))
                    holder[key] = self._clones[id(real)][2]
            yield
        finally:
            for holder, key, real in undo:
                holder[key] = real


def _tensors_of(model: torch.nn.Module) -> list[tuple[str, dict[str, Any], str]]:
    """A model's tensors that are no parameters: their names, and where they are kept."""
    return [
        (f"{path}.{key}" if path else key, holder, key)
        for path, module in model.named_modules()
        for holder in (module._buffers, vars(module))
        for key, value in holder.items()
        if isinstance(value, torch.Tensor) and not value.requires_grad
    ]
