"""A forward that is compiled, and plain while it is watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class CompiledForward:
    """Compiled code hides its operations from a dispatch mode, and a function that PyTorch is to
    compile under one is never compiled again. So under a mode, which a watched call has, the
    forward runs as it was written."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._plain = forward
        self._compiled = torch.compile(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_watched = torch._C._len_torch_dispatch_stack() > 0
        return (self._plain if is_watched else self._compiled)(*args, **kwargs)
