"""Replaces functions, classes and values of PyTorch and the standard library, wherever they are
held: the only module here that patches.

While any fake device is in use, the tables of `host_threads`, `autograd`, `graphs` and others hold;
inside `fake_cuda()`, that of `cuda/namespace.py` as well.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from headrace.errors import DeviceError

if TYPE_CHECKING:
    from headrace.fake.device import FakeDevice

_MISSING: Any = object()
_THESE_PACKAGES = ("headrace.fake", "headrace.races")


@dataclass(frozen=True, slots=True)
class Replacement:
    """`owner.name` becomes `new`; `why` says what for."""

    owner: Any
    name: str
    new: Any
    why: str = ""


class Replacer:
    """Puts replacements in place, and takes them back in the reverse order.

    A name is rebound in the module or class that owns it, and in all modules that imported it. With
    `everywhere`, that is also so under other names, and a Python function is replaced from the
    inside: it gets other code. So every reference to it, in a module, a closure, a container or a
    default argument, leads to the replacement. Classes and C functions cannot be changed in place.
    A class that is kept somewhere else is caught when it is called: it then makes an object of the
    replacement, or raises an error that says what to do.
    """

    def __init__(self, *, everywhere: bool = False) -> None:
        self._everywhere = everywhere
        self._undo: list[Callable[[], None]] = []
        #: By the id of an object that was rebound: the object and its replacement.
        self._rebound: dict[int, tuple[Any, Any]] = {}
        self._names: set[str] = set()

    def install(self, replacements: Iterable[Replacement]) -> None:
        """Replace all. If one fails, take back those before it."""
        self.restore()  # what an interrupt has left
        try:
            for one in replacements:
                self._install(one)
            self._rebind(self._rebound.values())
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        # A module that was imported in the meantime took the replacements.
        self._rebind([(new, old) for old, new in self._rebound.values()])
        self._rebound.clear()
        while self._undo:
            self._undo[-1]()
            self._undo.pop()

    def _install(self, one: Replacement) -> None:
        owner, name, new = one.owner, one.name, one.new
        # From the dict, not by getattr, so that a class method is restored as one.
        old = vars(owner).get(name, _MISSING)
        if self._everywhere and _has_plain_code(old) and callable(new):
            code = old.__code__
            self._undo.append(lambda: setattr(old, "__code__", code))
            old.__code__ = _code_that_calls(new)
            return
        self._undo.append(lambda: _set(owner, name, old))
        if self._everywhere and isinstance(owner, ModuleType) and inspect.isroutine(new):
            new = partial(new)  # one of its own, by which `restore` finds the original again
        setattr(owner, name, new)
        if not callable(old) or not callable(new):
            return
        if self._everywhere or isinstance(owner, ModuleType):
            self._rebound[id(old)] = old, new
            self._names.add(name)
        if self._everywhere and isinstance(old, type):
            self._catch_calls(old, new)

    def _catch_calls(self, old: type, new: Any) -> None:
        """Let a class that is still held somewhere make objects of its replacement."""

        def make(cls: type, *args: Any, **kwargs: Any) -> Any:
            if cls is old:
                return new(*args, **kwargs)
            raise DeviceError(
                f"{cls.__module__}.{cls.__qualname__} derives from {old.__module__}."
                f"{old.__qualname__}, which it found before fake_cuda() began: its objects cannot "
                "be emulated. Import its module inside the block"
            )

        before = vars(old).get("__new__", _MISSING)
        try:
            old.__new__ = staticmethod(make)  # type: ignore[assignment, method-assign]
        except TypeError:
            return  # a C type: PyTorch's own error says that there is no CUDA device
        self._undo.append(lambda: _set(old, "__new__", before))

    def _rebind(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """In all loaded modules, replace the first of each pair by the second. The standard
        library's own locks hand nothing over between the user's threads."""
        by_id = {id(old): (old, new) for old, new in pairs}
        if not by_id:
            return
        for module_name, module in list(sys.modules.items()):
            names = getattr(module, "__dict__", None)
            if not isinstance(names, dict) or module_name.startswith(_THESE_PACKAGES):
                continue
            if module_name.partition(".")[0] in sys.stdlib_module_names:
                continue
            if not self._everywhere:
                looked_at = names.keys() & self._names  # most modules have none
            elif by_id.keys().isdisjoint(map(id, list(names.values()))):
                continue  # there are hundreds of thousands of names: this test runs in C
            else:
                looked_at = set(names)
            for name in looked_at:
                if id(names[name]) in by_id:
                    names[name] = by_id[id(names[name])][1]


def _set(owner: Any, name: str, value: Any) -> None:
    """Set `owner.name` to what it was; remove it if the owner had or inherited none of its own."""
    if value is not _MISSING:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


def _has_plain_code(function: Any) -> bool:
    return isinstance(function, FunctionType) and not function.__code__.co_freevars


def _code_that_calls(target: Callable[..., Any]) -> CodeType:
    """Code that calls `target` with whatever arguments it gets, and needs no names to do so."""

    def call(*args: Any, **kwargs: Any) -> Any:
        function: Any = "the target"
        return function(*args, **kwargs)

    code = call.__code__
    return code.replace(
        co_consts=tuple(target if const == "the target" else const for const in code.co_consts)
    )


# --- while any fake device is in use --------------------------------------------------------------

devices: list[FakeDevice] = []
#: The original of each replaced name. Kept after the end: a thread may still be inside one.
originals: dict[str, Any] = {}
_originals: dict[tuple[Any, str], Any] = {}
_replacer = Replacer()


def original(owner: Any, name: str) -> Any:
    """The original of a name that several owners have; else `originals[name]` is shorter. For a
    class, that of the first of its bases whose name was replaced."""
    bases = owner.__mro__ if isinstance(owner, type) else (owner,)
    return next(_originals[one, name] for one in bases if (one, name) in _originals)


def install(device: FakeDevice, table: Iterable[Replacement]) -> None:
    """Begin to watch threads, locks and autograd for `device`: with the first device, install the
    replacements."""
    if not devices:
        _replacer.restore()  # what an interrupt has left
        known = list(table)
        for one in known:
            found = vars(one.owner).get(one.name, _MISSING)
            found = getattr(one.owner, one.name) if found is _MISSING else found
            originals[one.name] = _originals[one.owner, one.name] = found
        _replacer.install(known)
    devices.append(device)


def remove(device: FakeDevice) -> None:
    """Stop watching for `device`. After the last device, every name has its original again."""
    devices.remove(device)
    if not devices:
        _replacer.restore()
