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

import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from headrace.capture.reading.calls import Calls
from headrace.capture.reading.contents import has_contents
from headrace.capture.reading.known import (
    CONTAINERS,
    DEEPEST,
    ContainerMethod,
    Iteration,
    Known,
    MadeFunction,
    Super,
    Values,
)
from headrace.capture.reading.lookup import Lookup
from headrace.capture.reading.places import Places
from headrace.capture.reading.user_compiled import has_own_graphs
from headrace.capture.reading.users_code import is_users, name_of, package_of, unwrapped
from headrace.source_lines import Site

_MAX_KNOWN = 64  # objects that one expression may be
_LARGE = 1000  # containers with more items are not compared


@dataclass(slots=True)
class StateOwners:
    """Objects that keep a step's state in tensors, in the order in which they are found."""

    modules: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    scalers: list[torch.amp.GradScaler] = field(default_factory=list)
    #: The name of a function or module that the user compiled with CUDA graphs inside.
    own_graphs: str | None = None


class Reader:
    """Walks functions and modules, and collects the `places` that they read or write, the `owners`
    of state and the `tensors` that they name. `iterator` is the name and line of an iterator that
    they draw from: its next item cannot be known without drawing it. `holds` says whether a tensor
    is on the device. A `root` from a library has that library's code walked."""

    def __init__(self, holds: Callable[[torch.Tensor], bool], root: object = None) -> None:
        self._holds = holds
        self.places = Places()
        self.owners = StateOwners()
        self.tensors: dict[int, torch.Tensor] = {}
        self.iterator: tuple[str, Site | None] | None = None
        self._noted: set[int] = set()
        self._kept_alive: list[object] = []
        #: Whether it walks an optimizer's step.
        self.is_in_optimizer = False
        self.lookup = Lookup(self)
        self.calls = Calls(self, package_of(root))

    # --- where a walk begins ----------------------------------------------------------------------

    def function(self, function: Any, arguments: Values) -> None:
        """Walk a function that is called with some known arguments first."""
        self.calls.call(Known(function, name_of(function)), [(one,) for one in arguments], {})

    def owner(self, value: Any) -> None:
        """Walk a module's tree or an optimizer's own code."""
        self.note(Known(value, type(value).__name__))

    # --- known objects ----------------------------------------------------------------------------

    def note(self, known: Known) -> None:
        """An object is in use: what it is says what else is."""
        value = known.value
        if id(value) in self._noted or type(value) in (int, float, str, bool, type(None)):
            return
        self._noted.add(id(value))
        self._kept_alive.append(value)
        if isinstance(value, types.FunctionType):
            self.note_own_graphs(value, known.name)
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
            if not is_lazy(value) and not self._holds(value):
                self.places.contents(value, known.name)
        elif isinstance(value, torch.nn.Module):
            self._module_tree(value, known.name)
        elif isinstance(value, torch.optim.Optimizer):
            self.owners.optimizers.append(value)
            # By PyTorch's own step, or by one of the user's, which may be behind a wrapper.
            self.is_in_optimizer = True
            self.calls.call(Known(unwrapped(type(value).step), known.name), [(known,)], {})
            self.is_in_optimizer = False
        elif isinstance(value, torch.amp.GradScaler):
            self.owners.scalers.append(value)
        elif isinstance(value, LRScheduler):
            self.places.attribute(value, "last_epoch", f"{known.name}.last_epoch")
        elif isinstance(value, types.BuiltinMethodType):  # history.append, generator.random
            if not isinstance(value.__self__, types.ModuleType | type):
                self.note(Known(value.__self__, known.name))
                self.whole((Known(value.__self__, known.name),))
        elif has_contents(value):
            self.places.contents(value, known.name)
            if isinstance(value, ContextVar):
                self.note(Known(value.get(None), known.name))

    def _module_tree(self, root: torch.nn.Module, name: str) -> None:
        self.owners.modules.append(root)
        found = list(root.named_modules())
        self._noted.update(id(module) for _, module in found)
        tree = [Known(module, f"{name}.{path}" if path else name) for path, module in found]
        for known in tree:
            for compiled in (known.value, known.value._compiled_call_impl):
                self.note_own_graphs(compiled, known.name)
        for known in tree:
            module = known.value
            self.places.entry(vars(module), "training", f"{known.name}.training")
            for method in ("forward", "__call__"):
                if getattr(type(module), method, None) is not torch.nn.Module.__call__:
                    for one in self.lookup.attribute(known, method):
                        self.calls.call(one, [], {})

    def note_own_graphs(self, value: Any, name: str) -> None:
        if self.owners.own_graphs is None and has_own_graphs(value):
            self.owners.own_graphs = name

    def whole(self, values: Values) -> None:
        """Code uses an object as a whole: the items of a container count."""
        for known in values:
            self.items(known, 0)

    def items(self, known: Known, depth: int) -> None:
        value = known.value
        if isinstance(value, MadeFunction | Iteration | Super | ContainerMethod):
            return
        if value is os.environ:
            self.places.items(os.environ._data, "os.environ")
            return
        is_container = isinstance(value, CONTAINERS)
        if not is_container and isinstance(value, types.MethodType | types.BuiltinMethodType):
            owner = value.__self__
            if isinstance(owner, CONTAINERS) or owner is os.environ:
                self.items(Known(owner, known.name.rpartition(".")[0] or known.name), depth)
            return
        if not is_container or len(value) > _LARGE or depth > DEEPEST:
            return
        if not isinstance(value, tuple | frozenset):
            self.places.items(value, known.name)
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in list(pairs) if depth < DEEPEST else ():
            inner = Known(item, f"{known.name}[{key!r}]")
            self.note(inner)
            self.items(inner, depth + 1)

    def iterated(self, values: Values) -> Values:
        """The objects that a loop over these gets."""
        found: list[Known] = []
        for known in values:
            value = known.value
            if isinstance(value, Iterator) and not isinstance(value, Iteration):
                self.draws(known)
            if isinstance(value, torch.nn.ModuleList | torch.nn.Sequential):
                found += [Known(one, f"{known.name}.{key}") for key, one in value._modules.items()]
            elif isinstance(value, CONTAINERS) and len(value) <= _MAX_KNOWN:
                items = [Known(one, f"{known.name}[{at}]") for at, one in enumerate(value)]
                found += items
        return self.known(found)

    def draws(self, known: Known) -> None:
        is_own = any(is_users(one) for one in type(known.value).__mro__)
        if self.iterator is None and not is_own:
            self.iterator = (known.name, self.places.line)

    def known(self, values: Iterable[Known]) -> Values:
        found = {id(one.value): one for one in values}
        for one in list(found.values())[:_MAX_KNOWN]:
            self.note(one)
        return tuple(found.values())[:_MAX_KNOWN]
