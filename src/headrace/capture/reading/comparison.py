"""Whether things are still the same objects: one generated function, asked before each replay.

A step may have thousands of values to compare. The function is compiled once, from a line for each
of them, so that a comparison costs a few tens of nanoseconds:

    return v1["p"] is v2 and v3.cell_contents is v4 and ...
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch

_LOOKUP_ERRORS = (KeyError, IndexError, AttributeError, ValueError, ReferenceError)
# The compiler takes much longer for one long expression than for several short ones.
_PER_LINE = 200


class Comparison:
    """Collects what must stay the same, and compiles it to one function."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {"has_items": has_items, "errors": _LOOKUP_ERRORS}
        self._known: dict[int, str] = {}
        self._terms: list[str] = []

    def _name(self, value: Any) -> str:
        name = self._known.get(id(value))
        if name is None:
            name = self._known[id(value)] = f"v{len(self._names)}"
            self._names[name] = value
        return name

    def entry(self, mapping: Any, key: Any, value: Any) -> None:
        """`mapping[key]` must be `value`."""
        shown = repr(key) if type(key) in (str, int) else self._name(key)
        self._terms.append(f"{self._name(mapping)}[{shown}] is {self._name(value)}")

    def absent(self, mapping: Any, key: Any) -> None:
        """`mapping` must not get `key`."""
        self._terms.append(f"{self._name(key)} not in {self._name(mapping)}")

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name` must be `value`."""
        self._terms.append(f"{self._name(owner)}.{name} is {self._name(value)}")

    def size(self, container: Any, size: int) -> None:
        """The container must keep its size."""
        self._terms.append(f"len({self._name(container)}) == {size}")

    def items(self, container: Any, keys: list[Any] | None, items: list[Any]) -> None:
        """The container must keep its items, and a mapping (`keys`) its keys in their order."""
        names = map(self._name, (container, keys, items))
        self._terms.append(f"has_items({', '.join(names)})")

    def result(self, function: Callable[[], Any], value: Any) -> None:
        """`function()` must equal `value`."""
        self._terms.append(f"{self._name(function)}() == {self._name(value)}")

    def compile(self) -> Callable[[], bool]:
        """The function that says whether all is the same."""
        lines = ["def holds():", "    try:", "        pass"]
        for at in range(0, len(self._terms), _PER_LINE):
            terms = " and ".join(self._terms[at : at + _PER_LINE])
            lines.append(f"        if not ({terms}): return False")
        lines += ["    except errors:", "        return False", "    return True"]
        code = compile("\n".join(lines), "<comparison>", "exec")
        exec(code, self._names)  # noqa: S102 - made of nothing but names and numbers
        holds: Callable[[], bool] = self._names["holds"]
        return holds


def has_items(container: Any, keys: list[Any] | None, items: list[Any]) -> bool:
    """Whether a container has the same objects as its items."""
    if len(container) != len(items):
        return False
    if keys is None:
        return all(map(operator.is_, container, items))
    return all(map(operator.is_, container, keys)) and all(
        map(operator.is_, container.values(), items)
    )


def listed(container: Any) -> tuple[list[Any] | None, list[Any]]:
    """A container's keys, if it is a mapping, and its items."""
    if isinstance(container, list | tuple | set | frozenset | deque):
        return None, list(container)
    return list(container), list(container.values())


def dicts_of_modules(modules: Iterable[torch.nn.Module]) -> list[dict[str, Any]]:
    """The dicts in which modules keep their parameters, buffers and submodules."""
    return [
        one for module in modules for one in (module._parameters, module._buffers, module._modules)
    ]


def same_entries(model: torch.nn.Module) -> Callable[[], bool]:
    """A function that says whether a model still has the same parameters, buffers and modules."""
    return same_values(dicts_of_modules(model.modules()))


def same_values(dicts: Iterable[dict[Any, Any]]) -> Callable[[], bool]:
    """A function that says whether dicts still have the same objects as their values, in the same
    order. No Python code runs for each of them."""
    dicts = list(dicts)
    empty = [one for one in dicts if not one]
    views = [one.values() for one in dicts if one]  # they show what the dicts hold then
    values = [*chain.from_iterable(views), *_END]

    def hold() -> bool:
        now = chain(chain.from_iterable(views), _END)
        return all(map(operator.is_, now, values)) and not any(empty)

    return hold


#: Ends what is compared, so that more or fewer values differ from it.
_END = (object(),)
