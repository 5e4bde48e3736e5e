"""Find the line of the user's code that an error message or a report should name."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sys
import threading
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch

# As frames name their files: symbolic links on the way to a package are not resolved there.
#: The folder of this package.
HEADRACE = Path(__file__).parent
#: PyTorch's folder.
TORCH = Path(torch.__file__).parent
_PACKAGES = (str(HEADRACE) + os.sep, str(TORCH) + os.sep)
_STANDARD_LIBRARY = str(Path(threading.__file__).parent) + os.sep
# References to a frame's copy of its variables: the frame's, ours, and that of the counting call.
_OWN_REFERENCES = 3


@dataclass(frozen=True, slots=True)
class Site:
    """A line in a file, shown as `file:line`."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def short_path(file: str) -> str:
    """A path as a reader knows it: of an installed package from its name on, of other files
    relative to the working directory if it contains them."""
    for folder in ("site-packages", "dist-packages"):
        _, found, inside = file.rpartition(f"{os.sep}{folder}{os.sep}")
        if found:
            return inside
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file


def users_line() -> Site:
    """The line of the user's code that is running now: the innermost frame outside Headrace and
    PyTorch."""
    frame: FrameType | None = sys._getframe(1)
    innermost = frame
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return Site(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    assert innermost is not None
    return Site(innermost.f_code.co_filename, innermost.f_lineno)


def script_line() -> Site:
    """The line that is running now and is in no installed package: the innermost such frame. If
    there is none, as `users_line`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_code(file) and "site-packages" not in file and "dist-packages" not in file:
            return Site(file, frame.f_lineno)
        frame = frame.f_back
    return users_line()


def users_line_inside(caller: CodeType) -> Site | None:
    """The line of the user's code that is running now, as long as `caller` called it; else None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not caller:
        if is_user_code(frame.f_code.co_filename):
            return Site(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def line_of_error(where: TracebackType | None) -> Site | None:
    """The last line of the user's code in a traceback, or the last line of all if there is none."""
    frames = [Site(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(where)]
    users = [site for site in frames if is_user_code(site.file)]
    return users[-1] if users else frames[-1] if frames else None


@cache
def is_user_code(file: str) -> bool:
    """Whether a file belongs neither to Headrace, nor PyTorch, nor the standard library."""
    if file.startswith((*_PACKAGES, "<frozen ")):
        return False
    if file.startswith(_STANDARD_LIBRARY):
        # Installed packages may be inside the standard library's folder.
        return "site-packages" in file or "dist-packages" in file
    return True


@cache
def is_generated(file: str) -> bool:
    """Whether there is no source that the user has written: code of `exec`, of a dataclass, or of
    attrs or PyTorch's graphs (`torch.fx`), whose source is known. A notebook's cells are the
    user's."""
    if not file.startswith("<"):
        return False
    return file.startswith(("<eval_with_key>", "<attrs generated")) or not linecache.getlines(file)


def variables_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a running function, or of a module.

    Before Python 3.13, a function's frame keeps the copy that it makes of them here, and with it
    tensors that the program deletes later. So the copy is emptied again.
    """
    kept = frame.f_locals
    variables = dict(kept)
    is_copy = frame.f_code.co_flags & inspect.CO_OPTIMIZED and isinstance(kept, dict)
    if is_copy and sys.getrefcount(kept) <= _OWN_REFERENCES:  # else the program called `locals()`
        kept.clear()
    return variables


def definition(function: object) -> Site | None:
    """Where a function, method, `partial`, module or callable object is defined. None if it is not
    written in Python."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, torch.nn.Module):
        function = type(function).forward
    elif not isinstance(function, type) and not inspect.isroutine(function):
        function = getattr(function, "__wrapped__", None) or type(function).__call__
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return None if code is None else Site(code.co_filename, code.co_firstlineno)


def describe_function(function: object) -> str:
    """`name at file:line` for a function of the user's, else its name."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__name__", type(inner).__name__)
    site = definition(function)
    return name if site is None or not is_user_code(site.file) else f"{name} at {site}"
