"""PyTorch's compiler: its settings for a step, what it has done, and its errors."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any, NamedTuple

import torch

from headrace.atomic_files import user_cache

log = logging.getLogger("headrace")


_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch._higher_order_ops")


_TILING = "coalesce_tiling_analysis"


# Functions of `sdpa_kernel`, which many models use. PyTorch's autograd cache refuses code with
# them, unless it is told that they depend on their arguments alone.
_CACHEABLE = {
    f"torch.nn.attention.{name}": torch.__version__
    for name in ("_backend_from_string", "_sdpa_kernel")
}


# By default, inductor computes the gradients of a layer norm's input and of its weights in one
# kernel. On an H200, a kernel for each is faster (2026-11-16-h200-mixed-reductions.json in
# benchmarks/results). Users choose by the variable: a setting that was changed and set back, as
# here, looks like one that they have set.
_MIX_ORDER, _MIX_ORDER_VARIABLE = "mix_order_reduction", "TORCHINDUCTOR_MIX_ORDER_REDUCTION"


@contextmanager
def compiler_loading() -> Iterator[None]:
    """While the block runs, load PyTorch's compiler in a thread and let its worker processes start.
    Otherwise the first compilation does so, and takes some seconds longer."""
    set_cache_folder()  # first: the worker processes get it from this process
    thread = threading.Thread(target=_load_compiler, name="headrace-compiler", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _load_compiler() -> None:
    try:
        import torch._inductor.compile_fx  # noqa: F401
    except Exception as problem:  # the first compilation will report it
        log.debug("the compiler cannot be loaded: %s", problem)


def set_cache_folder() -> None:
    """Have inductor cache compiled code where it survives a reboot, unless the user has chosen a
    folder."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(user_cache() / "compiled"))


@contextmanager
def strict_compiler() -> Iterator[None]:
    """Inside the block the compiler raises where it would silently give up, and compiles backward
    together with forward. So every failure is known before any of the step has run. It also caches
    code that chooses attention kernels, and gives reductions of different orders kernels of their
    own, unless the user's variable says otherwise."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    with ExitStack() as settings:
        if hasattr(dynamo, "fail_on_recompile_limit_hit"):
            settings.enter_context(dynamo.patch(fail_on_recompile_limit_hit=True))
        if hasattr(functorch, "force_non_lazy_backward_lowering"):
            settings.enter_context(functorch.patch(force_non_lazy_backward_lowering=True))
        known = getattr(inductor, "unsafe_marked_cacheable_functions", None)
        if known is not None:
            both = _CACHEABLE | known
            settings.enter_context(inductor.patch(unsafe_marked_cacheable_functions=both))
        if hasattr(inductor.triton, _MIX_ORDER) and _MIX_ORDER_VARIABLE not in os.environ:
            settings.enter_context(inductor.patch({f"triton.{_MIX_ORDER}": False}))
        yield


def can_skip_tiling_analysis() -> bool:
    """Whether this PyTorch version has the setting and it is on."""
    import torch._inductor.config as inductor

    return bool(getattr(inductor.triton, _TILING, False))


@contextmanager
def tiling_analysis(wanted: bool) -> Iterator[None]:
    """Inside the block, turn the tiling analysis off unless it is wanted."""
    if wanted or not can_skip_tiling_analysis():
        yield
        return
    import torch._inductor.config as inductor

    with inductor.patch({f"triton.{_TILING}": False}):
        yield


def has_compiled_code(function: Any) -> bool:
    """Whether PyTorch has compiled code for a function, for example from an earlier engine. True if
    that cannot be found out."""
    from torch._dynamo import eval_frame

    entries = getattr(eval_frame, "_debug_get_cache_entry_list", None)
    if isinstance(function, torch.nn.Module):
        function = function.forward
    code = getattr(function, "__code__", None)
    return entries is None or not isinstance(code, CodeType) or len(entries(code)) > 0


class CompilerCounts(NamedTuple):
    """What PyTorch's compiler has done in this process: graphs traced, and graphs, forward and
    backward apart, that were or were not in its cache on disk."""

    graphs: int
    hits: int
    misses: int

    @classmethod
    def now(cls) -> CompilerCounts:
        from torch._dynamo.utils import counters

        cache = counters["inductor"]
        misses = cache["fxgraph_cache_miss"] + cache["fxgraph_cache_bypass"]
        return cls(counters["stats"]["unique_graphs"], cache["fxgraph_cache_hit"], misses)

    @classmethod
    def since(cls, before: CompilerCounts) -> CompilerCounts:
        return cls(*(new - old for new, old in zip(cls.now(), before, strict=True)))

    @property
    def from_cache(self) -> bool:
        """Whether all code was in the cache."""
        return self.hits > 0 and self.misses == 0


def is_compiler_error(problem: BaseException | None) -> bool:
    """Whether an error, or one of its causes, was raised by the compiler and not by user code."""
    while problem is not None:
        if type(problem).__module__.startswith(_COMPILERS):
            return True
        problem = problem.__cause__
    return False
