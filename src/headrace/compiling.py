"""The loss function compiled: fewer, larger kernels for the same work.

What is compiled is `loss(model, batch)`, model and loss together, so that the loss is fused too.
The first shape is compiled as it is; if another comes, once more with dynamic sizes, since PyTorch
recompiles a function a few times at most. Compiled code draws other dropout masks and rounds
differently: losses agree with those of the plain code within a tolerance, not bit for bit.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch

from headrace.caches import user_cache
from headrace.device import Device
from headrace.step import LossFunction, TrainingStep

log = logging.getLogger("headrace")
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch._higher_order_ops")


class CompiledLoss:
    """A loss function that is compiled when it is first called, and for new shapes. If that
    cannot be done it is called as it is, from then on, and why is said once."""

    def __init__(self, loss: LossFunction, device: Device) -> None:
        self.plain = loss
        #: "careful" also knows what to do if compilation fails; the other two just call.
        self.mode: Literal["careful", "plain", "compiled"] = "careful"
        self.why_not: str | None = None
        self.seconds = 0.0
        self._device = device
        keep_compiled_code()
        self._compiled = torch.compile(loss)

    def __call__(self, model: Any, batch: Any) -> Any:
        if self.mode == "plain" or self.why_not is not None:
            return self.plain(model, batch)
        if self.mode == "compiled":
            return self._compiled(model, batch)
        random_state = self._device.random_state()
        before, start = _graphs_compiled(), time.perf_counter()
        try:
            with _strict_compiler():
                returned = self._compiled(model, batch)
        except Exception as problem:
            if not _is_the_compilers(problem):
                raise
            self._give_up(problem)
            self._device.set_random_state(random_state)
            return self.plain(model, batch)
        if _graphs_compiled() != before:
            took = time.perf_counter() - start
            self.seconds += took
            log.info("compiled the step in %.1f s (%.1f s in all)", took, self.seconds)
        return returned

    def _give_up(self, problem: Exception) -> None:
        lines = [line for line in str(problem).splitlines() if line.strip()]
        self.why_not = f"{type(problem).__name__}: {lines[0] if lines else 'no message'}"
        self._device.say_once(
            f"compile: {self.why_not}",
            "the step is not compiled and runs as it is: %s",
            self.why_not,
        )


def loss_of(step: TrainingStep) -> LossFunction:
    """The step's loss function as the user wrote it."""
    return step.loss.plain if isinstance(step.loss, CompiledLoss) else step.loss


@contextmanager
def loss_as(step: TrainingStep, mode: Literal["plain", "compiled"]) -> Iterator[None]:
    """Inside the block the step's loss function, if it is one to be compiled, runs as it was
    written, or as it was compiled before."""
    loss = step.loss
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
