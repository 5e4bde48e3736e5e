"""DDP's reducer, which is written in C++: the memory and the futures that it handles unseen."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed

from headrace.fake import autograd, patches
from headrace.fake.collective_schema import ends
from headrace.fake.patches import Replacement


def _register_comm_hook(reducer: Any, state: Any, hook: Callable[..., Any]) -> Any:
    """Replaces DDP's function. The reducer waits for the futures of its hook at the end of the
    backward pass, in C++."""

    def watched(state: Any, bucket: Any) -> Any:
        future = hook(state, bucket)
        for event in ends.get(future, ()):
            autograd.wait_at_the_end(event.device, event)
        return future

    return patches.original(torch.distributed, "_register_comm_hook")(reducer, state, watched)


#: The parameters of each `Reducer`, DDP's C++ part.
_parameters: weakref.WeakKeyDictionary[Any, list[torch.Tensor]] = weakref.WeakKeyDictionary()


def _reducer(parameters: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Replaces `Reducer`: it allocates its buckets unseen."""
    with _allocating_for(parameters):
        made = patches.original(torch.distributed, "Reducer")(parameters, *args, **kwargs)
    _parameters[made] = parameters
    return made


def _rebuild_buckets(reducer: Any) -> Any:
    with _allocating_for(_parameters.get(reducer, ())):
        return patches.originals["_rebuild_buckets"](reducer)


@contextmanager
def _allocating_for(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside the block, memory that C++ allocates lies where the parameters lie."""
    with ExitStack() as stack:
        for device in patches.devices:
            if any(device.holds(parameter) for parameter in parameters):
                stack.enter_context(device.call.changed(inside="device"))
        yield


def replacements() -> Iterator[Replacement]:
    reducer: Any = vars(torch.distributed)["Reducer"]
    yield Replacement(torch.distributed, "Reducer", _reducer)
    yield Replacement(reducer, "_rebuild_buckets", _rebuild_buckets)
    yield Replacement(torch.distributed, "_register_comm_hook", _register_comm_hook)
