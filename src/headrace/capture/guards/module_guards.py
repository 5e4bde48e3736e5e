"""What a graph of a model depends on besides its arguments, and whether it is still as it was."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headrace.capture.guards.obstacles import (
    count_global_hooks,
    has_accumulation_hook,
    hooks_so_far,
)
from headrace.capture.guards.read_values import ReadValues
from headrace.capture.reading.comparison import dicts_of_modules, same_values
from headrace.capture.state.state import unique

_TRAINING = operator.attrgetter("training")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOKS_OF_PARAMETER = ("_backward_hooks", "_post_accumulate_grad_hooks")
# What every module has of its own, and what is checked apart or put there by a wrapper.
_OWN = frozenset({*vars(torch.nn.Module()), "forward", "__getstate__"})
_MAX_LOOKS = 16


class CodeGuards(ReadValues):
    """What the code of a model's modules reads. Their modes are part of a graph's key instead, and
    `ModuleGuards` compares what is registered."""

    def _compile(self) -> None:
        own = dicts_of_modules(self._state.all_modules())
        self.reader.places.leave_out("training", own)
        super()._compile()


class ModuleGuards:
    """A model's parameters, buffers and modules, as they are when this is made."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.modules = list(model.modules())
        self.parameters: list[torch.Tensor] = list(model.parameters())
        self.buffers: list[torch.Tensor] = list(model.buffers())
        #: All tensors that belong to the model.
        self.tensors: list[torch.Tensor] = [
            one
            for one in unique((*self.parameters, *self.untrained()))
            if one.layout is torch.strided and not one.is_nested
        ]
        self._addresses = list(map(torch.Tensor.data_ptr, self.tensors))
        self._have_same_values = same_values(dicts_of_modules(self.modules))
        self._classes = list(map(type, self.modules))
        self._hook_dicts = [one for one in self._all_hooks() if one]
        self._hook_counts = list(map(len, self._hook_dicts))
        self._looks = 0
        self._global_hooks = count_global_hooks()
        self._hooks_so_far = hooks_so_far()

    def untrained(self) -> list[torch.Tensor]:
        """Its buffers, and tensors that are attributes now."""
        attributes = [
            value
            for module in self.modules
            for name, value in vars(module).items()
            if name not in _OWN and isinstance(value, torch.Tensor)
        ]
        return [*self.buffers, *attributes]

    def hold(self) -> bool:
        """Whether all is as it was. Call it before each replay: no Python code runs for each
        parameter or module."""
        return (
            list(map(torch.Tensor.data_ptr, self.tensors)) == self._addresses
            and self._have_same_values()
            and list(map(type, self.modules)) == self._classes
            and list(map(len, self._hook_dicts)) == self._hook_counts
            and (hooks_so_far() == self._hooks_so_far or self._have_same_hooks())
        )

    def _all_hooks(self) -> Iterator[Any]:
        """The dicts of all hooks, or None for a parameter that never had one."""
        yield from (getattr(one, kind) for one in self.modules for kind in _HOOKS)
        yield from (getattr(one, kind) for one in self.parameters for kind in _HOOKS_OF_PARAMETER)

    def _have_same_hooks(self) -> bool:
        """PyTorch numbers all hooks, so this is only asked after some hook was made somewhere."""
        counted = sum(map(bool, self._all_hooks())) == len(self._hook_dicts)
        same = counted and count_global_hooks() == self._global_hooks
        # To ask the nodes that add to gradients takes long, and some loops make hooks at each step.
        self._looks += 1
        if self._looks <= _MAX_LOOKS or self._looks % _MAX_LOOKS == 0:
            same = same and not any(map(has_accumulation_hook, self.parameters))
        if same:
            self._hooks_so_far = hooks_so_far()
        return same

    def written_buffer(self, versions: list[int]) -> str | None:
        """A buffer that has been written since it had these versions, and that a forward may read.
        What batch normalization writes while it trains, it does not read."""
        written = {
            id(one)
            for one, version in zip(self.buffers, versions, strict=True)
            if one._version != version
        }
        for module in self.modules:
            unread = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
            for name, buffer in module._buffers.items():
                if id(buffer) in written and not unread:
                    return f"{type(module).__name__}.{name}"
        return None

    def modes(self) -> list[bool]:
        """Which modules are in training mode."""
        return list(map(_TRAINING, self.modules))

    def difference(self) -> str:
        """What has changed, in words; it follows "because"."""
        if list(map(type, self.modules)) != self._classes:
            return "its modules get other classes"
        if not self._have_same_values():
            return "its modules, parameters or buffers are replaced"
        for tensor, address in zip(self.tensors, self._addresses, strict=True):
            if tensor.data_ptr() != address:
                return (
                    f"{self._name(tensor)} of it gets other memory, as p.data = … gives it: write "
                    "to it in place, with p.data.copy_(…)"
                )
        return "its hooks change"

    def _name(self, tensor: torch.Tensor) -> str:
        named = (*self.modules[0].named_parameters(), *self.modules[0].named_buffers())
        return next((repr(name) for name, one in named if one is tensor), "a tensor")

    @contextmanager
    def aliases(self) -> Iterator[list[torch.Tensor]]:
        """In the block the modules have fresh leaves in place of their parameters, in the same
        memory: autograd graphs that exist already know nothing of them. Ties stay ties."""
        made = [_alias(one) for one in self.parameters]
        alias_of = {id(one): alias for one, alias in zip(self.parameters, made, strict=True)}
        undo: list[tuple[Any, Any, Any]] = []
        try:
            for module in self.modules:
                for holder in (module._parameters, *_lists_of_tensors(module)):
                    keys = holder if isinstance(holder, dict) else range(len(holder))
                    for key in list(keys):
                        held = holder[key]
                        by_reference = isinstance(held, weakref.ref)
                        alias = alias_of.get(id(held() if by_reference else held))
                        if alias is not None:
                            undo.append((holder, key, held))
                            holder[key] = weakref.ref(alias) if by_reference else alias
            yield made
        finally:
            for holder, key, real in undo:
                holder[key] = real


def _alias(parameter: torch.Tensor) -> torch.Tensor:
    # A parameter, and no view: autocast caches casts of such leaves only.
    alias = torch.nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
    alias.__dict__.update(parameter.__dict__)
    return alias


def _lists_of_tensors(module: torch.nn.Module) -> Iterator[Any]:
    """Lists and dicts that a module keeps parameters in besides, or weak references to them.
    Recurrent ones do both, and would lay out their weights anew if the two did not agree."""
    for name, value in vars(module).items():
        if name not in _OWN and type(value) in (list, dict):
            yield value
