"""Notices the optimizer steps of a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


@contextmanager
def watch_optimizers(
    before_step: Callable[[torch.optim.Optimizer], object],
    after_step: Callable[[torch.optim.Optimizer], object],
) -> Iterator[None]:
    """Call these before and after each step of an optimizer that runs eagerly."""

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            before_step(optimizer)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            after_step(optimizer)

    hooks = (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
