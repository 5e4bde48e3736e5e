"""What code reads besides its arguments: a walk over its bytecode with the objects that it names.

    def forward(self, x):
        return x * self.cfg.beta        # reads `cfg` of this module, and `beta` of that object

Nothing is run. The walk keeps a stack as Python does, of known objects and unknown ones. An
attribute, an item with a constant key, a closure cell or a global of a known object is a `Place`;
what it holds is known in turn. Functions of the user's that are called are walked too, and so are
the methods of modules, wherever they are installed. What comes out of calls into libraries, of
arithmetic and of the batch is unknown, and so is what is read from it: `recheck.py` finds changes
there.
"""

from __future__ import annotations

import builtins
import dis
import functools
import os
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from headrace.capture.places import ABSENT, Places, has_contents
from headrace.capture.user_compiled import has_own_graphs
from headrace.source_lines import Site, is_user_code

_MAX_DEPTH = 20
_DEEPEST = 3  # containers inside containers
_OWN_COUNTERS = ("updates", "epochs")
_MAX_KNOWN = 64  # objects that one expression may be
_LARGE = 1000  # containers with more items are not compared
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
# Methods that change a container in place.
_CHANGING = "append appendleft extend insert pop popleft popitem remove discard add update clear \
setdefault rotate sort reverse"
_MUTATING = frozenset(_CHANGING.split())
# Instructions that neither take from the stack nor add to it, whatever their effect says.
_WITHOUT_EFFECT = "NOP RESUME PRECALL CACHE EXTENDED_ARG COPY_FREE_VARS MAKE_CELL JUMP_FORWARD \
JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT RETURN_GENERATOR SETUP_ANNOTATIONS \
DELETE_FAST DELETE_DEREF"
_NEUTRAL = frozenset(_WITHOUT_EFFECT.split())
# Instructions after which the next one is reached by a jump alone.
_ENDING = "RETURN_VALUE RETURN_CONST RAISE_VARARGS RERAISE JUMP_FORWARD JUMP_BACKWARD \
JUMP_BACKWARD_NO_INTERRUPT"
# Beginnings of the names of instructions that take something and leave the rest of the stack alone.
_WITHOUT_RESULT = ("POP_", "STORE_", "END_", "JUMP_", "LIST_", "SET_", "MAP_", "DICT_")
_LEAVING = frozenset(_ENDING.split())
_OF_LIBRARIES = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)


class Known(NamedTuple):
    """An object that an expression may be, and what messages call it."""

    value: Any
    name: str


Values = tuple[Known, ...]


@dataclass(slots=True)
class StateOwners:
    """Objects that keep a step's state in tensors, in the order in which they are found."""

    modules: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    scalers: list[torch.amp.GradScaler] = field(default_factory=list)
    #: The name of a function or module that the user compiled with CUDA graphs inside.
    own_graphs: str | None = None


class _Code(NamedTuple):
    """A function that the walked code makes: a lambda, a closure, a comprehension."""

    code: types.CodeType
    frame: _Frame


class _Items(NamedTuple):
    """An iteration over known objects."""

    items: Values


class _Super(NamedTuple):
    """`super()` in a method."""

    kind: type
    instance: Any


@dataclass(slots=True)
class _Frame:
    """The variables of a walked function."""

    code: types.CodeType
    globals: dict[str, Any]
    cells: dict[str, types.CellType]
    variables: dict[str, Values]
    outer: _Frame | None = None

    def find(self, name: str) -> _Frame | None:
        """The frame that has a variable: this one, or one around it."""
        frame: _Frame | None = self
        while frame is not None and name not in frame.variables:
            frame = frame.outer
        return frame

    def cell(self, name: str) -> types.CellType | None:
        frame: _Frame | None = self
        while frame is not None and name not in frame.cells:
            frame = frame.outer
        return None if frame is None else frame.cells[name]


class Reader:
    """Walks functions and modules, and collects the `places` that they read or write, the `owners`
    of state and the `tensors` that they name. `iterator` is the name and line of an iterator that
    they draw from: its next item cannot be known without drawing it. `holds` says whether a tensor
    is on the device. A `root` from a library has that library's code walked."""

    def __init__(self, holds: Callable[[torch.Tensor], bool], root: object = None) -> None:
        self._holds, self._package = holds, _package_of(root)
        self.places = Places()
        self.owners = StateOwners()
        self.tensors: dict[int, torch.Tensor] = {}
        self.iterator: tuple[str, Site | None] | None = None
        self._noted: set[int] = set()
        self._results: dict[tuple[Any, ...], Values] = {}
        self._kept_alive: list[object] = []
        self._depth = 0
        self._in_optimizer = False
        self._site: Site | None = None

    # --- where a walk begins ----------------------------------------------------------------------

    def function(self, function: Any, arguments: Values) -> None:
        """Walk a function that is called with some known arguments first."""
        self._call(Known(function, _name_of(function)), [(one,) for one in arguments], {})

    def owner(self, value: Any) -> None:
        """Walk a module's tree or an optimizer's own code."""
        self._note(Known(value, type(value).__name__))

    # --- known objects ----------------------------------------------------------------------------

    def _note(self, known: Known) -> None:
        """An object is in use: what it is says what else is."""
        value = known.value
        if id(value) in self._noted or type(value) in (int, float, str, bool, type(None)):
            return
        self._noted.add(id(value))
        self._kept_alive.append(value)
        if isinstance(value, types.FunctionType):
            self._note_own_graphs(value, known.name)
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
            if not is_lazy(value) and not self._holds(value):
                self.places.contents(value, known.name, self._site)
        elif isinstance(value, torch.nn.Module):
            self._module_tree(value, known.name)
        elif isinstance(value, torch.optim.Optimizer):
            self.owners.optimizers.append(value)
            # By PyTorch's own step, or by one of the user's, which may be behind a wrapper.
            self._in_optimizer = True
            self._call(Known(_unwrapped(type(value).step), known.name), [(known,)], {})
            self._in_optimizer = False
        elif isinstance(value, torch.amp.GradScaler):
            self.owners.scalers.append(value)
        elif isinstance(value, LRScheduler):
            self.places.attribute(value, "last_epoch", f"{known.name}.last_epoch", self._site)
        elif isinstance(value, types.BuiltinMethodType):  # history.append, generator.random
            if not isinstance(value.__self__, types.ModuleType | type):
                self._note(Known(value.__self__, known.name))
                self._whole((Known(value.__self__, known.name),))
        elif has_contents(value):
            self.places.contents(value, known.name, self._site)
            if isinstance(value, ContextVar):
                self._note(Known(value.get(None), known.name))

    def _module_tree(self, root: torch.nn.Module, name: str) -> None:
        self.owners.modules.append(root)
        found = list(root.named_modules())
        self._noted.update(id(module) for _, module in found)
        tree = [Known(module, f"{name}.{path}" if path else name) for path, module in found]
        for known in tree:
            for compiled in (known.value, known.value._compiled_call_impl):
                self._note_own_graphs(compiled, known.name)
        for known in tree:
            module = known.value
            self.places.entry(vars(module), "training", f"{known.name}.training", None)
            for method in ("forward", "__call__"):
                if getattr(type(module), method, None) is not torch.nn.Module.__call__:
                    for one in self._attribute(known, method):
                        self._call(one, [], {})

    def _note_own_graphs(self, value: Any, name: str) -> None:
        if self.owners.own_graphs is None and has_own_graphs(value):
            self.owners.own_graphs = name

    def _whole(self, values: Values) -> None:
        """Code uses an object as a whole: the items of a container count."""
        for known in values:
            self._items(known, 0)

    def _items(self, known: Known, depth: int) -> None:
        value = known.value
        if isinstance(value, _Code | _Items | _Super | _Method):
            return
        if value is os.environ:
            self.places.items(os.environ._data, "os.environ", self._site)
            return
        is_container = isinstance(value, _CONTAINERS)
        if not is_container and isinstance(value, types.MethodType | types.BuiltinMethodType):
            owner = value.__self__
            if isinstance(owner, _CONTAINERS) or owner is os.environ:
                self._items(Known(owner, known.name.rpartition(".")[0] or known.name), depth)
            return
        if not is_container or len(value) > _LARGE or depth > _DEEPEST:
            return
        if not isinstance(value, tuple | frozenset):
            self.places.items(value, known.name, self._site)
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in list(pairs) if depth < _DEEPEST else ():
            inner = Known(item, f"{known.name}[{key!r}]")
            self._note(inner)
            self._items(inner, depth + 1)

    def _iterated(self, values: Values) -> Values:
        """The objects that a loop over these gets."""
        found: list[Known] = []
        for known in values:
            value = known.value
            if isinstance(value, Iterator) and not isinstance(value, _Items):
                self._draws(known)
            if isinstance(value, torch.nn.ModuleList | torch.nn.Sequential):
                found += [Known(one, f"{known.name}.{key}") for key, one in value._modules.items()]
            elif isinstance(value, _CONTAINERS) and len(value) <= _MAX_KNOWN:
                items = [Known(one, f"{known.name}[{at}]") for at, one in enumerate(value)]
                found += items
        return self._known(found)

    def _draws(self, known: Known) -> None:
        is_own = any(_is_users(one) for one in type(known.value).__mro__)
        if self.iterator is None and not is_own:
            self.iterator = (known.name, self._site)

    def _known(self, values: Iterable[Known]) -> Values:
        found = {id(one.value): one for one in values}
        for one in list(found.values())[:_MAX_KNOWN]:
            self._note(one)
        return tuple(found.values())[:_MAX_KNOWN]

    # --- attributes and items ---------------------------------------------------------------------

    def _attributes(self, owners: Values, name: str) -> Values:
        return self._known(one for owner in owners for one in self._attribute(owner, name))

    def _attribute(self, owner: Known, name: str) -> list[Known]:
        """What `owner.name` may be. Notes its place; runs no code."""
        value, full = owner.value, f"{owner.name}.{name}"
        if isinstance(value, torch.Tensor):
            return [] if hasattr(torch.Tensor, name) else self._entry(vars(value), name, full)
        if isinstance(value, torch.optim.Optimizer) and name in ("state", "defaults"):
            return []  # `memory.py` compares the state
        if isinstance(value, types.ModuleType):
            found = vars(value).get(name, ABSENT)
            if _is_users_file(getattr(value, "__file__", None) or ""):
                return self._entry(vars(value), name, full)
            return [] if found is ABSENT else [Known(found, full)]
        if isinstance(value, _Super):
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
            return self.places_attribute(value, name, full)
        if isinstance(member, property) and kind.__module__.startswith("headrace."):
            # One of our own objects: a loss function may read `engine.updates`.
            return self.places_attribute(value, name, full) if name in _OWN_COUNTERS else []
        if isinstance(member, property):
            function = None if member.fget is None else Known(member.fget, full)
            return [] if function is None else list(self._call(function, [(owner,)], {}))
        own = _dict_of(value)
        if own is not None and name in own:
            return self._entry(own, name, full)
        if isinstance(value, torch.nn.Module):
            for part in (value._parameters, value._buffers):
                if name in part:
                    return self._entry(part, name, full)
            if name in value._modules:
                return [Known(value._modules[name], full)]
        if own is not None and not isinstance(member, functools.cached_property):
            self.places.absent(own, name, full, self._site)
        if holder is not None:
            return self._member(kind.__mro__, name, owner, full) or []
        if isinstance(value, dict) and name in value:  # a dict that shows its items as attributes
            return self._entry(value, name, full)
        getter: Any = getattr(kind, "__getattr__", None)
        if isinstance(getter, types.FunctionType) and _is_users_file(getter.__code__.co_filename):
            constant = Known(name, repr(name))
            return list(self._call(Known(getter, full), [(owner,), (constant,)], {}))
        return []

    def places_attribute(self, value: Any, name: str, full: str) -> list[Known]:
        """An attribute that an object keeps in a slot."""
        found = self.places.attribute(value, name, full, self._site)
        return [] if found is ABSENT else [Known(found, full)]

    def _entry(self, mapping: Any, key: Any, name: str) -> list[Known]:
        if isinstance(mapping, dict | types.MappingProxyType) and key not in mapping:
            self.places.absent(mapping, key, name, self._site)
            return []
        self.places.entry(mapping, key, name, self._site)
        return [Known(mapping[key], name)]

    def _member(
        self, classes: Iterable[type], name: str, owner: Known | None, full: str
    ) -> list[Known] | None:
        """What a class's attribute is for an instance (`owner`); None if there is none."""
        for kind in classes:
            if name not in vars(kind):
                if _is_users(kind):  # one that appears here would hide the other
                    self.places.absent(vars(kind), name, full, self._site, kind=kind)
                continue
            member = vars(kind)[name]
            if _is_users(kind) or isinstance(member, int | float | str | torch.Tensor):
                self.places.entry(
                    vars(kind), name, f"{kind.__name__}.{name}", self._site, kind=kind
                )
            if isinstance(member, staticmethod):
                return [Known(member.__func__, full)]
            if isinstance(member, classmethod):
                bound = type(owner.value) if owner is not None else kind
                return [Known(types.MethodType(member.__func__, bound), full)]
            if isinstance(member, property) and owner is not None and member.fget is not None:
                return list(self._call(Known(member.fget, full), [(owner,)], {}))
            if isinstance(member, functools.cached_property) and owner is not None:
                return list(self._call(Known(member.func, full), [(owner,)], {}))
            if isinstance(member, functools.partialmethod) and owner is not None:
                partial = functools.partial(member.func, owner.value, *member.args)
                return [Known(partial, full)]
            if isinstance(member, types.FunctionType) and owner is not None:
                return [Known(types.MethodType(member, owner.value), full)]
            return [Known(member, full)]
        return None

    def _item(self, owners: Values, key: Any) -> Values:
        """What `owner[key]` may be, for a constant key."""
        found: list[Known] = []
        for owner in owners:
            value, name = owner.value, f"{owner.name}[{key!r}]"
            if isinstance(value, torch.nn.ModuleList | torch.nn.ModuleDict | torch.nn.Sequential):
                inner = value._modules.get(str(key))
                found += [] if inner is None else [Known(inner, name)]
            elif isinstance(value, dict) and type(value).__getitem__ is dict.__getitem__:
                # A capture sets these two itself.
                is_set = key == "capturable" or (key == "lr" and self._in_optimizer)
                if not (is_set and "params" in value):
                    found += self._entry(value, key, name)
            elif (
                got := self.by_syntax(owner, "__getitem__", (Known(key, repr(key)),))
            ) is not None:
                found += got
            elif isinstance(value, list | tuple) and isinstance(key, int):
                if -len(value) <= key < len(value):
                    found += self._entry(value, key, name)
            else:
                self._whole((owner,))
        return self._known(found)

    def by_syntax(self, owner: Known, method: str, *args: Values) -> Values | None:
        """What a method gives that syntax calls (`owner[key]`), if it is the user's."""
        kind: Any = type(owner.value)
        function = getattr(kind, method, None)
        if isinstance(function, property):
            function = function.fset
        if not isinstance(function, types.FunctionType) or not _is_users(kind):
            return None
        return self._call(Known(function, f"{owner.name}.{method}"), [(owner,), *args], {})

    # --- calls ------------------------------------------------------------------------------------

    def _call(self, called: Known, args: list[Values], keywords: dict[str, Values]) -> Values:
        """Walk a function that is called. Returns what it may return."""
        value, name = called.value, called.name
        if isinstance(value, functools.partial):
            bound = [(Known(one, name),) for one in value.args]
            named = {key: (Known(one, key),) for key, one in value.keywords.items()}
            for values in (*bound, *named.values()):
                self._known(values)
            return self._call(Known(value.func, name), [*bound, *args], {**named, **keywords})
        if isinstance(value, types.MethodType):
            owner = Known(value.__self__, name.rpartition(".")[0] or name)
            self._note(owner)
            return self._call(Known(value.__func__, name), [(owner,), *args], keywords)
        if isinstance(value, torch.nn.Module):
            self._note(called)
            for forward in self._attribute(called, "forward") if args or keywords else ():
                self._call(forward, args, keywords)
            return ()
        if isinstance(value, _Code):
            return self._walk(value.code, value.frame, args, keywords, name)
        if isinstance(value, types.FunctionType):
            return self._call_function(value, name, args, keywords)
        if hasattr(value, "__wrapped__") and callable(value.__wrapped__):  # functools.lru_cache
            return self._call(Known(value.__wrapped__, name), args, keywords)
        if not isinstance(value, (type, *_OF_LIBRARIES)) and _is_users(type(value)):  # type: ignore[arg-type]
            method: Any = getattr(type(value), "__call__", None)  # noqa: B004
            if isinstance(method, types.FunctionType):
                return self._call(Known(method, name), [(called,), *args], keywords)
        self._whole(tuple(one for values in (*args, *keywords.values()) for one in values))
        return ()

    def _call_function(
        self, function: types.FunctionType, name: str, args: list[Values], keywords: Any
    ) -> Values:
        self._note_own_graphs(function, name)
        if function is os.getenv or function is os.path.expandvars:
            self._items(Known(os.environ, "os.environ"), 0)
        inner = _unwrapped(function)
        if inner is not function:
            self.places.function(function, name, self._site)
            return self._call(Known(inner, name), args, keywords)
        code = function.__code__
        if not self._is_walked(code.co_filename, args):
            for cell in function.__closure__ or ():  # a decorator that does not say what it wraps
                wrapped = _content(cell)
                if isinstance(wrapped, types.FunctionType):
                    self._call(Known(wrapped, name), [], {})
            self._whole(tuple(one for values in (*args, *keywords.values()) for one in values))
            return ()
        self.places.function(function, name, self._site)
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
        frame = _Frame(code, function.__globals__, cells, {})
        positional = code.co_varnames[: code.co_argcount]
        defaults = dict(zip(positional[::-1], (function.__defaults__ or ())[::-1], strict=False))
        defaults |= function.__kwdefaults__ or {}
        given = set(positional[: len(args)]) | set(keywords)
        for parameter, default in defaults.items():
            if parameter not in given:
                keywords = {**keywords, parameter: self._known([Known(default, parameter)])}
        return self._walk(code, frame, args, keywords, name)

    def _is_walked(self, file: str, args: list[Values]) -> bool:
        """Whether a function is the user's, or a module's wherever it is installed."""
        if _is_users_file(file) or (self._package is not None and _library(file) == self._package):
            return True
        of_module = bool(args) and any(isinstance(o.value, torch.nn.Module) for o in args[0])
        return of_module and file != torch.nn.modules.module.__file__

    def _walk(
        self,
        code: types.CodeType,
        around: _Frame,
        args: list[Values],
        keywords: Mapping[str, Values],
        name: str,
    ) -> Values:
        frame = around
        if code is not around.code:
            frame = _Frame(code, around.globals, {}, {}, around)
        bound = dict(zip(code.co_varnames[: code.co_argcount], args, strict=False))
        bound |= {key: values for key, values in keywords.items() if key in code.co_varnames}
        frame.variables.update(bound)
        cells = tuple(map(id, frame.cells.values())) if frame.outer is None else (id(around),)
        ids = tuple((key, tuple(id(o.value) for o in values)) for key, values in bound.items())
        key = (id(code), cells, ids)
        if key in self._results or self._depth > _MAX_DEPTH:
            return self._results.get(key, ())
        self._results[key] = ()
        self._kept_alive += [code, around, *(o.value for values in bound.values() for o in values)]
        before, self._depth = self._site, self._depth + 1
        try:
            found = _Walk(self, frame).run()
        finally:
            self._site, self._depth = before, self._depth - 1
        self._results[key] = found
        return found


class _Walk:
    """One walk over a function's instructions."""

    def __init__(self, reader: Reader, frame: _Frame) -> None:
        self._reader, self._frame, self._code = reader, frame, frame.code
        self._stack: list[Values] = []
        self._returned: list[Known] = []
        self._at_jump: dict[int, list[Values]] = {}
        self._keywords: tuple[str, ...] = ()

    def run(self) -> Values:
        reachable = True
        for one in _instructions(self._code):
            waiting = self._at_jump.pop(one.offset, None)
            if waiting is not None:
                self._stack = _merged(self._stack, waiting) if reachable else waiting
            elif not reachable:
                self._stack = []  # where an exception goes
            reachable = True
            if one.line is not None:
                self._reader._site = Site(self._code.co_filename, one.line)
            if one.target is not None:
                self._jump(one)
            handler = getattr(self, f"_{one.name.lower()}", None)
            if handler is not None:
                handler(one)
            elif one.name not in _NEUTRAL:
                self._other(one)
            reachable = one.name not in _LEAVING
        return self._reader._known(self._returned)

    def _pop(self) -> Values:
        return self._stack.pop() if self._stack else ()

    def _push(self, *values: Values) -> None:
        self._stack += values

    def _take(self, count: int) -> list[Values]:
        return [self._pop() for _ in range(count)][::-1]

    def _jump(self, one: _Instruction) -> None:
        """Note the stack that a jump leaves where it goes."""
        if one.target is None or one.target <= one.offset:
            return
        effect = dis.stack_effect(one.opcode, one.arg, jump=True) if one.has_arg else 0
        stack = list(self._stack)
        for _ in range(-effect):
            if stack:
                stack.pop()
        stack += [()] * max(effect, 0)
        before = self._at_jump.get(one.target)
        self._at_jump[one.target] = stack if before is None else _merged(before, stack)

    def _other(self, one: _Instruction) -> None:
        """An instruction that uses what it takes, and makes something unknown."""
        effect = dis.stack_effect(one.opcode, one.arg if one.has_arg else None, jump=False)
        if effect > 0:
            self._push(*[()] * effect)
            return
        for values in self._take(-effect):
            self._reader._whole(values)
        if self._stack and not one.name.startswith(_WITHOUT_RESULT):
            self._reader._whole(self._stack[-1])
            self._stack[-1] = ()

    # --- variables --------------------------------------------------------------------------------

    def _load_fast(self, one: _Instruction) -> None:
        self._push(self._frame.variables.get(one.value, ()))

    _load_fast_check = _load_fast_and_clear = _load_fast

    def _store_fast(self, one: _Instruction) -> None:
        values, before = self._pop(), self._frame.variables.get(one.value, ())
        self._frame.variables[one.value] = self._reader._known((*before, *values))

    def _load_const(self, one: _Instruction) -> None:
        self._push((Known(one.value, repr(one.value)[:40]),))

    def _return_const(self, one: _Instruction) -> None:
        pass

    def _load_deref(self, one: _Instruction) -> None:
        frame = self._frame.find(one.value)
        cell = self._frame.cell(one.value)
        if frame is not None or cell is None:
            self._push(() if frame is None else frame.variables[one.value])
            return
        found = self._reader.places_attribute(cell, "cell_contents", one.value)
        self._push(self._reader._known(found))

    _load_classderef = _load_from_dict_or_deref = _load_deref

    def _store_deref(self, one: _Instruction) -> None:
        values, cell = self._pop(), self._frame.cell(one.value)
        if cell is not None:
            self._reader.places.stored(cell, "cell_contents", one.value, self._reader._site)
            return
        frame = self._frame.find(one.value) or self._frame
        before = frame.variables.get(one.value, ())
        frame.variables[one.value] = self._reader._known((*before, *values))

    def _load_closure(self, one: _Instruction) -> None:
        self._push(())

    def _load_global(self, one: _Instruction) -> None:
        if sys.version_info >= (3, 11) and one.arg & 1:
            self._push(())
        name, space = one.value, self._frame.globals
        if name not in space and hasattr(builtins, name):
            self._reader.places.absent(space, name, name, self._reader._site)
            self._push((Known(getattr(builtins, name), name),))
            return
        self._push(self._reader._known(self._reader._entry(space, name, name)))

    _load_name = _load_global

    def _store_global(self, one: _Instruction) -> None:
        self._pop()
        self._reader.places.stored(self._frame.globals, one.value, one.value, self._reader._site)

    def _import_name(self, one: _Instruction) -> None:
        level, wanted = self._take(2)
        package = self._frame.globals.get("__package__") or ""
        depth = level[0].value if level else 0
        parts = package.split(".")
        prefix = ".".join(parts[: len(parts) - depth + 1]) if depth else ""
        name = ".".join(filter(None, (prefix, one.value)))
        found = self._reader._entry(sys.modules, name, name)
        if not wanted or not wanted[0].value:  # `import a.b` gives `a`
            found = self._reader._entry(sys.modules, name.partition(".")[0], name.partition(".")[0])
        self._push(self._reader._known(found))

    def _import_from(self, one: _Instruction) -> None:
        module = self._stack[-1] if self._stack else ()
        self._push(self._reader._attributes(module, one.value))

    # --- attributes and items ---------------------------------------------------------------------

    def _load_attr(self, one: _Instruction) -> None:
        if sys.version_info >= (3, 12) and one.arg & 1:
            self._load_method(one)
            return
        self._push(self._attribute(self._pop(), one.value))

    def _load_method(self, one: _Instruction) -> None:
        owner = self._pop()
        self._push((), self._attribute(owner, one.value))

    def _attribute(self, owners: Values, name: str) -> Values:
        found = self._reader._attributes(owners, name)
        for owner in owners:
            if isinstance(owner.value, _CONTAINERS) or owner.value is os.environ:
                method = Known(_Method(owner, name), f"{owner.name}.{name}")
                found = (*found, method) if hasattr(type(owner.value), name) else found
        return found

    def _load_super_attr(self, one: _Instruction) -> None:
        owner, kind, _ = self._pop(), self._pop(), self._pop()
        supers = tuple(
            Known(_Super(k.value, o.value), o.name)
            for k in kind
            for o in owner
            if isinstance(k.value, type)
        )
        found = self._reader._attributes(supers, one.value)
        self._push(*(((), found) if one.arg & 1 else (found,)))

    def _store_attr(self, one: _Instruction) -> None:
        owner, stored = self._pop(), self._pop()
        for known in owner:
            name = f"{known.name}.{one.value}"
            self._reader.by_syntax(known, one.value, stored)  # a property
            self._reader._attribute(known, one.value)
            self._reader.places.mark_stored(known.value, one.value, name, self._reader._site)

    def _binary_subscr(self, one: _Instruction) -> None:
        key, owner = self._pop(), self._pop()
        if len(key) == 1 and isinstance(key[0].value, str | int) and owner:
            self._push(self._reader._item(owner, key[0].value))
        else:
            self._reader._whole((*owner, *key))
            self._push(())

    def _store_subscr(self, one: _Instruction) -> None:
        key, owner, stored = self._pop(), self._pop(), self._pop()
        for known in owner:
            value = known.value
            self._reader.by_syntax(known, "__setitem__", key, stored)
            is_entry = isinstance(value, dict | list) and len(key) == 1
            if is_entry and isinstance(key[0].value, str | int):
                name = f"{known.name}[{key[0].value!r}]"
                self._reader.places.stored(value, key[0].value, name, self._reader._site)
            else:
                self._reader._whole((known,))
                self._reader.places.changed_at(value, self._reader._site)

    def _delete_subscr(self, one: _Instruction) -> None:
        key, owner = self._pop(), self._pop()
        self._push((), owner, key)
        self._store_subscr(one)

    # --- calls ------------------------------------------------------------------------------------

    def _kw_names(self, one: _Instruction) -> None:
        self._keywords = self._code.co_consts[one.arg]

    def _call(self, one: _Instruction) -> None:
        names, self._keywords = self._keywords, ()
        self._calls(one.arg, names)

    def _call_kw(self, one: _Instruction) -> None:
        names = self._pop()
        self._calls(one.arg, names[0].value if names else ())

    def _calls(self, count: int, names: tuple[str, ...]) -> None:
        args = self._take(count)
        upper, lower = self._pop(), self._pop()
        called = upper or lower
        if upper and lower:  # a comprehension, which is given its iterator in place of `self`
            called, args = lower, [upper, *args]
        split = len(args) - len(names)
        keywords = dict(zip(names, args[split:], strict=False))
        self._push(self._result_of(called, args[:split], keywords))

    def _call_function_ex(self, one: _Instruction) -> None:
        for values in self._take(1 + (one.arg & 1)):
            self._reader._whole(values)
        upper, lower = self._pop(), self._pop()
        self._push(self._result_of(upper or lower, [], {}))

    def _result_of(self, called: Values, args: list[Values], keywords: Any) -> Values:
        reader = self._reader
        if not called:
            for values in (*args, *keywords.values()):
                reader._whole(values)
            return ()
        found: list[Known] = []
        for known in called:
            value = known.value
            constant = args[1][0].value if len(args) > 1 and args[1] else None
            if any(value is one for one in (getattr, hasattr, setattr)):
                if isinstance(constant, str):
                    found += reader._attributes(args[0], constant)
                continue
            if value is next and args:
                for one in args[0]:
                    if isinstance(one.value, Iterator):
                        reader._draws(one)
            elif value is super and not args:
                found += self._super()
            elif isinstance(value, _Method):
                found += self._method(value, args)
            else:
                found += reader._call(known, args, keywords)
        return reader._known(found)

    def _method(self, method: _Method, args: list[Values]) -> list[Known]:
        """A method of a container is called."""
        reader, owner = self._reader, method.owner
        key = args[0][0].value if args and len(args[0]) == 1 else None
        if method.name == "get" and isinstance(key, str | int) and type(owner.value) is dict:
            return list(reader._item((owner,), key))
        reader._whole((owner, *(one for values in args for one in values)))
        if method.name in _MUTATING:
            reader.places.changed_at(owner.value, reader._site)
        return []

    def _super(self) -> list[Known]:
        cell = self._frame.cell("__class__")
        first = self._frame.variables.get(next(iter(self._code.co_varnames), ""), ())
        kind = None if cell is None else _content(cell)
        return [Known(_Super(kind, o.value), o.name) for o in first if isinstance(kind, type)]

    def _make_function(self, one: _Instruction) -> None:
        code = self._pop()
        self._take((one.arg or 0).bit_count())
        if not code or not isinstance(code[0].value, types.CodeType):
            self._push(())
            return
        made = Known(_Code(code[0].value, self._frame), code[0].value.co_name)
        self._reader._call(made, [], {})  # it may be called from elsewhere
        self._push((made,))

    def _return_value(self, one: _Instruction) -> None:
        self._returned += self._pop()

    # --- loops and the stack ----------------------------------------------------------------------

    def _get_iter(self, one: _Instruction) -> None:
        values = self._pop()
        items = self._reader._iterated(values)
        if items:  # what is read of each item is seen in the loop
            for known in values:
                self._reader._items(known, _DEEPEST)
        else:
            self._reader._whole(values)
        self._push((Known(_Items(items), "items"),))

    def _for_iter(self, one: _Instruction) -> None:
        top = self._stack[-1] if self._stack else ()
        found = [item for o in top if isinstance(o.value, _Items) for item in o.value.items]
        self._push(tuple(found))

    def _copy(self, one: _Instruction) -> None:
        at = one.arg
        self._push(self._stack[-at] if at <= len(self._stack) else ())

    def _swap(self, one: _Instruction) -> None:
        at = one.arg
        if at <= len(self._stack):
            self._stack[-1], self._stack[-at] = self._stack[-at], self._stack[-1]

    def _pop_top(self, one: _Instruction) -> None:
        self._pop()

    def _push_null(self, one: _Instruction) -> None:
        self._push(())


class _Method(NamedTuple):
    """A method of a container."""

    owner: Known
    name: str


class _Instruction(NamedTuple):
    """An instruction, without what is not needed here."""

    name: str
    opcode: int
    arg: int
    has_arg: bool
    value: Any
    line: int | None
    offset: int
    target: int | None


@functools.cache
def _instructions(code: types.CodeType) -> list[_Instruction]:
    found = []
    for one in dis.get_instructions(code):
        jumps = one.opcode in dis.hasjrel or one.opcode in dis.hasjabs
        line = one.positions.lineno if one.positions is not None else None
        found.append(
            _Instruction(
                one.opname,
                one.opcode,
                one.arg or 0,
                one.arg is not None,
                one.argval,
                line,
                one.offset,
                one.argval if jumps else None,
            )
        )
    return found


def _merged(one: list[Values], other: list[Values]) -> list[Values]:
    """Two stacks that meet where a branch ends."""
    if len(one) != len(other):
        return one if len(one) < len(other) else other
    return [a if a == b or not b else (*a, *b) if a else b for a, b in zip(one, other, strict=True)]


def _unwrapped(function: Any) -> Any:
    """The user's function behind what functools.wraps has made of it."""
    seen = set()
    while hasattr(function, "__wrapped__") and id(function) not in seen:
        seen.add(id(function))
        function = function.__wrapped__
    return function


def _dict_of(value: Any) -> dict[str, Any] | None:
    """The attributes that an object keeps in a dict, if it does."""
    try:
        found = vars(value)
    except Exception:  # code of the user's
        return None
    return found if isinstance(found, dict) else None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_users_file(file: str) -> bool:
    """Whether a file is the user's own: no library's, nor of the standard library."""
    return bool(file) and is_user_code(file) and _library(file) is None


def _library(file: str) -> str | None:
    """The name of the installed package that a file belongs to, if any."""
    parts = Path(file).parts
    for at, part in enumerate(parts[:-1]):
        if part in ("site-packages", "dist-packages"):
            return parts[at + 1]
    return None


def _package_of(root: Any) -> str | None:
    """The installed package that a function is from, if any."""
    while isinstance(root, functools.partial):
        root = root.func
    code = getattr(getattr(root, "__func__", root), "__code__", None)
    return None if code is None else _library(code.co_filename)


@functools.cache
def _is_users(kind: type) -> bool:
    """Whether a class is the user's own."""
    name = kind.__module__
    if name.partition(".")[0] in sys.stdlib_module_names - {"__main__"}:
        return False
    module = sys.modules.get(name)
    return _is_users_file(getattr(module, "__file__", None) or f"<{name}>")


def _name_of(function: object) -> str:
    if isinstance(function, types.MethodType):
        return f"{type(function.__self__).__name__}.{function.__func__.__name__}"
    return (
        function.__name__ if isinstance(function, types.FunctionType) else type(function).__name__
    )
