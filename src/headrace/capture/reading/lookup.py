"""What `owner.name` and `owner[key]` may be, found without running code of the user's."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from headrace.capture.reading.known import Known, Super, Values
from headrace.capture.reading.places import ABSENT
from headrace.capture.reading.users_code import dict_of, is_users, is_users_file

if TYPE_CHECKING:
    from headrace.capture.reading.reading import Reader

_OWN_COUNTERS = ("updates", "epochs")


class Lookup:
    """Looks up attributes and items of known objects, and notes their places in the reader's."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._places = reader.places

    def attributes(self, owners: Values, name: str) -> Values:
        return self._reader.known(one for owner in owners for one in self.attribute(owner, name))

    def attribute(self, owner: Known, name: str) -> list[Known]:
        """What `owner.name` may be. Notes its place; runs no code."""
        value, full = owner.value, f"{owner.name}.{name}"
        if isinstance(value, torch.Tensor):
            return [] if hasattr(torch.Tensor, name) else self.entry(vars(value), name, full)
        if isinstance(value, torch.optim.Optimizer) and name in ("state", "defaults"):
            return []  # `memory.py` compares the state
        if isinstance(value, types.ModuleType):
            found = vars(value).get(name, ABSENT)
            if is_users_file(getattr(value, "__file__", None) or ""):
                return self.entry(vars(value), name, full)
            return [] if found is ABSENT else [Known(found, full)]
        if isinstance(value, Super):
            mro = type(value.instance).__mro__
            after = mro[mro.index(value.kind) + 1 :] if value.kind in mro else ()
            return self._member(after, name, Known(value.instance, owner.name), full) or []
        if isinstance(value, type):
            found_in_class = self._member(value.__mro__, name, None, full)
            if found_in_class is not None:
                return found_in_class
            metaclass: Any = type(value)
            return self._member(metaclass.__mro__, name, owner, full) or []
        kind = type(value)
        holder = next((one for one in kind.__mro__ if name in vars(one)), None)
        member = None if holder is None else vars(holder)[name]
        if isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType):
            if isinstance(member, types.GetSetDescriptorType):
                return []
            return self.slot(value, name, full)
        if isinstance(member, property) and kind.__module__.startswith("headrace."):
            # One of our own objects: a loss function may read `engine.updates`.
            return self.slot(value, name, full) if name in _OWN_COUNTERS else []
        if isinstance(member, property):
            function = None if member.fget is None else Known(member.fget, full)
            return (
                [] if function is None else list(self._reader.calls.call(function, [(owner,)], {}))
            )
        own = dict_of(value)
        if own is not None and name in own:
            return self.entry(own, name, full)
        if isinstance(value, torch.nn.Module):
            for part in (value._parameters, value._buffers):
                if name in part:
                    return self.entry(part, name, full)
            if name in value._modules:
                return [Known(value._modules[name], full)]
        if own is not None and not isinstance(member, functools.cached_property):
            self._places.absent(own, name, full)
        if holder is not None:
            return self._member(kind.__mro__, name, owner, full) or []
        if isinstance(value, dict) and name in value:  # a dict that shows its items as attributes
            return self.entry(value, name, full)
        getter: Any = getattr(kind, "__getattr__", None)
        if isinstance(getter, types.FunctionType) and is_users_file(getter.__code__.co_filename):
            constant = Known(name, repr(name))
            return list(self._reader.calls.call(Known(getter, full), [(owner,), (constant,)], {}))
        return []

    def slot(self, value: Any, name: str, full: str) -> list[Known]:
        """An attribute that an object keeps in a slot."""
        found = self._places.attribute(value, name, full)
        return [] if found is ABSENT else [Known(found, full)]

    def entry(self, mapping: Any, key: Any, name: str) -> list[Known]:
        if isinstance(mapping, dict | types.MappingProxyType) and key not in mapping:
            self._places.absent(mapping, key, name)
            return []
        self._places.entry(mapping, key, name)
        return [Known(mapping[key], name)]

    def _member(
        self, classes: Iterable[type], name: str, owner: Known | None, full: str
    ) -> list[Known] | None:
        """What a class's attribute is for an instance (`owner`); None if there is none."""
        for kind in classes:
            if name not in vars(kind):
                if is_users(kind):  # one that appears here would hide the other
                    self._places.absent(vars(kind), name, full, kind=kind)
                continue
            member = vars(kind)[name]
            if is_users(kind) or isinstance(member, int | float | str | torch.Tensor):
                self._places.entry(vars(kind), name, f"{kind.__name__}.{name}", kind=kind)
            if isinstance(member, staticmethod):
                return [Known(member.__func__, full)]
            if isinstance(member, classmethod):
                bound = type(owner.value) if owner is not None else kind
                return [Known(types.MethodType(member.__func__, bound), full)]
            if isinstance(member, property) and owner is not None and member.fget is not None:
                return self._called(Known(member.fget, full), owner)
            if isinstance(member, functools.cached_property) and owner is not None:
                return self._called(Known(member.func, full), owner)
            if isinstance(member, functools.partialmethod) and owner is not None:
                partial = functools.partial(member.func, owner.value, *member.args)
                return [Known(partial, full)]
            if isinstance(member, types.FunctionType) and owner is not None:
                return [Known(types.MethodType(member, owner.value), full)]
            return [Known(member, full)]
        return None

    def item(self, owners: Values, key: Any) -> Values:
        """What `owner[key]` may be, for a constant key."""
        found: list[Known] = []
        for owner in owners:
            value, name = owner.value, f"{owner.name}[{key!r}]"
            if isinstance(value, torch.nn.ModuleList | torch.nn.ModuleDict | torch.nn.Sequential):
                inner = value._modules.get(str(key))
                found += [] if inner is None else [Known(inner, name)]
            elif isinstance(value, dict) and type(value).__getitem__ is dict.__getitem__:
                # A capture sets these two itself.
                is_set = key == "capturable" or (key == "lr" and self._reader.is_in_optimizer)
                if not (is_set and "params" in value):
                    found += self.entry(value, key, name)
            elif (
                got := self.by_syntax(owner, "__getitem__", (Known(key, repr(key)),))
            ) is not None:
                found += got
            elif isinstance(value, list | tuple) and isinstance(key, int):
                if -len(value) <= key < len(value):
                    found += self.entry(value, key, name)
            else:
                self._reader.whole((owner,))
        return self._reader.known(found)

    def by_syntax(self, owner: Known, method: str, *args: Values) -> Values | None:
        """What a method gives that syntax calls (`owner[key]`), if it is the user's."""
        kind: Any = type(owner.value)
        function = getattr(kind, method, None)
        if isinstance(function, property):
            function = function.fset
        if not isinstance(function, types.FunctionType) or not is_users(kind):
            return None
        called = Known(function, f"{owner.name}.{method}")
        return self._reader.calls.call(called, [(owner,), *args], {})

    def _called(self, function: Known, owner: Known) -> list[Known]:
        return list(self._reader.calls.call(function, [(owner,)], {}))
