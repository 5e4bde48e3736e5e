"""Lines of code, as errors and reports name them."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

_OURS = str(Path(__file__).resolve().parent) + os.sep
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep
_STANDARD_LIBRARY = str(Path(threading.__file__).parent) + os.sep


@dataclass(frozen=True, slots=True)
class Site:
    """A line of code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def users_line() -> Site:
    """The innermost line under way that is neither PyTorch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    innermost = frame
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return Site(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    assert innermost is not None
    return Site(innermost.f_code.co_filename, innermost.f_lineno)


def users_line_inside(caller: CodeType) -> Site | None:
    """The innermost line of the user's that is under way inside a call of `caller`, if any."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not caller:
        if is_users(frame.f_code.co_filename):
            return Site(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def line_of_error(where: TracebackType | None) -> Site | None:
    """The innermost line of the user's in an error's traceback; PyTorch's own if there is none."""
    frames = [Site(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(where)]
    users = [site for site in frames if is_users(site.file)]
    return users[-1] if users else frames[-1] if frames else None


@cache
def is_users(file: str) -> bool:
    """Whether a file is neither PyTorch's, nor ours, nor the standard library's."""
    if file.startswith((_OURS, _TORCH, "<frozen ")):
        return False
    if file.startswith(_STANDARD_LIBRARY):
        # Installed packages may lie inside the standard library's folder.
        return "site-packages" in file or "dist-packages" in file
    return True


def definition(function: object) -> Site | None:
    """Where a function, method, `partial` or callable object was written; None: not in Python."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, torch.nn.Module):
        function = type(function).forward
    elif not isinstance(function, type) and not inspect.isroutine(function):
        function = getattr(function, "__wrapped__", None) or type(function).__call__
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return None if code is None else Site(code.co_filename, code.co_firstlineno)


def described(function: object) -> str:
    """A function as messages name it: its name, and where the user wrote it."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__name__", type(inner).__name__)
    site = definition(function)
    return name if site is None or not is_users(site.file) else f"{name} at {site}"
