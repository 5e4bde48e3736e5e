"""Modules and optimizers that a step uses and a search of its code has not found."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from headrace.capture import StepState, StepTracer
from headrace.engine.graphs.call_gradients import FoundGradients

# After this many watched calls of a shape that each use a new one, none is captured any more.
_MAX_NEW = 6


class ObservedOwners:
    """Those that watched calls of a step have used."""

    def __init__(self) -> None:
        self.found: list[torch.nn.Module | torch.optim.Optimizer] = []
        self._new: Counter[Hashable] = Counter()  # by key: calls that have used a new one

    def why_not(self, key: Hashable, before: int) -> str | None:
        """Call after a watched call, with how many were known `before`. Why such calls cannot be
        captured, if each uses another one; None if that is not known."""
        new = self.found[before:]
        self._new[key] += bool(new)
        if not new or self._new[key] != _MAX_NEW:
            return None
        return (
            f"each call makes another {type(new[0]).__name__} and uses it, and a graph would keep "
            "using the one that it was captured with: make it once, outside the step"
        )

    @contextmanager
    def noting(self, state: StepState, tracer: StepTracer, entry: FoundGradients) -> Iterator[None]:
        """Note modules and optimizers that the step uses and the search has not found. Modules that
        live no longer than the call, as `nn.MSELoss()(x, y)`, are none of its state. Do not trace
        optimizers: a plain one counts its steps in Python, its capturable form on the device. Do
        trace a closure that an optimizer's step calls: it is the user's."""
        known = {id(one) for one in (*state.all_modules(), *state.optimizers, *self.found)}
        modules: list[weakref.ref[torch.nn.Module]] = []

        def note(module: torch.nn.Module, *_: object) -> None:
            if id(module) not in known:
                known.add(id(module))
                modules.append(weakref.ref(module))

        def pause(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if id(optimizer) not in known:
                known.add(id(optimizer))
                self.found.append(optimizer)
            closures = [one for one in (*args[1:], *kwargs.values()) if callable(one)]
            tracer.pause()
            if not closures:
                entry.seen_by(optimizer)
                return None
            wrapped = {id(one): tracing(one, optimizer) for one in closures}
            return (
                tuple(wrapped.get(id(one), one) for one in args),
                {name: wrapped.get(id(one), one) for name, one in kwargs.items()},
            )

        def tracing(closure: Callable[[], Any], optimizer: Any) -> Callable[[], Any]:
            @functools.wraps(closure)
            def traced() -> Any:
                tracer.resume()
                result = closure()
                # The closure may have dropped the gradients that the step found.
                entry.seen_by(optimizer)
                tracer.pause()
                return result

            return traced

        def resume(*_: object) -> None:
            tracer.resume()

        handles = [
            register_optimizer_step_pre_hook(pause),
            register_optimizer_step_post_hook(resume),
        ]
        if not any(type(module).__name__ == "OptimizedModule" for module in state.modules):
            # Compiled modules would be compiled again for a hook.
            handles.append(register_module_forward_pre_hook(note))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.found += filter(None, (module() for module in modules))
