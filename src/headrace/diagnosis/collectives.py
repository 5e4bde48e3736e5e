"""When the script's code is in collectives of `torch.distributed`, or waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from headrace.replacing import replaced

_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "scatter"),
)


@contextmanager
def watching_collectives(
    begins: Callable[[], object], ends: Callable[[], object]
) -> Iterator[None]:
    """Call `begins` and `ends` around the outermost of these calls inside the block, in the thread
    that makes them."""
    if not dist.is_available():
        yield
        return
    inside: set[int] = set()

    def telling(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            if thread in inside or torch.compiler.is_compiling():
                return function(*args, **kwargs)
            begins()
            inside.add(thread)
            try:
                return function(*args, **kwargs)
            finally:
                inside.discard(thread)
                ends()

        return call

    work: Any = dist.Work
    with ExitStack() as stack:
        for name in _COLLECTIVES:
            stack.enter_context(replaced(dist, name, telling(getattr(dist, name))))
        stack.enter_context(replaced(work, "wait", telling(work.wait)))
        yield


@contextmanager
def watching_ends_of_backward(at_end: Callable[[], object]) -> Iterator[None]:
    """Call `at_end` in each backward pass inside the block when the gradients are computed, and
    before DistributedDataParallel waits until they are reduced: it asks to be called at the end
    later than this does, with its first bucket."""
    engine: Any = torch.autograd.Variable._execution_engine
    run = torch.autograd.backward

    @wraps(run)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        root = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
        if not isinstance(root, torch.Tensor) or torch.compiler.is_compiling():
            return run(tensors, *args, **kwargs)
        handle = root.register_hook(lambda gradient: engine.queue_callback(at_end))
        try:
            return run(tensors, *args, **kwargs)
        finally:
            handle.remove()

    with replaced(torch.autograd, "backward", backward):
        yield
