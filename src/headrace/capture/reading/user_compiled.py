"""What the user's own `torch.compile` has made of a step, and what it cannot compile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_RECURRENT = (torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM)


def has_own_graphs(value: Any) -> bool:
    """Whether `torch.compile` has made this function or module with CUDA graphs inside: by
    `mode="reduce-overhead"` or "max-autotune", an option, or inductor's configuration."""
    get_config = getattr(value, "get_compiler_config", None)
    config = get_config() if callable(get_config) else None
    return isinstance(config, dict) and bool(config.get("triton.cudagraphs"))


def describe_own_graphs(name: str) -> str:
    """Why a step is not captured that calls `name`, which has CUDA graphs of its own."""
    return (
        f"{name} was compiled with CUDA graphs of its own (mode='reduce-overhead', "
        "'max-autotune' or triton.cudagraphs), which cannot be part of another graph, and runs as "
        "it is: for one graph of the whole step, compile it without a mode or with "
        "mode='max-autotune-no-cudagraphs'"
    )


def recurrent_obstacle(modules: Iterable[torch.nn.Module]) -> str | None:
    """Why a step with these modules is not compiled: PyTorch's compiler refuses recurrent ones and
    would compile what stands before and after them in pieces."""
    import torch._dynamo.config as dynamo

    if getattr(dynamo, "allow_rnn", False):
        return None
    for root in modules:
        for name, module in root.named_modules():
            if isinstance(module, _RECURRENT):
                where = f" ({name})" if name else ""
                return (
                    f"PyTorch's compiler refuses nn.{_kind(module)}{where}, and a graph of the "
                    "step as it was written needs no compiler"
                )
    return None


def _kind(module: torch.nn.Module) -> str:
    return next(kind.__name__ for kind in _RECURRENT if isinstance(module, kind))
