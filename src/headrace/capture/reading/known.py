"""What a walk over bytecode knows: objects that an expression may be, and variables."""

from __future__ import annotations

import types
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

CONTAINERS = (list, tuple, set, frozenset, dict, deque)
DEEPEST = 3  # containers inside containers


class Known(NamedTuple):
    """An object that an expression may be, and what messages call it."""

    value: Any
    name: str


Values = tuple[Known, ...]


class MadeFunction(NamedTuple):
    """A function that the walked code makes: a lambda, a closure, a comprehension."""

    code: types.CodeType
    frame: Frame


class Iteration(NamedTuple):
    """An iteration over known objects."""

    items: Values


class Super(NamedTuple):
    """`super()` in a method."""

    kind: type
    instance: Any


class ContainerMethod(NamedTuple):
    """A method of a container."""

    owner: Known
    name: str


@dataclass(slots=True)
class Frame:
    """The variables of a walked function."""

    code: types.CodeType
    globals: dict[str, Any]
    cells: dict[str, types.CellType]
    variables: dict[str, Values]
    outer: Frame | None = None

    def find(self, name: str) -> Frame | None:
        """The frame that has a variable: this one, or one around it."""
        frame: Frame | None = self
        while frame is not None and name not in frame.variables:
            frame = frame.outer
        return frame

    def cell(self, name: str) -> types.CellType | None:
        frame: Frame | None = self
        while frame is not None and name not in frame.cells:
            frame = frame.outer
        return None if frame is None else frame.cells[name]
