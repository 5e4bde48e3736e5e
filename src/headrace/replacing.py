"""Replace an attribute of PyTorch's inside a block."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` inside the block. An attribute that the owner inherits is removed again. If
    somebody else has replaced it meanwhile, that stays."""
    is_own = name in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if vars(owner).get(name) is not value:
            pass
        elif is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


@contextmanager
def replaced_in_c(owner: type, name: str, value: Any) -> Iterator[None]:
    """As `replaced`, for a class that is written in C. Python lets nobody set its attributes, so
    this changes the dictionary behind them, and makes Python look again."""
    attributes = gc.get_referents(owner.__dict__)[0]
    look_again = ctypes.pythonapi.PyType_Modified
    original = attributes[name]
    attributes[name] = value
    look_again(ctypes.py_object(owner))
    try:
        yield
    finally:
        if attributes[name] is value:  # else somebody has replaced it meanwhile
            attributes[name] = original
            look_again(ctypes.py_object(owner))
