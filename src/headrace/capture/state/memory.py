"""The memory and state that a step's graphs share with eager steps.

Parameters, gradients, buffers and the optimizer's state must keep their addresses while a graph
uses them, and a capture must leave them as they were, since it runs nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

from headrace.capture.reading.comparison import dicts_of_modules, same_values
from headrace.capture.reading.contents import same_value
from headrace.capture.state.state import StepState, unique
from headrace.errors import CaptureError


class StateMemory:
    """Where the tensors of a step were when this was made, and who held them. If one has moved,
    graphs that were captured then belong to an earlier model or optimizer. `others` are tensors
    besides those of the state. Without `shapes`, a parameter may get another shape where it is."""

    def __init__(
        self, state: StepState, others: Iterable[torch.Tensor] = (), *, shapes: bool = True
    ) -> None:
        self._state, self._modules = state, state.all_modules()
        self._tensors = _with_addresses((*state.tensors(), *others))
        # Nothing gives an optimizer's state another shape at the same address.
        buffers = (buffer for module in state.modules for buffer in module.buffers())
        shaped = (*state.parameters(), *buffers, *others) if shapes else ()
        self._shaped = _with_addresses(shaped)
        self._held = self._holders()
        self._figures = self._look()
        dicts: list[dict[Any, Any]] = [*dicts_of_modules(self._modules)]
        for optimizer in state.optimizers:
            own = [values for values in optimizer.state.values() if isinstance(values, dict)]
            dicts += [optimizer.state, *own]
        self._have_same_values = same_values(dicts)

    def has_moved(self) -> bool:
        """Whether a parameter, a buffer or a part of an optimizer's state is elsewhere now, has
        another shape, or no longer requires a gradient, or a module has another mode. Call it
        before each batch."""
        held = self._holders()
        return (
            len(held) != len(self._held)
            or not all(map(operator.is_, held, self._held))
            or not self._have_same_values()
            or self._look() != self._figures
        )

    def _holders(self) -> list[Any]:
        """The optimizers' own states, those of their parameters, and all parameters that they
        have."""
        states = list(map(_STATE, self._state.optimizers))
        of_parameters = chain.from_iterable(map(_VALUES, states))
        return [*states, *of_parameters, *self._state.updated()]

    def _look(self) -> tuple[list[Any], ...]:
        return (
            list(map(torch.Tensor.data_ptr, self._tensors)),
            list(map(torch.Tensor.stride, self._shaped)),
            list(map(torch.Tensor.numel, self._shaped)),
            list(map(_REQUIRES_GRAD, self._shaped)),
            list(map(_TRAINING, self._modules)),
        )


_REQUIRES_GRAD, _TRAINING = operator.attrgetter("requires_grad"), operator.attrgetter("training")
_STATE, _VALUES = operator.attrgetter("state"), operator.methodcaller("values")


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _with_addresses(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Each tensor once, without those whose values are in several places, such as sparse ones, or
    whose rows have strides of their own: nested ones."""
    dense = (tensor for tensor in unique(tensors) if tensor.layout is torch.strided)
    return [tensor for tensor in dense if not tensor.is_nested]


class StateBeforeCapture:
    """The state before a capture: gradients, the optimizers' state, buffers and tensors that are
    attributes of modules, and the gradient scalers' bookkeeping. Capture in a `with` block of it:
    the end of the block restores all of that.
    `others` are tensors that the step can reach besides those of the state."""

    def __init__(self, state: StepState, others: Iterable[torch.Tensor] = ()) -> None:
        self._gradients = [(parameter, parameter.grad) for parameter in state.parameters()]
        tensors = _with_addresses((*state.parameters(), *others))
        self._memory = [(tensor, tensor.data) for tensor in tensors]
        self._optimizers = [
            (type(optimizer).__name__, _StatesBefore(optimizer.state))
            for optimizer in state.optimizers
        ]
        self._modules = [
            (module, dict(module._buffers), _tensor_attributes(module))
            for module in state.all_modules()
        ]
        self._scalers = [_StatesBefore(scaler._per_optimizer_states) for scaler in state.scalers]

    def optimizer_changed(self) -> bool:
        """Whether an optimizer has created or replaced part of its state. Raises `CaptureError` if
        it has changed a Python number there."""
        for name, states in self._optimizers:
            now, before = states.now, states.before
            if now.keys() != before.keys():
                return True
            if any(_differ(now[key], before[key]) for key in before):
                return True
            for key in before:
                if (changed := _changed_number(now[key], before[key])) is not None:
                    raise CaptureError(
                        f"{name} changes {changed}, a Python value in its state, at every step, "
                        "and a graph would repeat the value it was captured with: keep it as a "
                        "tensor on the device"
                    )
        return False

    def changed_optimizer(self) -> str:
        """The kind of the first optimizer whose state has got other tensors."""
        return next(
            name
            for name, states in self._optimizers
            if states.now.keys() != states.before.keys()
            or any(_differ(states.now[key], states.before[key]) for key in states.before)
        )

    def gradients_changed(self) -> bool:
        """Whether a parameter's gradient is another tensor now."""
        return any(parameter.grad is not before for parameter, before in self._gradients)

    def require_in_place(self) -> None:
        """Raise `CaptureError` if the step has replaced a buffer or a tensor attribute, or a
        tensor's memory."""
        if any(one.data_ptr() != before.data_ptr() for one, before in self._memory):
            raise CaptureError(
                "the step gives a tensor other memory (p.data = …), and a graph would keep using "
                "the old: write to it in place, with p.data.copy_(…)"
            )
        for module, buffers, attributes in self._modules:
            for before, now in (
                (buffers, module._buffers),
                (attributes, _tensor_attributes(module)),
            ):
                for name in before.keys() | now.keys():
                    if before.get(name) is not now.get(name):
                        raise CaptureError(
                            f"the step replaces {type(module).__name__}.{name}, and a graph would "
                            "keep using the old tensor: write to it in place, with copy_()"
                        )

    def __enter__(self) -> StateBeforeCapture:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.restore()
        if kind is torch.OutOfMemoryError:
            raise CaptureError("the device has no memory for a graph's inputs")

    def restore(self) -> None:
        for tensor, memory in self._memory:
            if tensor.data_ptr() != memory.data_ptr():
                tensor.data = memory
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for states in (*(one for _, one in self._optimizers), *self._scalers):
            states.restore()
        for module, buffers, attributes in self._modules:
            module._buffers.clear()
            module._buffers.update(buffers)
            for name in _tensor_attributes(module).keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)


def _tensor_attributes(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}


class _StatesBefore:
    """The states of an optimizer's parameters, or of a scaler's optimizers, as they were: `before`
    has copies of them. `restore` keeps each state the same dict, since others compare it."""

    def __init__(self, now: dict[Any, Any]) -> None:
        self.now, self._held = now, dict(now)
        self.before = {key: dict(one) if isinstance(one, dict) else one for key, one in now.items()}

    def restore(self) -> None:
        self.now.clear()
        self.now.update(self._held)
        for key, one in self._held.items():
            if isinstance(one, dict):
                one.clear()
                one.update(self.before[key])


def _differ(one: Any, other: Any) -> bool:
    """Whether a parameter's state has other entries, or another tensor in one."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one is not other and (_is_tensor(one) or type(one) is not type(other))
    return one.keys() != other.keys() or any(
        value is not other[name] for name, value in one.items() if _is_tensor(value)
    )


def _changed_number(now: Any, before: Any) -> str | None:
    """The name of an entry, of a parameter's state, that is no tensor and has another value."""
    if not isinstance(now, dict):
        return None if same_value(now, before) else "a value"
    differing = (
        name
        for name in now
        if not _is_tensor(now[name]) and not same_value(now[name], before[name])
    )
    name = next(differing, None)
    return None if name is None else repr(name)
