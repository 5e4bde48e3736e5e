"""The loss function, compiled: the same work in fewer and larger kernels.

`torch.compile` is given `loss(model, batch)`, model and loss together, so that the loss is fused
too. The first shape is compiled with its own sizes. For a second shape the function is compiled
once more, with dynamic sizes, since PyTorch limits how often it recompiles a function. Compiled
code draws other dropout masks and rounds differently: its losses agree with those of the plain
code within a tolerance, not bit for bit.

Inductor's tiling analysis fails on some graphs with dynamic sizes (an assertion in its
`get_pw_red_splits`). So only the first compilation uses it. All later ones, and a second attempt
if the first compilation fails, go without, which costs a few percent of speed.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headrace.capture import Known, Reader, describe_own_graphs, recurrent_obstacle
from headrace.device import Device
from headrace.engine.loss.compiler import (
    CompilerCounts,
    can_skip_tiling_analysis,
    has_compiled_code,
    is_compiler_error,
    set_cache_folder,
    strict_compiler,
    tiling_analysis,
)
from headrace.engine.loss.forward import LossFunction
from headrace.parallel import unwrap

log = logging.getLogger("headrace")
_SKIPPED = (
    "PyTorch's compiler skipped the whole step without an error: run with "
    "TORCH_LOGS=graph_breaks to see the line that it could not compile"
)


@dataclass(frozen=True, slots=True)
class CompileReport:
    """Whether a plan's step runs as compiled code. `why` says why it does not; None if it does, or
    if no batch was trained on yet. `compilations` counts the graphs that `torch.compile` compiled
    for this engine, `seconds` is the time that took. Both stay 0 if PyTorch still had the code.
    `from_cache` counts those of them whose code was on disk, from an earlier process: they were
    only traced."""

    compiled: bool
    why: str | None = None
    compilations: int = 0
    seconds: float = 0.0
    from_cache: int = 0


class CompiledLoss:
    """A loss function that is compiled at its first call, and for new shapes. If compilation fails,
    it runs uncompiled from then on, and the log says why, once. `obstacle` says why it is not worth
    trying."""

    def __init__(self, loss: LossFunction, device: Device, obstacle: str | None = None) -> None:
        self.plain = loss
        #: "fallback" runs compiled code, or the plain code if compilation fails.
        self.mode: Literal["fallback", "plain", "compiled"] = "fallback"
        self.why_uncompiled: str | None = None
        self.seconds = 0.0
        self._compilations = self._from_cache = 0
        self._ran_compiled = False
        self._device = device
        set_cache_folder()
        self._function = _function_of(loss)
        self._compiled = torch.compile(self._function)
        if obstacle is not None:
            self._give_up(obstacle)

    def __call__(self, model: Any, *inputs: Any) -> Any:
        if self.mode == "plain" or self.why_uncompiled is not None:
            return self.plain(model, *inputs)
        if self.mode == "compiled":
            with tiling_analysis(self._compilations == 0):
                return self._compiled(model, *inputs)
        return self._call_or_fall_back(model, *inputs)

    def give_up(self, why: str) -> None:
        """Run as it was written from now on."""
        self.why_uncompiled = why
        log.info("the step is not compiled any more: %s", why)

    def report(self) -> CompileReport:
        """Whether compiled code has run so far, and if not, why."""
        compiled = self._ran_compiled and self.why_uncompiled is None
        return CompileReport(
            compiled, self.why_uncompiled, self._compilations, self.seconds, self._from_cache
        )

    def _call_or_fall_back(self, model: Any, *inputs: Any) -> Any:
        random_state = self._device.random_state()
        for with_analysis in self._attempts():
            before, start = CompilerCounts.now(), time.perf_counter()
            try:
                with strict_compiler(), tiling_analysis(with_analysis):
                    returned = self._compiled(model, *inputs)
            except Exception as error:
                if not is_compiler_error(error):
                    raise
                # Keep only its text: its traceback keeps alive what the step has computed so far.
                problem = _first_line(error)
                self._device.set_random_state(random_state)
            else:
                self._count(CompilerCounts.since(before), time.perf_counter() - start)
                return returned
        self._give_up(problem)
        return self.plain(model, *inputs)

    def _attempts(self) -> tuple[bool, ...]:
        """Whether each attempt to compile uses the tiling analysis."""
        if self._compilations:
            return (False,)
        return (True, False) if can_skip_tiling_analysis() else (True,)

    def _count(self, new: CompilerCounts, took_s: float) -> None:
        if new.graphs:
            self._compilations += new.graphs
            self.seconds += took_s
            what = "compiled the step"
            if new.from_cache:
                self._from_cache += new.graphs
                what = "compiled nothing: took the step from the compiler's cache"
            log.info("%s in %.1f s (%.1f s in all)", what, took_s, self.seconds)
        if not self._ran_compiled:
            if not new.graphs and not has_compiled_code(self._function):
                self._give_up(_SKIPPED)
            self._ran_compiled = True

    def _give_up(self, why: str) -> None:
        self.why_uncompiled = why
        self._device.warn_once(
            f"compile: {why}", "the step is not compiled and runs as it is: %s", why
        )


def compile_obstacle(device: Device, loss: LossFunction, model: torch.nn.Module) -> str | None:
    """Why a loss function is better not compiled, as far as that is known before; else None."""
    reader, plain = Reader(device.holds, loss), unwrap(model)
    reader.function(loss, (Known(plain, type(plain).__name__),))
    reader.owner(plain)
    found = reader.owners
    if found.own_graphs is not None:  # compiled again, it would lose them
        return describe_own_graphs(found.own_graphs)
    return recurrent_obstacle(found.modules)


def uncompiled(loss: LossFunction) -> LossFunction:
    """The loss function as the user wrote it."""
    return loss.plain if isinstance(loss, CompiledLoss) else loss


@contextmanager
def loss_mode(loss: LossFunction, mode: Literal["plain", "compiled"]) -> Iterator[None]:
    """Inside the block a `CompiledLoss` runs as it was written ("plain") or as it was compiled,
    without a fallback. Other loss functions run as they are."""
    if not isinstance(loss, CompiledLoss):
        yield
        return
    loss.mode = mode
    try:
        yield
    finally:
        loss.mode = "fallback"


def _function_of(loss: Any) -> LossFunction:
    """What is given to the compiler. For a callable object this is its `__call__` method: PyTorch
    would wrap the object in a function that all such objects share, and `has_compiled_code` could
    not tell them apart."""
    directly = isinstance(loss, torch.nn.Module | functools.partial) or inspect.isroutine(loss)
    function: LossFunction = loss if directly else loss.__call__
    return function


def _first_line(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    more = " " + lines[1] if len(lines) > 1 and lines[0].endswith(":") else ""
    return f"{type(problem).__name__}: {lines[0] + more if lines else 'no message'}"
