"""Replace functions, classes and values of PyTorch for a while, wherever they are held.

A Python function is replaced from the inside: it gets other code. So every reference to it, in a
module, a closure, a container or a default argument, leads to the replacement. Classes and C
functions cannot be changed in place. Their names are rebound, in the module that owns them and in
every loaded module that imported them, under whatever name. A class that is kept somewhere else is
caught when it is called: it then makes an object of the replacement, or raises an error that says
what to do.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

from headrace.errors import DeviceError

_MISSING: Any = object()
_THESE_ROOMS = ("headrace.fake", "headrace.races")


@dataclass(frozen=True, slots=True)
class Replacement:
    """`owner.name` becomes `new`; `why` says what for."""

    owner: Any
    name: str
    new: Any
    why: str


class Replacer:
    """Puts replacements in place, and takes them back in the reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        #: By the id of an object that was rebound: the object and its replacement.
        self._rebound: dict[int, tuple[Any, Any]] = {}

    def install(self, replacements: Iterable[Replacement]) -> None:
        """Replace all. If one fails, take back those before it."""
        try:
            for one in replacements:
                self._install(one)
            _rebind(self._rebound.values())
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        # A module that was imported in the meantime took the replacements.
        _rebind([(new, old) for old, new in self._rebound.values()])
        self._rebound.clear()
        while self._undo:
            self._undo.pop()()

    def _install(self, one: Replacement) -> None:
        old, new = vars(one.owner).get(one.name, _MISSING), one.new
        if isinstance(old, FunctionType) and not old.__code__.co_freevars and callable(one.new):
            self._undo.append(lambda: setattr(old, "__code__", code))
            code, old.__code__ = old.__code__, _code_that_calls(one.new)
            return
        if old is _MISSING:
            self._undo.append(lambda: delattr(one.owner, one.name))
        else:
            self._undo.append(lambda: setattr(one.owner, one.name, old))
        if isinstance(one.owner, ModuleType) and inspect.isroutine(new):
            new = partial(new)  # one of its own, by which `restore` finds the original again
        setattr(one.owner, one.name, new)
        if not callable(old) or not callable(new):
            return
        self._rebound[id(old)] = old, new
        if isinstance(old, type):
            self._catch_calls(old, new)

    def _catch_calls(self, old: type, new: Any) -> None:
        """Let a class that is still held somewhere make objects of its replacement."""
        before = vars(old).get("__new__", _MISSING)

        def make(cls: type, *args: Any, **kwargs: Any) -> Any:
            if cls is old:
                return new(*args, **kwargs)
            raise DeviceError(
                f"{cls.__module__}.{cls.__qualname__} derives from {old.__module__}."
                f"{old.__qualname__}, which it found before fake_cuda() began: its objects cannot "
                "be imitated. Import its module inside the block"
            )

        def undo() -> None:
            if before is _MISSING:
                del old.__new__
            else:
                old.__new__ = before  # type: ignore[method-assign]

        try:
            old.__new__ = staticmethod(make)  # type: ignore[assignment, method-assign]
        except TypeError:
            return  # a C type: PyTorch's own error says that there is no CUDA device
        self._undo.append(undo)


def _code_that_calls(target: Callable[..., Any]) -> CodeType:
    """Code that calls `target` with whatever arguments it gets, and needs no names to do so."""

    def call(*args: Any, **kwargs: Any) -> Any:
        function: Any = "the target"
        return function(*args, **kwargs)

    code = call.__code__
    return code.replace(
        co_consts=tuple(target if const == "the target" else const for const in code.co_consts)
    )


def _rebind(pairs: Iterable[tuple[Any, Any]]) -> None:
    """In all loaded modules, replace the first of each pair by the second."""
    by_id = {id(old): (old, new) for old, new in pairs}
    if not by_id:
        return
    for module_name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if module_name.startswith(_THESE_ROOMS):
            continue
        # There are hundreds of thousands of names: the test of most modules runs in C.
        if not isinstance(names, dict) or by_id.keys().isdisjoint(map(id, list(names.values()))):
            continue
        for name, value in list(names.items()):
            if id(value) in by_id:
                names[name] = by_id[id(value)][1]
