"""What a step uses besides its batch: its function, modules, optimizers and gradient scalers.

A graph of the step shares all of it with eager steps. The engine's own step has one model and one
optimizer; a step function of the user's may have several of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headrace.device import Device


@dataclass(frozen=True, slots=True)
class StepState:
    """The owners of a step's state. `function` is the loss function, or the user's step."""

    device: Device
    function: object
    modules: tuple[torch.nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    scalers: tuple[torch.amp.GradScaler, ...] = ()

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of all modules and optimizers, each once."""
        found = {id(p): p for module in self.modules for p in module.parameters()}
        for group in self.param_groups():
            found |= {id(p): p for p in group["params"]}
        return list(found.values())

    def all_modules(self) -> list[torch.nn.Module]:
        """The modules and their submodules, each once."""
        found = {id(one): one for module in self.modules for one in module.modules()}
        return list(found.values())

    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def tensors(self) -> list[torch.Tensor]:
        """Parameters, buffers and the optimizers' state, each once."""
        found = {id(tensor): tensor for tensor in self.parameters()}
        for module in self.modules:
            found |= {id(buffer): buffer for buffer in module.buffers()}
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                values = state.values() if isinstance(state, dict) else ()
                found |= {id(value): value for value in values if isinstance(value, torch.Tensor)}
        return list(found.values())
