"""What a call may return: the user's functions, and the modules' methods, are walked in turn."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from headrace.capture.reading.known import (
    ContainerMethod,
    Frame,
    Known,
    MadeFunction,
    Super,
    Values,
)
from headrace.capture.reading.users_code import (
    content_of,
    is_users,
    is_users_file,
    library_of,
    unwrapped,
)
from headrace.capture.reading.walk import Walk

if TYPE_CHECKING:
    from headrace.capture.reading.reading import Reader

_MAX_DEPTH = 20
# Methods that change a container in place.
_CHANGING = "append appendleft extend insert pop popleft popitem remove discard add update clear \
setdefault rotate sort reverse"
_MUTATING = frozenset(_CHANGING.split())
_OF_LIBRARIES = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)


class Calls:
    """Walks what is called, once for each combination of known arguments. The code of the installed
    `package` is walked, as the user's own is."""

    def __init__(self, reader: Reader, package: str | None) -> None:
        self._reader = reader
        self._package = package
        self._results: dict[tuple[Any, ...], Values] = {}
        self._kept_alive: list[object] = []
        self._depth = 0

    def call(self, called: Known, args: list[Values], keywords: dict[str, Values]) -> Values:
        """Walk a function that is called. Returns what it may return."""
        value, name = called.value, called.name
        if isinstance(value, functools.partial):
            bound = [(Known(one, name),) for one in value.args]
            named = {key: (Known(one, key),) for key, one in value.keywords.items()}
            for values in (*bound, *named.values()):
                self._reader.known(values)
            return self.call(Known(value.func, name), [*bound, *args], {**named, **keywords})
        if isinstance(value, types.MethodType):
            owner = Known(value.__self__, name.rpartition(".")[0] or name)
            self._reader.note(owner)
            return self.call(Known(value.__func__, name), [(owner,), *args], keywords)
        if isinstance(value, torch.nn.Module):
            self._reader.note(called)
            for forward in (
                self._reader.lookup.attribute(called, "forward") if args or keywords else ()
            ):
                self.call(forward, args, keywords)
            return ()
        if isinstance(value, MadeFunction):
            return self._walk(value.code, value.frame, args, keywords, name)
        if isinstance(value, types.FunctionType):
            return self._call_function(value, name, args, keywords)
        if hasattr(value, "__wrapped__") and callable(value.__wrapped__):  # functools.lru_cache
            return self.call(Known(value.__wrapped__, name), args, keywords)
        if not isinstance(value, (type, *_OF_LIBRARIES)) and is_users(type(value)):  # type: ignore[arg-type]
            method: Any = getattr(type(value), "__call__", None)  # noqa: B004
            if isinstance(method, types.FunctionType):
                return self.call(Known(method, name), [(called,), *args], keywords)
        self._use(args, keywords)
        return ()

    def _call_function(
        self, function: types.FunctionType, name: str, args: list[Values], keywords: Any
    ) -> Values:
        self._reader.note_own_graphs(function, name)
        if function is os.getenv or function is os.path.expandvars:
            self._reader.items(Known(os.environ, "os.environ"), 0)
        inner = unwrapped(function)
        if inner is not function:
            self._reader.places.function(function, name)
            return self.call(Known(inner, name), args, keywords)
        code = function.__code__
        if not self._is_walked(code.co_filename, args):
            for cell in function.__closure__ or ():  # a decorator that does not say what it wraps
                wrapped = content_of(cell)
                if isinstance(wrapped, types.FunctionType):
                    self.call(Known(wrapped, name), [], {})
            self._use(args, keywords)
            return ()
        self._reader.places.function(function, name)
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
        frame = Frame(code, function.__globals__, cells, {})
        positional = code.co_varnames[: code.co_argcount]
        defaults = dict(zip(positional[::-1], (function.__defaults__ or ())[::-1], strict=False))
        defaults |= function.__kwdefaults__ or {}
        given = set(positional[: len(args)]) | set(keywords)
        for parameter, default in defaults.items():
            if parameter not in given:
                keywords = {**keywords, parameter: self._reader.known([Known(default, parameter)])}
        return self._walk(code, frame, args, keywords, name)

    def _is_walked(self, file: str, args: list[Values]) -> bool:
        """Whether a function is the user's, or a module's wherever it is installed."""
        if is_users_file(file) or (self._package is not None and library_of(file) == self._package):
            return True
        of_module = bool(args) and any(isinstance(o.value, torch.nn.Module) for o in args[0])
        return of_module and file != torch.nn.modules.module.__file__

    def _walk(
        self,
        code: types.CodeType,
        around: Frame,
        args: list[Values],
        keywords: Mapping[str, Values],
        name: str,
    ) -> Values:
        frame = around
        if code is not around.code:
            frame = Frame(code, around.globals, {}, {}, around)
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
        before, self._depth = self._reader.places.line, self._depth + 1
        try:
            found = self._reader.known(Walk(self._reader, frame).run())
        finally:
            self._reader.places.reach(before)
            self._depth -= 1
        self._results[key] = found
        return found

    def result_of(self, frame: Frame, called: Values, args: list[Values], keywords: Any) -> Values:
        reader = self._reader
        if not called:
            self._use(args, keywords)
            return ()
        found: list[Known] = []
        for known in called:
            value = known.value
            constant = args[1][0].value if len(args) > 1 and args[1] else None
            if any(value is one for one in (getattr, hasattr, setattr)):
                if isinstance(constant, str):
                    found += reader.lookup.attributes(args[0], constant)
                continue
            if value is next and args:
                for one in args[0]:
                    if isinstance(one.value, Iterator):
                        reader.draws(one)
            elif value is super and not args:
                found += _super_in(frame)
            elif isinstance(value, ContainerMethod):
                found += self._method(value, args)
            else:
                found += self.call(known, args, keywords)
        return reader.known(found)

    def _method(self, method: ContainerMethod, args: list[Values]) -> list[Known]:
        """A method of a container is called."""
        reader, owner = self._reader, method.owner
        key = args[0][0].value if args and len(args[0]) == 1 else None
        if method.name == "get" and isinstance(key, str | int) and type(owner.value) is dict:
            return list(reader.lookup.item((owner,), key))
        reader.whole((owner, *(one for values in args for one in values)))
        if method.name in _MUTATING:
            reader.places.changed_at(owner.value)
        return []

    def _use(self, args: list[Values], keywords: Mapping[str, Values]) -> None:
        """Arguments of a call that cannot be walked."""
        for values in (*args, *keywords.values()):
            self._reader.whole(values)


def _super_in(frame: Frame) -> list[Known]:
    """What `super()` is in a method."""
    cell = frame.cell("__class__")
    first = frame.variables.get(next(iter(frame.code.co_varnames), ""), ())
    kind = None if cell is None else content_of(cell)
    return [Known(Super(kind, o.value), o.name) for o in first if isinstance(kind, type)]
