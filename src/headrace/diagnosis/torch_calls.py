"""When a script was in its model, in backward or in an optimizer.

A captured step does not run the Python code in there. And what PyTorch does there between two
launches is part of launching, even if it takes milliseconds.
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

from headrace.replacing import replaced

TorchCallKind = Literal["forward", "backward", "optimizer"]


class TorchCall(NamedTuple):
    """A call of a module, of backward or of an optimizer, by the host's clock."""

    start_ns: int
    end_ns: int
    kind: TorchCallKind


class TorchCalls:
    """Notes the outermost calls of the thread that enters `noted`; if that is one of autograd's,
    where an optimizer in backward steps, those of the main thread.

    A closure that an optimizer calls is the script's own code: of such a step, only what comes
    after the last module or backward pass counts.
    """

    def __init__(self) -> None:
        self._calls: list[TorchCall] = []
        self._thread: int | None = None
        self._is_inside = False
        self._steps = 0  # of optimizers that call each other
        self._step_since_ns = 0
        self._on_edge: Callable[[str], object] | None = None

    @contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """Watch the steps of all optimizers inside the block. Enter it before `noted`: an
        optimizer's hooks cannot be added or removed while one of them runs."""
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
    def noted(self, on_edge: Callable[[str], object] | None = None) -> Iterator[list[TorchCall]]:
        """Yield the list of calls made inside the block. A call is added when it ends. `on_edge` is
        called when one begins, with its kind, and when it has ended, with "after" its kind."""
        is_autograds = isinstance(threading.current_thread(), threading._DummyThread)
        thread = threading.main_thread() if is_autograds else threading.current_thread()
        self._calls, self._thread, self._steps = [], thread.ident, 0
        self._on_edge = on_edge
        functions: tuple[tuple[Any, str, TorchCallKind], ...] = (
            (torch.nn.Module, "__call__", "forward"),
            (torch.autograd, "backward", "backward"),
            (torch.autograd, "grad", "backward"),
            (torch.optim.Optimizer, "zero_grad", "optimizer"),
            (torch.nn.utils, "clip_grad_norm_", "optimizer"),
            (torch.amp.GradScaler, "unscale_", "optimizer"),
        )
        with ExitStack() as stack:
            for owner, name, kind in functions:
                noting = self._noting(getattr(owner, name), kind)
                stack.enter_context(replaced(owner, name, noting))
            try:
                yield self._calls
            finally:
                self._thread = self._on_edge = None

    def _tell(self, edge: str) -> None:
        if self._on_edge is not None:
            self._on_edge(edge)

    def _noting(self, function: Callable[..., Any], kind: TorchCallKind) -> Callable[..., Any]:
        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # it is traced, not called
                return function(*args, **kwargs)
            if self._is_inside or threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            self._tell(kind)
            self._is_inside, start_ns = True, time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self._is_inside, end_ns = False, time.perf_counter_ns()
                self._calls.append(TorchCall(start_ns, end_ns, kind))
                self._step_since_ns = end_ns
                self._tell(f"after {kind}")

        return noting

    def _begin_step(self) -> None:
        if threading.get_ident() == self._thread and not self._is_inside:
            self._steps += 1
            if self._steps == 1:
                self._tell("optimizer")
                self._step_since_ns = time.perf_counter_ns()

    def _end_step(self) -> None:
        if threading.get_ident() != self._thread or self._is_inside or self._steps == 0:
            return
        self._steps -= 1
        if self._steps == 0:
            now_ns = time.perf_counter_ns()
            self._calls.append(TorchCall(self._step_since_ns, now_ns, "optimizer"))
            self._tell("after optimizer")
