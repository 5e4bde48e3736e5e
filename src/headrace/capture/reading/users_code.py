"""Whose code it is that a walk meets: the user's own, or a library's."""

from __future__ import annotations

import functools
import sys
import types
from pathlib import Path
from typing import Any

from headrace.source_lines import is_user_code


def unwrapped(function: Any) -> Any:
    """The user's function behind what functools.wraps has made of it."""
    seen = set()
    while hasattr(function, "__wrapped__") and id(function) not in seen:
        seen.add(id(function))
        function = function.__wrapped__
    return function


def dict_of(value: Any) -> dict[str, Any] | None:
    """The attributes that an object keeps in a dict, if it does."""
    try:
        found = vars(value)
    except Exception:  # code of the user's
        return None
    return found if isinstance(found, dict) else None


def content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def is_users_file(file: str) -> bool:
    """Whether a file is the user's own: no library's, nor of the standard library."""
    return bool(file) and is_user_code(file) and library_of(file) is None


def library_of(file: str) -> str | None:
    """The name of the installed package that a file belongs to, if any."""
    parts = Path(file).parts
    for at, part in enumerate(parts[:-1]):
        if part in ("site-packages", "dist-packages"):
            return parts[at + 1]
    return None


def package_of(root: Any) -> str | None:
    """The installed package that a function is from, if any."""
    while isinstance(root, functools.partial):
        root = root.func
    code = getattr(getattr(root, "__func__", root), "__code__", None)
    return None if code is None else library_of(code.co_filename)


@functools.cache
def is_users(kind: type) -> bool:
    """Whether a class is the user's own."""
    name = kind.__module__
    if name.partition(".")[0] in sys.stdlib_module_names - {"__main__"}:
        return False
    module = sys.modules.get(name)
    return is_users_file(getattr(module, "__file__", None) or f"<{name}>")


def name_of(function: object) -> str:
    if isinstance(function, types.MethodType):
        return f"{type(function.__self__).__name__}.{function.__func__.__name__}"
    return (
        function.__name__ if isinstance(function, types.FunctionType) else type(function).__name__
    )
