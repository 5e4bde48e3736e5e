"""The loss function compiled: fewer, larger kernels for the same work.

What is compiled is `loss(model, batch)`, model and loss together, so that the loss is fused too.
The first shape is compiled as it is; if another comes, once more with dynamic sizes, since PyTorch
recompiles a function a few times at most. Compiled code draws other dropout masks and rounds
differently: losses agree with those of the plain code within a tolerance, not bit for bit.

Inductor's analysis of memory tiling fails on some graphs with dynamic sizes (an assertion in its
`get_pw_red_splits`). Only the first compilation therefore has it; all later ones, and a second try
where the first compilation fails, leave it out, which costs such code a few percent of its speed.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal

import torch

from headrace.device import Device
from headrace.engine.forward import LossFunction
from headrace.user_cache import user_cache

log = logging.getLogger("headrace")
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch._higher_order_ops")
_TILING = "coalesce_tiling_analysis"
_SKIPPED = (
    "PyTorch's compiler skipped the whole step without an error; run with "
    "TORCH_LOGS=graph_breaks to see the line it could not compile"
)


@dataclass(frozen=True, slots=True)
class CompileReport:
    """Whether a plan's step runs as compiled code. `why` says why it does not; None if it does, or
    if no batch has been trained on yet. `compilations` counts the graphs that were compiled here,
    `seconds` is how long that took: both stay 0 where PyTorch still had the code."""

    compiled: bool
    why: str | None = None
    compilations: int = 0
    seconds: float = 0.0


class CompiledLoss:
    """A loss function that is compiled when it is first called, and for new shapes. If that
    cannot be done it is called as it is, from then on, and why is said once."""

    def __init__(self, loss: LossFunction, device: Device) -> None:
        self.plain = loss
        #: "careful" also knows what to do if compilation fails; the other two just call.
        self.mode: Literal["careful", "plain", "compiled"] = "careful"
        self.why_not: str | None = None
        self.seconds = 0.0
        self._compilations = 0
        self._ran_compiled = False
        self._device = device
        keep_compiled_code()
        self._function = _function_of(loss)
        self._compiled = torch.compile(self._function)

    def __call__(self, model: Any, batch: Any) -> Any:
        if self.mode == "plain" or self.why_not is not None:
            return self.plain(model, batch)
        if self.mode == "compiled":
            with _tiling_analysis(self._compilations == 0):
                return self._compiled(model, batch)
        return self._carefully(model, batch)

    def report(self) -> CompileReport:
        """What became of it so far."""
        compiled = self._ran_compiled and self.why_not is None
        return CompileReport(compiled, self.why_not, self._compilations, self.seconds)

    def _carefully(self, model: Any, batch: Any) -> Any:
        random_state = self._device.random_state()
        for analysed in self._attempts():
            before, start = _graphs_compiled(), time.perf_counter()
            try:
                with _strict_compiler(), _tiling_analysis(analysed):
                    returned = self._compiled(model, batch)
            except Exception as error:
                if not _is_the_compilers(error):
                    raise
                # Not the error itself: its traceback holds what the step had computed so far.
                problem = _first_line(error)
                self._device.set_random_state(random_state)
            else:
                self._note(_graphs_compiled() - before, time.perf_counter() - start)
                return returned
        self._give_up(problem)
        return self.plain(model, batch)

    def _attempts(self) -> tuple[bool, ...]:
        """With the tiling analysis, without it, or first with and then without."""
        if self._compilations:
            return (False,)
        return (True, False) if _can_skip_tiling_analysis() else (True,)

    def _note(self, graphs: int, took_s: float) -> None:
        if graphs:
            self._compilations += graphs
            self.seconds += took_s
            log.info("compiled the step in %.1f s (%.1f s in all)", took_s, self.seconds)
        if not self._ran_compiled:
            if not graphs and not _has_compiled_code(self._function):
                self._give_up(_SKIPPED)
            self._ran_compiled = True

    def _give_up(self, why: str) -> None:
        self.why_not = why
        self._device.warn_once(
            f"compile: {why}", "the step is not compiled and runs as it is: %s", why
        )


def loss_of(loss: LossFunction) -> LossFunction:
    """A loss function as the user wrote it."""
    return loss.plain if isinstance(loss, CompiledLoss) else loss


@contextmanager
def loss_as(loss: LossFunction, mode: Literal["plain", "compiled"]) -> Iterator[None]:
    """Inside the block the loss function, if it is one to be compiled, runs as it was written, or
    as it was compiled before."""
    if not isinstance(loss, CompiledLoss):
        yield
        return
    loss.mode = mode
    try:
        yield
    finally:
        loss.mode = "careful"


def keep_compiled_code() -> None:
    """Keep compiled code from run to run where it outlives a reboot, unless the user chose."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(user_cache() / "compiled"))


@contextmanager
def _strict_compiler() -> Iterator[None]:
    """Inside the block the compiler raises where it would quietly give up, and compiles backward
    at once, so that all it cannot do is known before any of the step has run."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    with ExitStack() as settings:
        if hasattr(dynamo, "fail_on_recompile_limit_hit"):
            settings.enter_context(dynamo.patch(fail_on_recompile_limit_hit=True))
        if hasattr(functorch, "force_non_lazy_backward_lowering"):
            settings.enter_context(functorch.patch(force_non_lazy_backward_lowering=True))
        yield


def _can_skip_tiling_analysis() -> bool:
    """Whether this PyTorch has the setting, and it is on."""
    import torch._inductor.config as inductor

    return bool(getattr(inductor.triton, _TILING, False))


@contextmanager
def _tiling_analysis(wanted: bool) -> Iterator[None]:
    """Inside the block, compile without the tiling analysis unless it is wanted."""
    if wanted or not _can_skip_tiling_analysis():
        yield
        return
    import torch._inductor.config as inductor

    with inductor.patch({f"triton.{_TILING}": False}):
        yield


def _function_of(loss: Any) -> LossFunction:
    """What is given to the compiler. Of an object that can be called, its method: PyTorch would
    wrap the object in a function that all objects share, whose compiled code tells nothing."""
    as_it_is = isinstance(loss, torch.nn.Module | functools.partial) or inspect.isroutine(loss)
    function: LossFunction = loss if as_it_is else loss.__call__
    return function


def _has_compiled_code(function: Any) -> bool:
    """Whether PyTorch keeps compiled code for a function, from an earlier engine, say. Where that
    cannot be told, yes."""
    from torch._dynamo import eval_frame

    entries = getattr(eval_frame, "_debug_get_cache_entry_list", None)
    if isinstance(function, torch.nn.Module):
        function = function.forward
    code = getattr(function, "__code__", None)
    return entries is None or not isinstance(code, CodeType) or len(entries(code)) > 0


def _first_line(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    more = " " + lines[1] if len(lines) > 1 and lines[0].endswith(":") else ""
    return f"{type(problem).__name__}: {lines[0] + more if lines else 'no message'}"


def _graphs_compiled() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _is_the_compilers(problem: BaseException | None) -> bool:
    """Whether an error, or one that it came from, is the compiler's and not the user's code's."""
    while problem is not None:
        if type(problem).__module__.startswith(_COMPILERS):
            return True
        problem = problem.__cause__
    return False
