"""What a step uses besides its batch: its function, modules, optimizers and gradient scalers.

A graph of the step shares all of it with eager steps. The engine's own step has one model and one
optimizer; a step function of the user's may have several of each.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from headrace.capture.reading.reading import Reader
from headrace.device import Device


@dataclass(frozen=True, slots=True)
class StepState:
    """The owners of a step's state. `function` is the loss function, or the user's step.
    `passes_model`: it is called with the first module as its first argument."""

    device: Device
    function: object
    modules: tuple[torch.nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    scalers: tuple[torch.amp.GradScaler, ...] = ()
    passes_model: bool = False

    @classmethod
    def find(
        cls,
        device: Device,
        step: object,
        *,
        modules: tuple[torch.nn.Module, ...] | None = None,
        optimizers: tuple[torch.optim.Optimizer, ...] | None = None,
        observed: Sequence[torch.nn.Module | torch.optim.Optimizer] = (),
    ) -> StepState:
        """The state of a user's step: what the step's code can reach, and what it was `observed` to
        use. If `modules` or `optimizers` are given, there are no others of that kind."""
        reader = Reader(device.holds, step)
        reader.function(step, ())
        for module in modules or ():
            reader.owner(module)
        owners = reader.owners
        seen_modules = (one for one in observed if isinstance(one, torch.nn.Module))
        seen_optimizers = (one for one in observed if isinstance(one, torch.optim.Optimizer))
        return cls(
            device,
            step,
            unique(modules or (*owners.modules, *seen_modules)),
            unique(optimizers or (*owners.optimizers, *seen_optimizers)),
            tuple(owners.scalers),
        )

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

    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, each once."""
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()

        def add(name: str, tensor: torch.Tensor) -> None:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[name] = tensor

        for number, module in enumerate(self.modules, 1):
            owner = f"{type(module).__name__} {number}"
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                add(f"{owner}, {name}", tensor)
        for at, parameter in enumerate(self.parameters()):
            add(f"parameter {at}", parameter)
        return found

    def updated(self) -> list[torch.Tensor]:
        """The parameters that the optimizers have."""
        return list(chain.from_iterable(map(_PARAMETERS, self.param_groups())))

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


_PARAMETERS = operator.itemgetter("params")


def unique(values: Iterable[Any]) -> tuple[Any, ...]:
    """The values in their order, each object once."""
    return tuple({id(value): value for value in values}.values())
