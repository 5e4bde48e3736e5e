"""The Python values that a step's code can read, which a captured graph would freeze.

A replayed graph runs no Python. A number that the loss function reads from a closure, a global, a
default argument or an object would stay what it was at capture. A tensor that it stores for the
next batch would be ignored: the graph reads the one from the capture. So these values are found
once, by following what the loss function's code names, and compared before each batch:

    def loss(model, batch):
        out, h = model(batch.x, state["h"])      # `state` is in the closure, "h" among its keys
        state["h"] = h.detach()                  # another tensor each time: noticed
        return criterion(out, batch.y) * weight  # `weight`, a global: noticed when it changes

The search follows functions, classes and containers of the user's own code, and all attributes of
modules. It does not enter libraries, apart from the attributes and settings (`model.config`) of
their modules: if a library keeps a value elsewhere, a change shows in what the step computes
(`trace.py`).
"""

from __future__ import annotations

import dis
import functools
import io
import itertools
import operator
import os
import pickle
import queue
import random
import re
import sys
import types
import weakref
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy
import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from headrace.capture.same_entries import SameEntries
from headrace.capture.user_compiled import has_own_graphs
from headrace.device import Device
from headrace.source_lines import Site, is_user_code

_LARGE = 1000  # containers with more items are compared by length only
# Names of functions and values of `os` that a step reads environment variables with.
_OF_THE_ENVIRONMENT = frozenset(("environ", "environb", "getenv", "getenvb", "expandvars"))
_MAX_BYTES = 64 * _LARGE  # larger arrays are not compared
_MAX_DEPTH = 12
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
# Containers of the standard library that keep their items in another one: `data`.
_WITH_DATA: Any = (
    UserDict,
    UserList,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
)
_CONSTANT_TYPES = (int, float, complex, bool, str, bytes, type(None), Enum)
_COMPARED_BY_VALUE = (torch.dtype, torch.device, types.MethodType, PurePath, range)
# Attributes that every module has. They are compared elsewhere, or do not affect its results.
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}
_NOT_ASSIGNED = object()
_OF_EVERY_TENSOR = frozenset(dir(torch.Tensor))
# Methods that change the object they are called on.
_MUTATING_METHODS = {
    "append",
    "appendleft",
    "extend",
    "insert",
    "pop",
    "popleft",
    "popitem",
    "remove",
    "discard",
    "add",
    "update",
    "clear",
    "setdefault",
    "rotate",
    "sort",
    "reverse",
    "__setitem__",
    "put",
    "get",
    "get_nowait",
    "put_nowait",
}


@dataclass(frozen=True, slots=True)
class ChangedValue:
    """A value that has changed: its name, and the line that changes it or names it; None if no code
    of the step does, as far as that was searched. As text, it says why the step cannot be captured
    and what to do."""

    name: str
    line: Site | None
    has_tensors: bool

    def __str__(self) -> str:
        where = "" if self.line is None else f" ({self.line})"
        if self.name.endswith(".training"):
            remedy = "call train() and eval() between epochs, not between the batches of one"
        elif self.name.endswith(".last_epoch"):
            remedy = "call the scheduler's step() in the loop, after the step"
        elif self.has_tensors:
            remedy = "keep the same tensor and write to it in place, with copy_()"
        else:
            remedy = "make it a tensor on the device and write to it in place, with fill_()"
        if self.line is None:  # compared, since code of a library may read it
            remedy += (
                "; or, if nothing in the step reads it, keep it in a variable of the loop, and not "
                "in an object that the step uses"
            )
        return (
            f"{self.name} changes from batch to batch{where}, and a graph would repeat the value "
            f"it was captured with: {remedy}"
        )


@dataclass(slots=True)
class StateOwners:
    """Objects that keep a step's state in tensors, in the order in which they are found."""

    modules: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    scalers: list[torch.amp.GradScaler] = field(default_factory=list)
    #: The name of a function or module that the user compiled with CUDA graphs inside.
    own_graphs: str | None = None


class PythonState:
    """A snapshot of the values that a step's function and its `parts`, modules and optimizers, can
    read."""

    def __init__(self, device: Device, function: object, parts: tuple[object, ...]) -> None:
        self._device, self._function, self._parts = device, function, parts
        self._found = self._search()

    def _search(self) -> _Search:
        return _Search(self._device, self._function, self._parts)

    def changed(self) -> ChangedValue | None:
        """The first value that differs from the snapshot. If there is one, take a new snapshot."""
        changed = self.changed_so_far()
        if changed is not None or self._found.is_outdated:
            self._found = self._search()
        return changed

    def changed_so_far(self) -> ChangedValue | None:
        """Like `changed`, but keeps the snapshot, so that `restore` can still undo the change."""
        variable = self._found.changed_variable()
        return None if variable is None else self._found.describe(variable)

    def restore(self) -> None:
        """Set all values back to the snapshot, after a step that does not count."""
        self._found.restore()

    def iterator(self) -> tuple[str, Site | None] | None:
        """The name and line of an iterator that the code draws from, if any. Its next item cannot
        be known without drawing it."""
        return self._found.iterator

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the values."""
        return self._found.tensors

    def owners(self) -> StateOwners:
        """The modules, optimizers and gradient scalers among the values, and the like."""
        return self._found.owners


# --- variables: where a value is kept, and what it was at the snapshot ----------------------------


class _MappingEntries:
    """Some entries of a mapping: an object's or a class's attributes, or a function's globals.
    `kind` is the class whose attributes they are. If it may not grow, any new key is a change.

    `missing` are keys that the code names and the mapping does not have. An attribute that appears
    later may hide one of the class, or a default that the code would take.
    """

    def __init__(
        self,
        mapping: Any,
        keys: list[Any],
        prefix: str,
        missing: Iterable[str] = (),
        kind: type | None = None,
        may_grow: bool = True,
    ) -> None:
        self.mapping, self.keys, self._prefix, self._kind = mapping, keys, prefix, kind
        # One call gets all of them, since this runs before each batch.
        get: Any = operator.itemgetter(*keys) if keys else lambda mapping: ()
        self._get = get if len(keys) != 1 else lambda mapping: (get(mapping),)
        self._values = self._get(mapping)
        self.missing, self.may_grow = frozenset(missing), may_grow
        self._note_size()
        self._changed: Any = None
        self.is_replaced = False

    def _note_size(self) -> None:
        """If all keys are compared, the size shows whether there is a new one."""
        self._count = len(self.mapping)
        self.is_sized = _OF_EVERY_MODULE.union(self.keys).issuperset(self.mapping)

    def has_changed(self) -> bool:
        if not (self.is_sized and len(self.mapping) == self._count):
            if not self.missing.isdisjoint(self.mapping):
                self._changed = next(key for key in self.mapping if key in self.missing)
                return True
            if len(self.mapping) > self._count and not self.may_grow:
                self._changed = next(key for key in self.mapping if key not in self.keys)
                return True
            if len(self.mapping) != self._count:
                self._note_size()
        try:
            now = self._get(self.mapping)
        except KeyError:
            self._changed = next(key for key in self.keys if key not in self.mapping)
            return True
        if all(map(operator.is_, now, self._values)):
            return False
        for key, one, other in zip(self.keys, now, self._values, strict=True):
            if not same_value(one, other):
                self._changed = key
                return True
        self.is_replaced = any(map(_is_other_container, now, self._values))
        self._values = now
        return False

    @property
    def name(self) -> str:
        return f"{self._prefix}{self._changed}"

    def value(self) -> Any:
        return self.mapping.get(self._changed)

    def restore(self) -> None:
        for key, value in zip(self.keys, self._values, strict=True):
            if self.mapping.get(key, self) is value:
                continue
            if self._kind is not None:
                setattr(self._kind, key, value)
            else:
                self.mapping[key] = value
        for key in [key for key in self.mapping if key in self.missing]:
            if self._kind is not None:
                delattr(self._kind, key)
            else:
                del self.mapping[key]


class _Items:
    """A container's items: how many there are and, unless it is large, which."""

    def __init__(self, container: Any, name: str) -> None:
        self.name = self._name = name
        self._container = container
        self._count = len(container)
        self._is_mapping = isinstance(container, Mapping)
        self._is_large = self._count > _LARGE
        self._keys, self._items = self._listed()
        self._value: Any = None
        self.is_replaced = False

    def _listed(self) -> tuple[list[Any], list[Any]]:
        """The keys, if there are any, and the items. None of a large container."""
        if self._is_large:
            return [], []
        if self._is_mapping:
            return list(self._container), list(self._container.values())
        return [], list(self._container)

    def has_changed(self) -> bool:
        if len(self._container) != self._count and self._is_large:
            return True
        keys, now = self._listed()
        if (
            len(now) == len(self._items)
            and all(map(operator.is_, now, self._items))
            and all(map(operator.is_, keys, self._keys))
        ):
            return False
        for at, (one, other) in enumerate(itertools.zip_longest(now, self._items)):
            if not same_value(one, other):
                self._value = other if one is None else one
                found = keys if at < len(keys) else self._keys
                self.name = _item_name(self._name, found[at]) if found else self._name
                return True
        if len(now) != len(self._items) or not all(map(same_value, keys, self._keys)):
            return True
        self.is_replaced = any(map(_is_other_container, now, self._items))
        return False

    def value(self) -> Any:
        return self._value

    def restore(self) -> None:
        if self._is_large or not self.has_changed():
            return
        container: Any = self._container
        if isinstance(container, list):
            container[:] = self._items
        elif self._is_mapping:
            if not isinstance(container, dict):
                return
            container.clear()
            container.update(zip(self._keys, self._items, strict=True))
        else:
            container.clear()
            (container.extend if isinstance(container, deque) else container.update)(self._items)


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are the same object, equal constants, or containers of the same values."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (*_CONSTANT_TYPES, numpy.generic)):
        is_equal = bool(one == other) or bool(one != one and other != other)
        return is_equal and repr(one) == repr(other)  # -0.0 differs from 0.0 only as text
    if isinstance(one, tuple | list | set | frozenset | dict | deque):
        # Code may build an equal container each time: compare the items.
        if len(one) != len(other) or len(one) > _LARGE:
            return False
        if isinstance(one, set | frozenset):
            return bool(one == other)
        if isinstance(one, dict):
            pairs = zip(one.items(), other.items(), strict=True)  # in order, as code reads them
            return all(same_value(a, b) and same_value(c, d) for (a, c), (b, d) in pairs)
        return all(map(same_value, one, other))
    if isinstance(one, _COMPARED_BY_VALUE):
        return bool(one == other)
    if isinstance(one, numpy.ndarray):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape) and one.nbytes <= _MAX_BYTES
        return alike and one.tobytes() == other.tobytes()
    return False


def _item_name(container: str, key: Any) -> str:
    return f"{container}[{key!r}]" if isinstance(key, _CONSTANT_TYPES) else container


def _is_other_container(one: Any, other: Any) -> bool:
    """Whether a container that can change was replaced by another one of equal items. `one` and
    `other` are equal; each may be such a container, or a tuple of them."""
    if one is other:
        return False
    if isinstance(one, tuple):
        return any(map(_is_other_container, one, other))
    return isinstance(one, list | set | dict | deque | numpy.ndarray)


@dataclass(slots=True)
class _Getter:
    """A value behind a function: a closure's cell, a random generator's state."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object] | None = None
    same: Callable[[Any, Any], bool] = same_value
    is_replaced: bool = field(init=False, default=False)
    _value: Any = field(init=False)

    def __post_init__(self) -> None:
        self._value = self.get()

    def has_changed(self) -> bool:
        now = self.get()
        if now is self._value:
            return False
        if not self.same(now, self._value):
            return True
        self.is_replaced = self.same is same_value and _is_other_container(now, self._value)
        return False

    def value(self) -> Any:
        return self.get()

    def restore(self) -> None:
        if self.set is not None and self.has_changed():
            self.set(self._value)


class _Defaults:
    """The default arguments of functions, and their code, which a program may replace."""

    is_replaced = False  # their values are followed too
    _parts = ("__defaults__", "__kwdefaults__", "__code__")

    def __init__(self) -> None:
        self.functions: list[types.FunctionType] = []
        self.name = ""
        self._noted: list[list[Any]] = [[] for _ in self._parts]
        self._getters = list(map(operator.attrgetter, self._parts))

    def add(self, function: types.FunctionType) -> None:
        self.functions.append(function)
        for part, noted in zip(self._parts, self._noted, strict=True):
            noted.append(getattr(function, part))

    def has_changed(self) -> bool:
        functions = self.functions
        for get, noted in zip(self._getters, self._noted):  # noqa: B905 - before every batch
            if not all(map(operator.is_, map(get, functions), noted)):
                at = list(map(operator.is_, map(get, functions), noted)).index(False)
                self.name = f"{functions[at].__name__}.{self._parts[self._getters.index(get)]}"
                return True
        return False

    def value(self) -> Any:
        return None

    def restore(self) -> None:
        for part, noted in zip(self._parts, self._noted, strict=True):
            for function, value in zip(self.functions, noted, strict=True):
                if getattr(function, part) is not value:
                    setattr(function, part, value)


_Variable = _MappingEntries | _Items | _Getter | _Defaults


# --- finding them ---------------------------------------------------------------------------------


class _Search:
    """Finds all variables that can be reached from a step's function and modules. An attribute
    counts if some code that is reached names it. So the search is repeated until it finds no new
    names."""

    def __init__(self, device: Device, function: object, parts: tuple[object, ...]) -> None:
        self._device = device
        self._own_package = _package_of(function)
        self._codes: dict[int, types.CodeType] = {}
        self._names: set[str] = set()
        known_names = -1
        while known_names != len(self._names):
            known_names = len(self._names)
            self._defaults = _Defaults()
            self.variables: list[_Variable] = [self._defaults]
            self.tensors: list[torch.Tensor] = []
            self.owners = StateOwners()
            self.iterator: tuple[str, Site | None] | None = None
            self._seen: set[int] = set()
            self._with_settings: set[int] = set()
            self._of_modules: set[int] = set()  # their dicts of attributes, by `id`
            self._classes: set[type] = set()
            self._kept_alive: list[object] = []  # an `id` is unique only while its object lives
            self._follow(function, _name_of(function), 0)
            for part in parts:
                self._follow(part, type(part).__name__, 0)
            if not self._names.isdisjoint(_OF_THE_ENVIRONMENT):
                self._add_getter("os.environ", lambda: dict(os.environ))
        self._kept_alive.clear()  # what only a weak reference leads to may end
        self._other_variables: list[_Variable] = []
        #: Whether an equal container has replaced one: its items are to be watched instead.
        self.is_outdated = False
        self._note_attributes()

    def changed_variable(self) -> _Variable | None:
        # Most variables are attributes. Usually one call shows that all are the same objects.
        same = self._same_attributes.hold()
        variables = self._other_variables if same else self.variables
        changed = next((variable for variable in variables if variable.has_changed()), None)
        if changed is None:
            self.is_outdated |= any(variable.is_replaced for variable in variables)
            if not same:
                self._note_attributes()  # other objects, of equal value
        return changed

    def _note_attributes(self) -> None:
        self._other_variables = []
        entries: list[Any] = []
        of_classes: list[Any] = []
        sized: list[Any] = []
        without: list[tuple[Any, frozenset[Any]]] = []
        for variable in self.variables:
            if not isinstance(variable, _MappingEntries):
                self._other_variables.append(variable)
                continue
            mapping, keys, missing = variable.mapping, variable.keys, variable.missing
            if not missing and variable.may_grow:
                looked_up = keys
            elif variable.is_sized:
                looked_up = keys
                sized.append(mapping)
            elif len(missing) < len(mapping):
                looked_up = [*keys, *missing]
            else:  # it takes less time to go through the mapping's keys
                looked_up = keys
                without.append((mapping, missing))
            noted = entries if isinstance(mapping, dict) else of_classes
            noted += [(mapping, key) for key in looked_up]
        self._same_attributes = SameEntries(entries, sized, without, of_classes)

    def restore(self) -> None:
        for variable in self.variables:
            variable.restore()

    # --- values by kind ---------------------------------------------------------------------------

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        self._kept_alive.append(value)
        return True

    def _follow(self, value: Any, name: str, depth: int) -> None:
        """Add what can be read through a value. `name` is what messages call it."""
        if type(value) in _CONSTANT_TYPES or depth > _MAX_DEPTH or not self._is_new(value):
            return
        if type(value) in weakref.ProxyTypes:
            self._follow(_behind(value), name, depth + 1)
        elif isinstance(value, _CONSTANT_TYPES):  # of a class that may have methods: an Enum
            self._object(value, name, depth)
        elif isinstance(value, torch.Tensor):
            self._tensor(value, name, depth)
        elif isinstance(value, torch.nn.Module):
            self._modules(value, name, depth)
        elif isinstance(value, types.FunctionType):
            self._function(value, name, depth)
        elif isinstance(value, types.MethodType):
            self._follow(value.__self__, name.rpartition(".")[0] or name, depth)
            self._follow(value.__func__, name, depth)
        elif isinstance(value, types.BuiltinMethodType):  # history.append, generator.random
            if not isinstance(value.__self__, types.ModuleType | type):
                self._follow(value.__self__, name, depth)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._follow(part, name, depth)
        elif isinstance(value, _CONTAINERS):
            self._container(value, name, depth)
            if type(value) not in _CONTAINERS:
                self._object(value, name, depth)
        elif isinstance(value, types.ModuleType):
            if self._is_own(getattr(value, "__file__", None) or ""):
                self._attributes(vars(value), f"{name}.", depth, only=self._names)
        elif not self._opaque_object(value, name, depth):
            self._object(value, name, depth)

    def _tensor(self, tensor: torch.Tensor, name: str, depth: int) -> None:
        self.tensors.append(tensor)
        own = self._names - _OF_EVERY_TENSOR
        self._attributes(vars(tensor), f"{name}.", depth, only=own)
        if self._device.holds(tensor):
            return
        # A captured kernel freezes the values it takes from a host tensor.
        if not is_lazy(tensor) and tensor.numel() <= _LARGE and _tensor_bytes(tensor) is not None:
            self._add_getter(name, lambda: _tensor_bytes(tensor))
        elif not tensor.is_inference():
            self._add_getter(name, lambda: tensor._version)

    def _container(self, value: Any, name: str, depth: int) -> None:
        if not isinstance(value, tuple | frozenset):  # those cannot change
            self.variables.append(_Items(value, name))
        if len(value) > _LARGE:
            return
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in list(pairs):
            self._follow(item, _item_name(name, key), depth + 1)

    def _function(self, function: types.FunctionType, name: str, depth: int) -> None:
        self._note_own_graphs(function, name)
        self._attributes(vars(function), f"{function.__name__}.", depth, only=self._names)
        # What functools.wraps and functools.singledispatch have made leads to the user's functions.
        for key in ("__wrapped__", "registry"):
            self._follow(vars(function).get(key), name, depth + 1)
        code = function.__code__
        if not self._is_own(code.co_filename):
            for cell in function.__closure__ or ():
                # A library's decorator that does not say what it wraps.
                if isinstance(inner := _content(cell), types.FunctionType):
                    self._follow(inner, name, depth + 1)
            return
        self._read_code(code)
        self._defaults.add(function)
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            self._cell(cell, variable, depth)
        parameters = code.co_varnames[: code.co_argcount][::-1]
        defaults = zip(parameters, (function.__defaults__ or ())[::-1], strict=False)
        for parameter, default in [*defaults, *(function.__kwdefaults__ or {}).items()]:
            self._follow(default, parameter, depth + 1)
        self._attributes(function.__globals__, "", depth, only=_names_in(code).globals)
        for module in _names_in(code).imports:
            self._import(module, function.__globals__.get("__package__") or "", depth)

    def _import(self, name: str, package: str, depth: int) -> None:
        """Follow a module that a function imports, whose name may be relative to its package."""
        outer = itertools.accumulate(package.split("."), "{}.{}".format)
        relative = [f"{one}.{name}".rstrip(".") for one in outer]
        found = [one for one in relative if one in sys.modules]
        for full_name in (name, name.partition(".")[0], *found):
            # A module that is not imported yet is followed when it is.
            self._add_getter(full_name, functools.partial(sys.modules.get, full_name))
            self._follow(sys.modules.get(full_name), full_name, depth + 1)

    def _cell(self, cell: types.CellType, variable: str, depth: int) -> None:
        if self._is_new(cell):
            self._add_getter(variable, lambda: _content(cell), functools.partial(_fill, cell))
            self._follow(_content(cell), variable, depth + 1)

    def _object(self, value: Any, name: str, depth: int) -> None:
        kind = value if isinstance(value, type) else type(value)
        if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
            self._engine(value, name)
            return
        for one in kind.__mro__:
            if self._is_own(_file_of(one)):
                self._class(one, name, depth)
        if isinstance(value, type):
            metaclass: Any = type(value)
            for one in metaclass.__mro__:  # it may have properties of the class
                if self._is_own(_file_of(one)):
                    self._class(one, name, depth)
            return
        if (attributes := _attributes_of(value)) is not None:
            self._attributes(attributes, f"{name}.", depth, only=self._names)
        for one in kind.__mro__:
            for slot in _slots_of(one) & self._names:
                get = functools.partial(_slot, value, slot)
                put = functools.partial(_fill_slot, value, slot)
                self._add_getter(f"{name}.{slot}", get, put)
                self._follow(get(), f"{name}.{slot}", depth + 1)

    def _own_optimizer(self, value: torch.optim.Optimizer, name: str, depth: int) -> None:
        """Add what an optimizer of the user's own keeps besides its state, such as a count."""
        for kind in type(value).__mro__:
            if self._is_own(_file_of(kind)):
                self._class(kind, name, depth)
        named = (self._names | _CALLED_BY_NAME) - {"state", "param_groups", "defaults"}
        self._attributes(vars(value), f"{name}.", depth, only=named)

    def _class(self, kind: type, name: str, depth: int) -> None:
        """Follow a class's attributes and methods that code names, and all methods that syntax
        calls (`x[0]`, `x()`)."""
        if kind in self._classes:
            return
        self._classes.add(kind)
        compared = []
        for attribute, member in list(vars(kind).items()):
            dunder = attribute.startswith("__") and attribute.endswith("__")
            is_called = dunder or attribute in _CALLED_BY_NAME or attribute in self._names
            if attribute in _NOT_CALLED_BY_A_STEP or not is_called:
                continue
            functions = _functions_of(member)
            for function in functions:
                self._follow(function, f"{name}.{attribute}", depth + 1)
            if functions or not dunder:
                compared.append(attribute)
            if not functions and not dunder:
                self._follow(member, f"{kind.__name__}.{attribute}", depth + 1)
        if "__match_args__" in self._names:
            self._names |= _words_in(vars(kind).get("__match_args__"))
        missing = self._names - vars(kind).keys() - _NOT_CALLED_BY_A_STEP
        prefix = f"{kind.__name__}."
        self.variables.append(_MappingEntries(vars(kind), compared, prefix, missing, kind))

    def _engine(self, value: Any, name: str) -> None:
        """Add the counters of one of our own objects: a loss function may read `engine.updates`."""
        for attribute in ("updates", "epochs"):
            if attribute in self._names and isinstance(getattr(value, attribute, None), int):
                self._add_getter(
                    f"{name}.{attribute}", functools.partial(getattr, value, attribute)
                )

    def _modules(self, root: torch.nn.Module, name: str, depth: int) -> None:
        self.owners.modules.append(root)
        for path, module in root.named_modules():
            self._is_new(module)
            self._of_modules.add(id(vars(module)))
            prefix = f"{name}.{path}." if path else f"{name}."
            self._note_own_graphs(module, prefix[:-1])
            self._note_own_graphs(module._compiled_call_impl, prefix[:-1])
            for kind in type(module).__mro__:
                if self._is_own(_file_of(kind)):
                    self._class(kind, prefix[:-1], depth)
            own = [key for key in vars(module) if key not in _OF_EVERY_MODULE]
            named = (self._names | _CALLED_BY_NAME) - _OF_EVERY_MODULE
            self._attributes(vars(module), prefix, depth, only=named.union(own))
            for key in own:
                self._settings(vars(module)[key], module, f"{prefix}{key}.")
            parts = list(module._modules)
            self.variables.append(_MappingEntries(module._modules, parts, prefix, may_grow=False))
            self._add_entries(module._buffers, list(module._buffers), prefix)
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and self._is_new(tensor):
                    self._tensor(tensor, f"{prefix}{key}", depth)

    def _settings(self, value: Any, module: torch.nn.Module, prefix: str) -> None:
        """Add the constants of an object that a library's module has, such as `model.config`: code
        of that library reads them."""
        packages = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
        package = type(value).__module__.partition(".")[0]
        if package not in packages - {"torch", "builtins"} or id(value) in self._with_settings:
            return
        if self._is_own(_file_of(type(value))) or isinstance(value, torch.nn.Module | type):
            return
        self._with_settings.add(id(value))
        if attributes := _attributes_of(value):
            constants = [k for k, one in attributes.items() if isinstance(one, _CONSTANT_TYPES)]
            self._add_entries(attributes, constants, prefix)

    def _note_own_graphs(self, value: Any, name: str) -> None:
        if self.owners.own_graphs is None and has_own_graphs(value):
            self.owners.own_graphs = name

    def _attributes(self, mapping: Any, prefix: str, depth: int, only: Iterable[str]) -> None:
        names = frozenset(only)
        keys = [key for key in mapping if key in names]
        self._add_entries(mapping, keys, prefix, names.difference(keys))
        for key in keys:
            self._follow(mapping[key], f"{prefix}{key}", depth + 1)

    def _add_entries(
        self, mapping: Any, keys: list[str], prefix: str, missing: Iterable[str] = ()
    ) -> None:
        if keys or missing:
            self.variables.append(_MappingEntries(mapping, keys, prefix, missing))

    def _add_getter(
        self,
        name: str,
        get: Callable[[], Any],
        put: Callable[[Any], object] | None = None,
        same: Callable[[Any, Any], bool] = same_value,
    ) -> None:
        self.variables.append(_Getter(name, get, put, same))

    def _opaque_object(self, value: Any, name: str, depth: int) -> bool:
        """Add an object whose state is not in its attributes, by its own way to read it. Returns
        whether `value` is one."""
        if any(value is one for one in _GLOBAL_GENERATORS):
            pass  # others draw from them too: a watched step says whether this one does
        elif isinstance(value, random.SystemRandom):
            self._add_getter(name, object)  # the operating system's numbers always change
        elif isinstance(value, random.Random):
            self._add_getter(name, value.getstate, value.setstate, operator.eq)
        elif isinstance(value, torch.Generator):
            if value.device.type == "cpu" and value is not torch.default_generator:
                self._add_getter(name, value.get_state, value.set_state, torch.equal)
        elif isinstance(value, numpy.random.Generator):
            bits: Any = value.bit_generator
            self._add_getter(name, lambda: repr(bits.state))
        elif isinstance(value, numpy.random.RandomState):
            self._add_getter(name, lambda: pickle.dumps(value.get_state(legacy=False)))
        elif _has_bytes(value):  # an array, a ctypes number, mapped memory
            self._add_getter(name, lambda: _bytes_of(value))
            if isinstance(value, numpy.ndarray) and value.dtype.hasobject:
                self._follow(list(value.flat), name, depth + 1)
        elif hasattr(type(value), "get_obj"):  # multiprocessing.Value
            self._follow(value.get_obj(), name, depth + 1)
        elif hasattr(type(value), "is_set") and not _file_of(type(value)):
            self._add_getter(name, value.is_set)  # an event of the standard library
        elif isinstance(value, operator.attrgetter):
            self._names |= _words_in(value.__reduce__()[1])
        elif isinstance(value, torch.amp.GradScaler):
            self.owners.scalers.append(value)
        elif isinstance(value, torch.optim.Optimizer):
            self.owners.optimizers.append(value)
            if "param_groups" in self._names:
                for at, group in enumerate(value.param_groups):
                    # Graphs write the learning rates of the engine's own optimizers themselves.
                    others = ("params", "capturable", *(("lr",) if depth == 0 else ()))
                    settings = [key for key in group if key not in others]
                    self._add_entries(group, settings, f"{name}.param_groups[{at}].")
            self._own_optimizer(value, name, depth)
        elif isinstance(value, LRScheduler):
            self._add_getter(f"{name}.last_epoch", lambda: value.last_epoch)
        elif isinstance(value, ContextVar):
            self._add_getter(name, functools.partial(value.get, None))
            self._follow(value.get(None), name, depth + 1)
        elif isinstance(value, weakref.ReferenceType):
            self._add_getter(name, lambda: value() is None)
            self._follow(value(), name, depth + 1)
        elif isinstance(value, _LRU_CACHE):
            # A hit changes nothing; a miss means that the function ran again.
            self._add_getter(name, lambda: value.cache_info().misses)
            self._follow(value.__wrapped__, name, depth + 1)
        elif isinstance(value, io.IOBase) and (value.closed or value.writable()):
            pass  # what a step writes is for people to read
        elif isinstance(value, Iterator) and not self._is_own(_file_of(type(value))):
            self.iterator = self.iterator or (name, self._line_naming(name))
        elif isinstance(value, _WITH_DATA):
            self._follow(value.data, name, depth + 1)
            self._object(value, name, depth)
        elif isinstance(value, ChainMap):
            self._follow(value.maps, name, depth + 1)
            self._object(value, name, depth)
        elif isinstance(value, Mapping):
            if _gives_the_same_items(value):
                self._container(value, name, depth)
            self._object(value, name, depth)
        elif isinstance(value, queue.Queue):
            self._follow(value.queue, name, depth + 1)
        else:
            return False
        return True

    # --- code -------------------------------------------------------------------------------------

    def _read_code(self, code: types.CodeType) -> None:
        if id(code) in self._codes:
            return
        self._codes[id(code)] = code
        names = _names_in(code)
        self._names |= names.attributes | _OF_THE_ENVIRONMENT.intersection(names.globals)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._read_code(constant)

    def _is_own(self, file: str) -> bool:
        """Whether a file is the user's own, or of the library that the loss function is from."""
        if not file or not is_user_code(file):
            return False
        package = _library(file)
        return package is None or package == self._own_package

    # --- lines ------------------------------------------------------------------------------------

    def describe(self, variable: _Variable) -> ChangedValue:
        name, has_tensors = variable.name, _has_tensors(variable.value())
        attribute = name.rpartition(".")[2]
        of_module = (
            isinstance(variable, _MappingEntries) and id(variable.mapping) in self._of_modules
        )
        is_named = attribute in self._names or not of_module
        return ChangedValue(name, self._line_naming(name) if is_named else None, has_tensors)

    def _line_naming(self, name: str) -> Site | None:
        """The line that changes the variable `name`, else the first line that names it."""
        for word in reversed(_WORDS.findall(name)):
            named: Site | None = None
            for code in self._codes.values():
                if code.co_filename == "<string>":  # a method that `dataclass` has made
                    continue
                for line, is_change in _lines_naming(code, word):
                    site = Site(code.co_filename, line)
                    if is_change:
                        return site
                    named = named or site
            if named is not None:
                return named
        return None


_WORDS = re.compile(r"[^\W\d]\w*")
# Instructions that name an attribute. A constant may be a name, too: getattr(self, "h").
_ATTRIBUTE_INSTRUCTIONS = (
    "LOAD_ATTR",
    "LOAD_METHOD",
    "STORE_ATTR",
    "DELETE_ATTR",
    "LOAD_SUPER_ATTR",
    "LOAD_CONST",
    "IMPORT_FROM",
)
_STORE_INSTRUCTIONS = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF")
_GLOBAL_GENERATORS: list[Any] = [random._inst, numpy.random.mtrand._rand]
_LRU_CACHE = type(functools.lru_cache(lambda: None))
_CALLED_BY_NAME = frozenset(("forward", "step"))  # of modules and optimizers, by PyTorch and here
_NOT_CALLED_BY_A_STEP = {
    "__init__",
    "__new__",
    "__init_subclass__",
    "__repr__",
    "__str__",
    "__del__",
    "__reduce__",
    "__reduce_ex__",
    "__getstate__",
    "__setstate__",
    "__dir__",
    "__format__",
    "__sizeof__",
    "__class_getitem__",
    "__subclasshook__",
    "extra_repr",
}


@dataclass(frozen=True, slots=True)
class _Names:
    """The names in a function's code and in the functions inside it."""

    globals: frozenset[str]
    attributes: frozenset[str]
    imports: frozenset[str]


@functools.cache
def _names_in(code: types.CodeType) -> _Names:
    names, attributes, imports = set(), set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            imports.add(instruction.argval)
        elif instruction.opname.endswith(("_GLOBAL", "_NAME")):
            names.add(instruction.argval)
        elif instruction.opname in _ATTRIBUTE_INSTRUCTIONS:
            attributes |= _words_in(instruction.argval)
        elif instruction.opname == "MATCH_CLASS":
            attributes.add("__match_args__")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names_in(constant)
            names |= inner.globals
            attributes |= inner.attributes
            imports |= inner.imports
    if "globals" in names:  # globals()["beta"]
        names |= attributes
    return _Names(frozenset(names), frozenset(attributes), frozenset(imports))


def _words_in(constant: Any) -> set[str]:
    """What may be an attribute's name in a constant of code: `getattr(self, "h")`, `for name in
    ("h", "c")`, `case Point(x=0)`, `attrgetter("cell.h")`."""
    if isinstance(constant, str):
        return {constant, *constant.split(".")}
    if isinstance(constant, tuple | frozenset):
        return set().union(*map(_words_in, constant))
    return set()


@functools.cache
def _lines_naming(code: types.CodeType, word: str) -> list[tuple[int, bool]]:
    """The lines of a function that name `word`, each with whether it seems to change it."""
    lines: dict[int, tuple[set[str], bool]] = {}
    for instruction in dis.get_instructions(code):
        line = instruction.positions.lineno if instruction.positions is not None else None
        if line is None:
            continue
        named, changes = lines.get(line, (set(), False))
        value = instruction.argval
        if isinstance(value, str):
            named.add(value)
        stores = instruction.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") or (
            instruction.opname in _STORE_INSTRUCTIONS and value == word
        )
        lines[line] = (named, changes or stores or value in _MUTATING_METHODS)
    return [(line, changes) for line, (named, changes) in lines.items() if word in named]


def _functions_of(member: Any) -> list[Any]:
    """The functions behind a class's member: a method, a property, a cached function and the
    like."""
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    if isinstance(member, property):
        found = [member.fget, member.fset]
    elif isinstance(member, functools.cached_property | functools.partialmethod):
        found = [member.func]
    elif isinstance(member, functools.singledispatchmethod):
        found = [member.func, *member.dispatcher.registry.values()]
    else:
        found = [member]
    return [one for one in found if isinstance(one, types.FunctionType | _LRU_CACHE)]


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | deque):
        return any(map(_has_tensors, itertools.islice(value, _LARGE)))
    return isinstance(value, torch.Tensor)


def _gives_the_same_items(mapping: Mapping[Any, Any]) -> bool:
    """Whether a mapping's values can be compared: one that reads a file may make them anew."""
    try:
        if len(mapping) > _LARGE:
            return False
        return all(map(same_value, list(mapping.values()), list(mapping.values())))
    except Exception:  # code of the user's, or of a library
        return False


def _behind(proxy: Any) -> Any:
    """The object that a `weakref.proxy` stands for. None if it has ended."""
    try:
        return proxy.__repr__.__self__
    except ReferenceError:
        return None


def _has_bytes(value: Any) -> bool:
    try:
        return memoryview(value).nbytes <= _MAX_BYTES
    except (TypeError, ValueError):
        return False


def _bytes_of(value: Any) -> bytes:
    return memoryview(value).tobytes()


def _tensor_bytes(tensor: torch.Tensor) -> bytes | None:
    """The values of a tensor on the host. None if they cannot be read."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return None
    try:
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes()
    except (RuntimeError, TypeError):  # quantized, or of a class with its own memory
        return None


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes that an object keeps in a dict, if it does."""
    try:
        found = vars(value)
    except Exception:  # code of the user's
        return None
    return found if isinstance(found, dict) else None


def _slots_of(kind: type) -> set[str]:
    """The attributes that a class keeps in slots, as code names them: `__slots__` itself may name
    private ones."""
    return {key for key, one in vars(kind).items() if isinstance(one, types.MemberDescriptorType)}


def _slot(value: Any, name: str) -> Any:
    try:
        return getattr(value, name)
    except Exception:  # not assigned yet: the user's code may raise another error then
        return _NOT_ASSIGNED


def _fill_slot(value: Any, name: str, content: Any) -> None:
    if content is _NOT_ASSIGNED:
        delattr(value, name)
    else:
        setattr(value, name, content)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _fill(cell: types.CellType, value: Any) -> None:
    cell.cell_contents = value


def _name_of(loss: object) -> str:
    if isinstance(loss, types.MethodType):
        return f"{type(loss.__self__).__name__}.{loss.__func__.__name__}"
    return loss.__name__ if isinstance(loss, types.FunctionType) else type(loss).__name__


def _file_of(kind: type) -> str:
    """The file of a class: "" for the standard library, a name in <> if there is no file, as in a
    notebook."""
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names - {"__main__"}:
        return ""
    module = sys.modules.get(kind.__module__)
    return getattr(module, "__file__", None) or f"<{kind.__module__}>"


def _library(file: str) -> str | None:
    """The name of the installed package that a file belongs to, if any."""
    parts = Path(file).parts
    for at, part in enumerate(parts[:-1]):
        if part in ("site-packages", "dist-packages"):
            return parts[at + 1]
    return None


def _package_of(loss: Any) -> str | None:
    """The installed package that the loss function is from, if any: the search enters that one."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    code = getattr(getattr(loss, "__func__", loss), "__code__", None)
    return _library(code.co_filename if code is not None else _file_of(type(loss)))
