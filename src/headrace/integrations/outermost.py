"""Which modules a training loop calls itself, not from inside another module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

# A graph of fewer layers costs the host as much as launching them.
_MIN_LAYERS = 3


class OutermostCalls:
    """The modules whose outermost call, in training, happened inside of `watch()`: in the order of
    their first calls. Modules without trained parameters, and very small ones, are left out."""

    def __init__(self) -> None:
        self.modules: list[torch.nn.Module] = []
        self._inside: list[torch.nn.Module] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Sees all calls of modules, in all threads."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            self._inside.clear()

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if not self._inside and self._counts(module):
            self.modules.append(module)
        self._inside.append(module)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        while self._inside and self._inside.pop() is not module:
            pass

    def _counts(self, module: torch.nn.Module) -> bool:
        return (
            module.training
            and torch.is_grad_enabled()
            and torch._C._current_graph_task_id() == -1  # checkpointing calls modules again
            and any(one.requires_grad for one in module.parameters())
            and sum(1 for one in module.modules() if next(one.children(), None) is None)
            >= _MIN_LAYERS
            and not any(module is one for one in self.modules)
        )
