"""TorchScript, which compiles the script's models and not what stands in for their `forward`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from headrace.capture import own_forwards
from headrace.replacing import replaced


@contextmanager
def scripting_own_forwards() -> Iterator[None]:
    """In the block, TorchScript reads the models' own `forward`."""
    truth: Any = torch.jit.script

    @functools.wraps(truth)
    def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
        models = own_forwards(obj) if isinstance(obj, torch.nn.Module) else nullcontext()
        # TorchScript looks for names in the frame of its caller.
        given = inspect.signature(truth).bind(obj, *args, **kwargs).arguments
        given["_frames_up"] = given.get("_frames_up", 0) + 1
        with models:
            return truth(**given)

    with replaced(torch.jit, "script", script):
        yield
