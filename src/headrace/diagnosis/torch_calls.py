"""When a script was in its model, in backward or in an optimizer.

A captured step does not run the Python code in there. And what backward and optimizers do between
two launches is part of launching, however long it takes; only a model's forward may be slow for
the user's own reasons.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from headrace.diagnosis.replacing import replaced

TorchCallKind = Literal["forward", "backward", "optimizer"]


class TorchCall(NamedTuple):
    """A call of a module, of backward or of an optimizer, by the host's clock."""

    start_ns: int
    end_ns: int
    kind: TorchCallKind


class TorchCalls:
    """Notes the outermost calls of the thread that enters `noted`.

    A closure that an optimizer calls is the script's own code: of such a step, only what comes
    after the last module or backward pass counts.
    """

    def __init__(self) -> None:
        self._calls: list[TorchCall] = []
        self._thread: int | None = None
        self._is_inside = False
        self._step_since_ns: int | None = None

    @contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """For as long as `noted` may be entered: an optimizer's hooks cannot be added or removed
        inside one of them."""
        # A compiled optimizer step would trace the hooks, and not call them again.
        hidden: Any = torch.compiler.disable
        begins = register_optimizer_step_pre_hook(hidden(lambda *call: self._begin_step()))
        ends = register_optimizer_step_post_hook(hidden(lambda *call: self._end_step()))
        try:
            yield
        finally:
            begins.remove()
            ends.remove()

    @contextmanager
    def noted(self) -> Iterator[list[TorchCall]]:
        """The calls inside the block, each once it has ended."""
        self._calls, self._thread = [], threading.get_ident()
        functions: tuple[tuple[Any, str, TorchCallKind], ...] = (
            (torch.nn.Module, "__call__", "forward"),
            (torch.autograd, "backward", "backward"),
            (torch.autograd, "grad", "backward"),
            (torch.optim.Optimizer, "zero_grad", "optimizer"),
        )
        with ExitStack() as stack:
            for owner, name, kind in functions:
                noting = self._noting(getattr(owner, name), kind)
                stack.enter_context(replaced(owner, name, noting))
            try:
                yield self._calls
            finally:
                self._thread, self._step_since_ns = None, None

    def _noting(self, function: Callable[..., Any], kind: TorchCallKind) -> Callable[..., Any]:
        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside or threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            self._is_inside, start_ns = True, time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self._is_inside, end_ns = False, time.perf_counter_ns()
                self._calls.append(TorchCall(start_ns, end_ns, kind))
                if self._step_since_ns is not None:
                    self._step_since_ns = end_ns

        return noting

    def _begin_step(self) -> None:
        if threading.get_ident() == self._thread and not self._is_inside:
            self._step_since_ns = time.perf_counter_ns()

    def _end_step(self) -> None:
        since_ns, self._step_since_ns = self._step_since_ns, None
        if since_ns is not None:
            self._calls.append(TorchCall(since_ns, time.perf_counter_ns(), "optimizer"))
