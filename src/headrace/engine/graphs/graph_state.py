"""The state that graphs of the engine's step share with eager steps."""

from __future__ import annotations

import torch

from headrace.engine.step.parts import StepParts


def tensors_of(parts: StepParts) -> list[torch.Tensor]:
    """All tensors that a graph of the engine's step uses and that exist before and after it."""
    found = parts.state.tensors()
    if parts.group.kept.are_kept:
        found += [p.grad for p in parts.state.parameters() if p.grad is not None]
    if parts.update.ema is not None:
        found += parts.update.ema.averages
    return found


def release_graph_state(parts: StepParts) -> None:
    """Let go of what only graphs need: learning rates on the device, gradients that keep their
    memory. An optimizer that has trained as a capturable one stays capturable: made plain again, it
    would continue from an older step count."""
    parts.update.use_rates(None)
    parts.group.kept.release(is_open=parts.group.is_open)
