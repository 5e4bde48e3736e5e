"""Finds the models of a training loop: every outermost call of a module that trains."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from headrace.replacing import replaced

#: A replay takes the host about as long as it takes to launch so many layers.
_MIN_LAYERS = 4
#: Modules of PyTorch's compiler that remember what a module's `__call__` was when they were loaded:
#: they enter `forward` directly as long as it is the same.
_COMPILER = ("torch._dynamo.utils", "torch._dynamo.variables.nn_module")
_COMPILER_NAME = "unpatched_nn_module_call"


class _ModuleCalls(threading.local):
    """Whether a module is being called in this thread."""

    inside: bool = False


_calls = _ModuleCalls()


def is_inside_a_module() -> bool:
    """Whether this thread is in the call of a module that was watched."""
    return _calls.inside


@contextmanager
def watch_models(
    on_call: Callable[[torch.nn.Module], object], after_call: Callable[[], object]
) -> Iterator[None]:
    """Call `on_call` before each outermost call of a module that may be trained, and `after_call`
    after it."""
    truth: Any = torch.nn.Module.__call__

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # First what the compiler takes for a constant: it cannot trace the second.
        if torch.compiler.is_compiling() or _calls.inside or not _is_training_call(self):
            return truth(self, *args, **kwargs)
        _calls.inside = True
        try:
            on_call(self)
            return truth(self, *args, **kwargs)
        finally:
            _calls.inside = False
            after_call()

    with ExitStack() as stack:
        stack.enter_context(replaced(torch.nn.Module, "__call__", call))
        for name in _COMPILER:
            module = sys.modules.get(name)
            if module is not None and getattr(module, _COMPILER_NAME, None) is truth:
                stack.enter_context(replaced(module, _COMPILER_NAME, call))
        yield


def _is_training_call(module: torch.nn.Module) -> bool:
    """Whether this call of a module is one of a step that trains, and worth a closer look."""
    return (
        module.training
        and torch.is_grad_enabled()
        and torch._C._get_tracing_state() is None
        and torch._C._current_graph_task_id() == -1  # in a backward, as checkpointing does
        and not isinstance(module, torch.nn.DataParallel)
        and any(one.requires_grad for one in module.parameters())
    )


def why_not(module: torch.nn.Module) -> str | None:
    """Why it is not worth while, or impossible, to capture a model; None if it may be."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule, whose code is not Python"
    if getattr(module, "_is_replica", False):
        return "it is a replica that DataParallel makes anew in each step"
    layers = sum(1 for one in module.modules() if next(one.children(), None) is None)
    if layers < _MIN_LAYERS and sum(1 for _ in module.parameters()) < _MIN_LAYERS:
        return "it is so small that a replay would take as long as its kernels"
    return None
