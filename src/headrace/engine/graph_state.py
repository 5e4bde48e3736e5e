"""The state that graphs of the engine's step share with eager steps, and what they leave behind."""

from __future__ import annotations

import torch

from headrace.engine.step import StepParts


def tensors_of(parts: StepParts) -> list[torch.Tensor]:
    """All tensors that a graph of the engine's step uses and that exist before and after it."""
    found = parts.state.tensors()
    if parts.group.keeps_gradients:
        found += [p.grad for p in parts.state.parameters() if p.grad is not None]
    if parts.update.ema is not None:
        found += parts.update.ema.averages
    return found


def release_graph_state(parts: StepParts) -> None:
    """Let go of what only graphs need: learning rates on the device, gradients that keep their
    memory. An optimizer that has trained as a capturable one stays capturable: made plain again, it
    would continue from an older step count."""
    parts.update.rates = None
    if parts.group.keeps_gradients:
        parts.group.keeps_gradients = False
        if not parts.group.is_open:
            drop_gradients(parts, keep=set())


def drop_gradients(parts: StepParts, *, keep: set[int]) -> None:
    """Set gradients to None, but for the parameters (by `id`) in `keep`. A kept gradient that no
    batch of the group has written is zero, and an optimizer with momentum would still move it."""
    for parameter in parts.group.parameters():
        if id(parameter) not in keep:
            parameter.grad = None
