"""The memory and state that a step's graphs share with eager steps.

Parameters, gradients, buffers and the optimizer's state must keep their addresses while a graph
uses them, and a capture must leave them as they were, since it runs nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from headrace.engine.step import StepParts


def tensors_of(parts: StepParts) -> list[torch.Tensor]:
    """All tensors that a graph of this step uses and that exist before and after it."""
    found: dict[int, torch.Tensor] = {}
    for tensor in (*parts.model.parameters(), *parts.group.parameters(), *parts.model.buffers()):
        found[id(tensor)] = tensor
        if parts.group.keeps_gradients and tensor.grad is not None:
            found[id(tensor.grad)] = tensor.grad
    for state in parts.optimizer.state.values():
        values = state.values() if isinstance(state, dict) else ()
        found |= {id(value): value for value in values if isinstance(value, torch.Tensor)}
    if parts.update.ema is not None:
        found |= {id(average): average for average in parts.update.ema.averages}
    return list(found.values())


def addresses(parts: StepParts) -> tuple[Hashable, ...]:
    """The addresses of `tensors_of`, what requires a gradient, and each module's training mode. If
    they differ from those at capture, the graph belongs to an earlier model or optimizer."""
    memory = tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in tensors_of(parts))
    modules = tuple((id(module), module.training) for module in parts.model.modules())
    return (memory, modules)


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


class StateBeforeCapture:
    """The state before a capture, to be restored after it: gradients, the optimizer's state,
    buffers and tensors that are attributes of modules, and the gradient scaler's bookkeeping."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        parameters = {id(p): p for p in (*parts.model.parameters(), *parts.group.parameters())}
        self._gradients = [(parameter, parameter.grad) for parameter in parameters.values()]
        self._state = {key: dict(value) for key, value in parts.optimizer.state.items()}
        self._modules = [
            (module, dict(module._buffers), _tensor_attributes(module))
            for module in parts.model.modules()
        ]
        self._scaler = None
        if parts.update.scaler is not None:
            bookkeeping = parts.update.scaler._per_optimizer_states
            self._scaler = {key: dict(value) for key, value in bookkeeping.items()}

    def optimizer_changed(self) -> bool:
        """Whether the optimizer has created or replaced part of its state."""
        state = self._parts.optimizer.state
        if state.keys() != self._state.keys():
            return True
        return any(_differ(state[key], before) for key, before in self._state.items())

    def gradients_changed(self) -> bool:
        """Whether a parameter's gradient is another tensor now."""
        return any(parameter.grad is not before for parameter, before in self._gradients)

    def replaced_tensor(self) -> str | None:
        """The name of a buffer or attribute that the model's forward has replaced, if any."""
        for module, buffers, attributes in self._modules:
            for before, now in (
                (buffers, module._buffers),
                (attributes, _tensor_attributes(module)),
            ):
                for name in before.keys() | now.keys():
                    if before.get(name) is not now.get(name):
                        return f"{type(module).__name__}.{name}"
        return None

    def restore(self) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        state = self._parts.optimizer.state
        state.clear()
        state.update(self._state)
        for module, buffers, attributes in self._modules:
            module._buffers.clear()
            module._buffers.update(buffers)
            for name in _tensor_attributes(module).keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)
        if self._parts.update.scaler is not None and self._scaler is not None:
            bookkeeping = self._parts.update.scaler._per_optimizer_states
            bookkeeping.clear()
            bookkeeping.update(self._scaler)


def _tensor_attributes(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}


def _differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() != other.keys() or any(
        value is not other[name] for name, value in one.items() if isinstance(value, torch.Tensor)
    )
