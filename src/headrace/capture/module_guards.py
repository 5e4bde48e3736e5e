"""What a graph of a model depends on besides its arguments, and whether it is still as it was."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headrace.capture.same_entries import SameEntries
from headrace.capture.state import unique

_TRAINING = operator.attrgetter("training")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_PARAMETER_HOOKS = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
# What every module has of its own, and what is checked apart or put there by a wrapper.
_OWN = frozenset({*vars(torch.nn.Module()), "forward", "__getstate__"})
_NUMBERS = (int, float, str, bool, complex)


class ModuleGuards:
    """A model's parameters, buffers and modules, as they are when this is made. The attributes that
    count are those of the modules themselves."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.modules = list(model.modules())
        self.parameters: list[torch.Tensor] = list(model.parameters())
        self.buffers: list[torch.Tensor] = list(model.buffers())
        attributes = [
            value
            for module in self.modules
            for name, value in vars(module).items()
            if name not in _OWN and isinstance(value, torch.Tensor)
        ]
        #: All tensors that belong to the model.
        self.tensors: list[torch.Tensor] = [
            one
            for one in unique((*self.parameters, *self.buffers, *attributes))
            if one.layout is torch.strided and not one.is_nested
        ]
        self._addresses = list(map(torch.Tensor.data_ptr, self.tensors))
        self._parameter_hooks = list(map(_PARAMETER_HOOKS, self.parameters))
        self._hook_dicts: list[Any] = [
            getattr(one, kind) for one in self.modules for kind in _HOOKS
        ]
        self._hook_counts = list(map(len, self._hook_dicts))
        self._note_entries()

    def _note_entries(self) -> None:
        dicts: list[dict[Any, Any]] = []
        for module in self.modules:
            dicts += [module._parameters, module._buffers, module._modules]
        entries = [(one, key) for one in dicts for key in one]
        for module in self.modules:
            own = vars(module)
            entries += [(own, name) for name in own if name not in _OWN]
        self._entries = [(one, key, one[key]) for one, key in entries]
        self._same = SameEntries(entries, dicts)

    def hold(self) -> bool:
        """Whether all is as it was. Call it before each replay."""
        return (
            list(map(torch.Tensor.data_ptr, self.tensors)) == self._addresses
            and list(map(len, self._hook_dicts)) == self._hook_counts
            and list(map(_PARAMETER_HOOKS, self.parameters)) == self._parameter_hooks
            and (self._same.hold() or self._only_equal_numbers())
        )

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

    def modes(self) -> tuple[bool, ...]:
        """Which modules are in training mode."""
        return tuple(map(_TRAINING, self.modules))

    def difference(self) -> str:
        """What has changed, in words; it follows "because"."""
        for owner, key, before in self._entries:
            now = owner.get(key, None)
            if now is not before and not _equal_numbers(now, before):
                return f"{self._name_of(owner)}{key} changes"
        if list(map(len, self._hook_dicts)) != self._hook_counts:
            return "hooks are added or removed"
        if list(map(_PARAMETER_HOOKS, self.parameters)) != self._parameter_hooks:
            return "hooks of parameters are added or removed"
        return "parameters or buffers move to other memory"

    def _name_of(self, owner: dict[Any, Any]) -> str:
        for module in self.modules:
            kinds = (vars(module), module._parameters, module._buffers, module._modules)
            if any(one is owner for one in kinds):
                return f"{type(module).__name__}."
        return ""

    def _only_equal_numbers(self) -> bool:
        """Whether all entries that are other objects are numbers or strings of the same value."""
        for owner, key, before in self._entries:
            now = owner.get(key, None)
            if now is not before and not _equal_numbers(now, before):
                return False
        sizes = [(module._parameters, module._buffers, module._modules) for module in self.modules]
        entries = {(id(owner), key) for owner, key, _ in self._entries}
        if any((id(one), key) not in entries for kinds in sizes for one in kinds for key in one):
            return False
        self._note_entries()
        return True

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
                        alias = alias_of.get(id(holder[key]))
                        if alias is not None:
                            undo.append((holder, key, holder[key]))
                            holder[key] = alias
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
    """Lists and dicts that a module keeps parameters in besides, as recurrent ones do."""
    for name, value in vars(module).items():
        if name not in _OWN and type(value) in (list, dict):
            yield value


def _equal_numbers(one: object, other: object) -> bool:
    return type(one) is type(other) and isinstance(one, _NUMBERS) and repr(one) == repr(other)
