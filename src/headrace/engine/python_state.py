"""The Python values that a step's code can read: what a captured graph would freeze.

A replayed graph runs no Python. A number that the loss function reads from a closure, a global, a
default argument or an object would stay what it was at capture, and a tensor that it stores for the
next batch would never be looked at again. So these values are found once, by following what the
loss function's code names, and compared before each batch:

    def loss(model, batch):
        out, h = model(batch.x, state["h"])      # `state` is in the closure, "h" among its keys
        state["h"] = h.detach()                  # another tensor each time: noticed
        return criterion(out, batch.y) * weight  # `weight`, a global: noticed when it changes

Followed are the functions, classes and containers of the user's own code, and all attributes of
modules. Libraries are not followed beyond their modules' attributes: whatever they keep elsewhere
is noticed by what the step computes (`step_trace.py`).
"""

from __future__ import annotations

import dis
import functools
import itertools
import operator
import queue
import random
import re
import sys
import types
import weakref
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy
import torch
from torch.optim.lr_scheduler import LRScheduler

from headrace.device import Device
from headrace.source_lines import Site, is_user_code

_LARGE = 1000  # of longer containers only the length is compared
_DEEPEST = 12
_PLAIN = (int, float, complex, bool, str, bytes, type(None), Enum)
_COMPARED = (numpy.generic, torch.dtype, torch.device, types.MethodType, PurePath, range)
# What every module has: compared elsewhere, or of no consequence to what it computes.
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}
# Methods that change what they are called on.
_CHANGING = {
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
class Changed:
    """A value that is not what it was: its name, and the line that changes it, if one is found."""

    name: str
    line: Site | None
    has_tensors: bool

    def __str__(self) -> str:
        where = "" if self.line is None else f" ({self.line})"
        remedy = (
            "keep the same tensor and write to it in place, with copy_()"
            if self.has_tensors
            else "make it a tensor on the device, and write to it in place"
        )
        return (
            f"{self.name} changes from batch to batch{where}, and a graph would keep it as it was "
            f"at capture: {remedy}"
        )


class PythonState:
    """The values that a loss function and its model can read, as they were at the last look."""

    def __init__(self, device: Device, loss: object, model: torch.nn.Module) -> None:
        self._device, self._loss, self._model = device, loss, model
        self._found = self._walk()

    def _walk(self) -> _Walk:
        return _Walk(self._device, self._loss, self._model)

    def changed(self) -> Changed | None:
        """The first value that has changed since the last look, which this is then."""
        changed = self.changed_so_far()
        if changed is not None:
            self._found = self._walk()
        return changed

    def changed_so_far(self) -> Changed | None:
        """The same without a new look, so that `put_back` can still undo the change."""
        place = self._found.changed_place()
        return None if place is None else self._found.describe(place)

    def put_back(self) -> None:
        """Undo what has changed since the last look, after a step that is not to count."""
        self._found.put_back()

    def iterator(self) -> tuple[str, Site | None] | None:
        """An iterator that the code draws from, and the line: what it gives next cannot be told."""
        return self._found.iterator

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the values."""
        return self._found.tensors


# --- places: where a value is, and what it was ----------------------------------------------------


class _Attributes:
    """Some entries of a mapping: an object's attributes, a function's globals, a dict's keys."""

    def __init__(self, mapping: Any, keys: list[Any], names: list[str]) -> None:
        self._mapping, self._keys, self._names = mapping, keys, names
        # One call for all of them: this is done before each batch.
        get = operator.itemgetter(*keys)
        self._get = get if len(keys) > 1 else lambda mapping: (get(mapping),)
        self._values = self._get(mapping)
        self._at = 0

    def has_changed(self) -> bool:
        try:
            now = self._get(self._mapping)
        except KeyError:
            self._at = next(i for i, key in enumerate(self._keys) if key not in self._mapping)
            return True
        if all(map(operator.is_, now, self._values)):
            return False
        for at, (one, other) in enumerate(zip(now, self._values, strict=True)):
            if not _same(one, other):
                self._at = at
                return True
        self._values = now
        return False

    @property
    def name(self) -> str:
        return self._names[self._at]

    def value(self) -> Any:
        return self._mapping.get(self._keys[self._at])

    def put_back(self) -> None:
        for key, value in zip(self._keys, self._values, strict=True):
            if self._mapping.get(key, self) is not value:
                self._mapping[key] = value


class _Content:
    """Which items a container has: their number and, of a short one, which."""

    def __init__(self, container: Any, name: str) -> None:
        self.name = self._name = name
        self._container = container
        self._count = len(container)
        self._keys = list(container) if isinstance(container, dict) else None
        self._items = self._listed() if self._count <= _LARGE else None
        self._value: Any = None

    def _listed(self) -> list[Any]:
        container = self._container
        return list(container.values() if isinstance(container, dict) else container)

    def has_changed(self) -> bool:
        container, items = self._container, self._items
        if len(container) == self._count and (
            items is None or all(map(operator.is_, self._listed(), items))
        ):
            return False
        now = self._listed() if items is not None else []
        keys = list(container) if isinstance(container, dict) else None
        for at, (one, other) in enumerate(itertools.zip_longest(now, items or [])):
            if not _same(one, other):
                self._value = other if one is None else one
                found = (keys, self._keys)[len(now) <= at] if keys is not None else None
                self.name = self._name if found is None else f"{self._name}[{found[at]!r}]"
                return True
        return len(container) != self._count or keys != self._keys

    def value(self) -> Any:
        return self._value

    def put_back(self) -> None:
        if self._items is None or not self.has_changed():
            return
        container: Any = self._container
        if isinstance(container, list):
            container[:] = self._items
        elif self._keys is not None:
            container.clear()
            container.update(zip(self._keys, self._items, strict=True))
        else:
            container.clear()
            (container.extend if isinstance(container, deque) else container.update)(self._items)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same one, or equal numbers or texts."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, _PLAIN):
        return bool(one == other) or (one != one and other != other)
    if isinstance(one, tuple | list | set | frozenset | dict | deque):
        # A container made anew each time: the same if what is in it is.
        if len(one) != len(other) or len(one) > _LARGE:
            return False
        if isinstance(one, set | frozenset):
            return bool(one == other)
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
        return all(map(_same, one, other))
    if isinstance(one, _COMPARED):
        return bool(one == other)
    return False


@dataclass(slots=True)
class _Asked:
    """Something that is asked for its value: a closure's cell, a generator's position."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object] | None = None
    same: Callable[[Any, Any], bool] = _same
    _value: Any = field(init=False)

    def __post_init__(self) -> None:
        self._value = self.get()

    def has_changed(self) -> bool:
        return not self.same(self.get(), self._value)

    def value(self) -> Any:
        return self.get()

    def put_back(self) -> None:
        if self.set is not None and self.has_changed():
            self.set(self._value)


_Place = _Attributes | _Content | _Asked


# --- finding them ---------------------------------------------------------------------------------


class _Walk:
    """All places that can be reached from a loss function and a model. Which attributes count
    depends on the names in all code that is reached: so it is walked until no new ones come up."""

    def __init__(self, device: Device, loss: object, model: torch.nn.Module) -> None:
        self._device = device
        self._own_package = _package_of(loss)
        self._codes: dict[int, types.CodeType] = {}
        self._names = {"forward"}
        known = 0
        while known != len(self._names):
            known = len(self._names)
            self.places: list[_Place] = []
            self.tensors: list[torch.Tensor] = []
            self.iterator: tuple[str, Site | None] | None = None
            self._seen: set[int] = set()
            self._classes: set[type] = set()
            self._kept: list[object] = []  # an id stays an object's own for as long as it lives
            self._value(loss, _name_of(loss), 0)
            self._value(model, type(model).__name__, 0)

    def changed_place(self) -> _Place | None:
        return next((place for place in self.places if place.has_changed()), None)

    def put_back(self) -> None:
        for place in self.places:
            place.put_back()

    # --- values by kind ---------------------------------------------------------------------------

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        self._kept.append(value)
        return True

    def _value(self, value: Any, name: str, depth: int) -> None:
        """Follow a value that has a name."""
        if isinstance(value, _PLAIN) or depth > _DEEPEST or not self._is_new(value):
            return
        if isinstance(value, torch.Tensor):
            self._tensor(value, name)
        elif isinstance(value, torch.nn.Module):
            self._modules(value, name, depth)
        elif isinstance(value, types.FunctionType):
            self._function(value, name, depth)
        elif isinstance(value, types.MethodType):
            self._value(value.__self__, name.rpartition(".")[0] or name, depth)
            self._value(value.__func__, name, depth)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._value(part, name, depth)
        elif isinstance(value, list | tuple | set | frozenset | dict | deque):
            self._container(value, name, depth)
        elif isinstance(value, types.ModuleType):
            if self._is_own(getattr(value, "__file__", None) or ""):
                self._attributes(vars(value), f"{name}.", depth, only=self._names)
        elif not self._kept_in_c(value, name, depth):
            self._object(value, name, depth)

    def _tensor(self, tensor: torch.Tensor, name: str) -> None:
        self.tensors.append(tensor)
        if not tensor.is_inference() and not self._device.holds(tensor):
            # A kernel that is captured keeps the numbers of a host tensor.
            self._ask(name, lambda: tensor._version)

    def _container(self, value: Any, name: str, depth: int) -> None:
        if not isinstance(value, tuple | frozenset):  # those cannot change
            self.places.append(_Content(value, name))
        if len(value) > _LARGE:
            return
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in list(pairs):
            self._value(item, f"{name}[{key!r}]" if isinstance(key, _PLAIN) else name, depth + 1)

    def _function(self, function: types.FunctionType, name: str, depth: int) -> None:
        self._attributes(vars(function), f"{function.__name__}.", depth, only=self._names)
        self._value(getattr(function, "__wrapped__", None), name, depth + 1)
        code = function.__code__
        if not self._is_own(code.co_filename):
            return
        self._read_code(code)
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            self._cell(cell, variable, depth)
        parameters = code.co_varnames[: code.co_argcount][::-1]
        defaults = zip(parameters, (function.__defaults__ or ())[::-1], strict=False)
        for parameter, default in [*defaults, *(function.__kwdefaults__ or {}).items()]:
            self._value(default, parameter, depth + 1)
        self._attributes(function.__globals__, "", depth, only=_names_in(code).globals)

    def _cell(self, cell: types.CellType, variable: str, depth: int) -> None:
        if self._is_new(cell):
            self._ask(variable, lambda: _content(cell), functools.partial(_fill, cell))
            self._value(_content(cell), variable, depth + 1)

    def _object(self, value: Any, name: str, depth: int) -> None:
        kind = value if isinstance(value, type) else type(value)
        if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
            self._own_object(value, name)
            return
        for one in kind.__mro__:
            if self._is_own(_file_of(one)):
                self._class(one, name, depth)
        if isinstance(value, type):
            return
        if hasattr(value, "__dict__"):
            self._attributes(vars(value), f"{name}.", depth, only=self._names)
        for one in kind.__mro__:
            slots = one.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                if slot in self._names and hasattr(value, slot):
                    get = functools.partial(getattr, value, slot, None)
                    self._ask(f"{name}.{slot}", get, functools.partial(setattr, value, slot))
                    self._value(get(), f"{name}.{slot}", depth + 1)

    def _class(self, kind: type, name: str, depth: int) -> None:
        """The methods that are named, or called by a sign (`x[0]`, `x()`), and class attributes."""
        if kind in self._classes:
            return
        self._classes.add(kind)
        for attribute, member in list(vars(kind).items()):
            dunder = attribute.startswith("__") and attribute.endswith("__")
            if attribute in _NOT_CALLED or not (dunder or attribute in self._names):
                continue
            functions = _functions_of(member)
            for function in functions:
                self._value(function, f"{name}.{attribute}", depth + 1)
            if not dunder and not functions:
                get = functools.partial(_class_attribute, kind, attribute)
                where = f"{kind.__name__}.{attribute}"
                self._ask(where, get, functools.partial(setattr, kind, attribute))
                self._value(member, where, depth + 1)

    def _own_object(self, value: Any, name: str) -> None:
        """An engine that a loss function asks how far it is."""
        for attribute in ("updates", "epochs"):
            if attribute in self._names and isinstance(getattr(value, attribute, None), int):
                self._ask(f"{name}.{attribute}", functools.partial(getattr, value, attribute))

    def _modules(self, root: torch.nn.Module, name: str, depth: int) -> None:
        for path, module in root.named_modules():
            self._is_new(module)
            prefix = f"{name}.{path}." if path else f"{name}."
            for kind in type(module).__mro__:
                if self._is_own(_file_of(kind)):
                    self._class(kind, prefix[:-1], depth)
            own = [key for key in vars(module) if key not in _OF_EVERY_MODULE]
            self._attributes(vars(module), prefix, depth, only=own)
            self._entries(module._buffers, list(module._buffers), prefix)
            for tensors in (module._parameters, module._buffers):
                self.tensors += [one for one in tensors.values() if one is not None]

    def _attributes(self, mapping: Any, prefix: str, depth: int, only: Iterable[str]) -> None:
        keys = [key for key in only if key in mapping]
        self._entries(mapping, keys, prefix)
        for key in keys:
            self._value(mapping[key], f"{prefix}{key}", depth + 1)

    def _entries(self, mapping: Any, keys: list[str], prefix: str) -> None:
        if keys:
            self.places.append(_Attributes(mapping, keys, [f"{prefix}{key}" for key in keys]))

    def _ask(
        self,
        name: str,
        get: Callable[[], Any],
        put: Callable[[Any], object] | None = None,
        same: Callable[[Any, Any], bool] = _same,
    ) -> None:
        self.places.append(_Asked(name, get, put, same))

    def _kept_in_c(self, value: Any, name: str, depth: int) -> bool:
        """Objects that no attribute tells about, each with a way to ask. Whether it is one."""
        if isinstance(value, random.Random):
            self._ask(name, value.getstate, value.setstate)
        elif isinstance(value, torch.Generator):
            if value.device.type == "cpu" and value is not torch.default_generator:
                self._ask(name, value.get_state, value.set_state, torch.equal)
        elif isinstance(value, numpy.random.Generator):
            bits: Any = value.bit_generator
            self._ask(name, lambda: repr(bits.state))
        elif _has_bytes(value):  # an array, a ctypes number, mapped memory
            self._ask(name, lambda: _bytes_of(value))
        elif hasattr(type(value), "get_obj"):  # multiprocessing.Value
            self._value(value.get_obj(), name, depth + 1)
        elif isinstance(value, torch.optim.Optimizer):
            if "param_groups" in self._names:
                for at, group in enumerate(value.param_groups):
                    settings = [key for key in group if key != "params"]
                    self._entries(group, settings, f"{name}.param_groups[{at}].")
        elif isinstance(value, LRScheduler):
            self._ask(f"{name}.last_epoch", lambda: value.last_epoch)
        elif isinstance(value, ContextVar):
            self._ask(name, functools.partial(value.get, None))
            self._value(value.get(None), name, depth + 1)
        elif isinstance(value, weakref.ReferenceType):
            self._value(value(), name, depth + 1)
        elif isinstance(value, _CACHED):
            # A cache that is filled no more changes nothing; one that still is, does.
            self._ask(name, lambda: value.cache_info().misses)
            self._value(value.__wrapped__, name, depth + 1)
        elif isinstance(value, Iterator) and not self._is_own(_file_of(type(value))):
            self.iterator = self.iterator or (name, self._line_naming(name))
        elif isinstance(value, UserDict | UserList):
            self._value(value.data, name, depth + 1)
        elif isinstance(value, queue.Queue):
            self._value(value.queue, name, depth + 1)
        else:
            return False
        return True

    # --- code -------------------------------------------------------------------------------------

    def _read_code(self, code: types.CodeType) -> None:
        if id(code) in self._codes:
            return
        self._codes[id(code)] = code
        self._names |= _names_in(code).attributes
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._read_code(constant)

    def _is_own(self, file: str) -> bool:
        """Whether a file is the user's own, not a library's."""
        if not file or not is_user_code(file):
            return False
        package = _library(file)
        return package is None or package == self._own_package

    # --- lines ------------------------------------------------------------------------------------

    def describe(self, place: _Place) -> Changed:
        return Changed(place.name, self._line_naming(place.name), _has_tensors(place.value()))

    def _line_naming(self, name: str) -> Site | None:
        """The line that changes what is called so, else the first that names it."""
        for word in reversed(_WORDS.findall(name)):
            named: Site | None = None
            for code in self._codes.values():
                for line, is_change in _lines_naming(code, word):
                    site = Site(code.co_filename, line)
                    if is_change:
                        return site
                    named = named or site
            if named is not None:
                return named
        return None


_WORDS = re.compile(r"[^\W\d]\w*")
# A constant may be one, too: getattr(self, "h").
_NAMES_AN_ATTRIBUTE = (
    "LOAD_ATTR",
    "LOAD_METHOD",
    "STORE_ATTR",
    "DELETE_ATTR",
    "LOAD_SUPER_ATTR",
    "LOAD_CONST",
)
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF")
_CACHED = type(functools.lru_cache(lambda: None))
_NOT_CALLED = {
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
    """What a function's code names, the functions inside it included."""

    globals: frozenset[str]
    attributes: frozenset[str]


@functools.cache
def _names_in(code: types.CodeType) -> _Names:
    names, attributes = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname.endswith(("_GLOBAL", "_NAME")):
            names.add(instruction.argval)
        elif instruction.opname in _NAMES_AN_ATTRIBUTE and isinstance(instruction.argval, str):
            attributes.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names_in(constant)
            names |= inner.globals
            attributes |= inner.attributes
    return _Names(frozenset(names), frozenset(attributes))


@functools.cache
def _lines_naming(code: types.CodeType, word: str) -> list[tuple[int, bool]]:
    """The lines of a function that name something, and whether they seem to change it."""
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
            instruction.opname in _STORES and value == word
        )
        lines[line] = (named, changes or stores or value in _CHANGING)
    return [(line, changes) for line, (named, changes) in lines.items() if word in named]


def _functions_of(member: Any) -> list[Any]:
    """The functions behind a class's member: a method, a property, a cached function."""
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    if isinstance(member, property):
        found = [member.fget, member.fset]
    elif isinstance(member, functools.cached_property):
        found = [member.func]
    else:
        found = [member]
    return [one for one in found if isinstance(one, types.FunctionType | _CACHED)]


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | deque):
        return any(map(_has_tensors, itertools.islice(value, _LARGE)))
    return isinstance(value, torch.Tensor)


def _has_bytes(value: Any) -> bool:
    try:
        return memoryview(value).nbytes <= _LARGE * 64
    except (TypeError, ValueError):
        return False


def _bytes_of(value: Any) -> bytes:
    return memoryview(value).tobytes()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is assigned later
        return None


def _fill(cell: types.CellType, value: Any) -> None:
    cell.cell_contents = value


def _class_attribute(kind: type, attribute: str) -> Any:
    return vars(kind).get(attribute)


def _name_of(loss: object) -> str:
    if isinstance(loss, types.MethodType):
        return f"{type(loss.__self__).__name__}.{loss.__func__.__name__}"
    return loss.__name__ if isinstance(loss, types.FunctionType) else type(loss).__name__


def _file_of(kind: type) -> str:
    """Where a class was made. One that has no file, as in a notebook, is nobody's library."""
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
    """The package of the loss function, if it is an installed one: it is followed then."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    code = getattr(getattr(loss, "__func__", loss), "__code__", None)
    return _library(code.co_filename if code is not None else _file_of(type(loss)))
