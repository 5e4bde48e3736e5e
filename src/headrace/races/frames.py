"""The user's frames: lines and calls that a report names."""

from __future__ import annotations

import os
import sys
import threading
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

from headrace import main_program
from headrace.source_lines import HEADRACE, TORCH, Site, is_generated

_TORCH = str(TORCH) + os.sep
# Frames that a report never names: those of PyTorch, `device/`, `fake/`, this package and the
# standard library, and what `speed_up` leaves around PyTorch's backward. It names the line that
# called them.
_INTERNAL = (
    _TORCH,
    str(HEADRACE / "fake") + os.sep,
    str(HEADRACE / "races") + os.sep,
    str(HEADRACE / "device") + os.sep,
    str(HEADRACE / "capture" / "models" / "backward_watch.py"),
    "<frozen ",
)
#: Files of PyTorch's that only pass calls on.
_PLUMBING = tuple(
    _TORCH + name
    for name in ("overrides", "_ops", "_tensor", "storage", "_compile", "_dynamo", "utils")
)
_STANDARD_LIBRARY = str(Path(threading.__file__).parent) + os.sep
# Frames that run the user's program: a report shows none that are further out.
_RUNNERS = (os.sep + "_pytest" + os.sep, os.sep + "pluggy" + os.sep, main_program.__file__)
_MAX_FRAMES = 12
#: A call stack, the innermost call first: code, and the index of the instruction in it.
Frames = tuple[tuple[CodeType, int], ...]


def calling_site() -> Site:
    """The innermost line of the user's, or of the part of Headrace that is being tested. Generated
    code counts only if nothing else called it, as in `python -c`. In a thread of PyTorch's own,
    where there is none: PyTorch's."""
    frame: FrameType | None = sys._getframe(1)
    generated, pytorchs, outermost = None, None, frame
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_internal(file):
            if generated is not None and _is_runner(file):
                break
            if not is_generated(file):
                return Site(file, frame.f_lineno)
            generated = generated or frame
        if pytorchs is None and file.startswith(_TORCH) and not file.startswith(_PLUMBING):
            pytorchs = frame
        outermost, frame = frame, frame.f_back
    shown = generated or pytorchs or outermost
    assert shown is not None
    return Site(shown.f_code.co_filename, shown.f_lineno)


def calling_frames() -> Frames:
    """The calls that led here, of the user's and of generated code: the innermost one gives a new
    object its name. Lines are looked up when a report needs them."""
    return calling_site_and_frames()[1]


def calling_site_and_frames() -> tuple[Site, Frames]:
    """Both in one walk over the stack: each launch does this."""
    frame: FrameType | None = sys._getframe(1)
    site = None
    frames: list[tuple[CodeType, int]] = []
    while frame is not None and len(frames) < _MAX_FRAMES:
        code = frame.f_code
        file = code.co_filename
        if not is_internal(file):
            if _is_runner(file):
                break
            if site is None and not is_generated(file):
                site = Site(file, frame.f_lineno)
            frames.append((code, frame.f_lasti))
        elif file == "<frozen runpy>":
            break
        frame = frame.f_back
    return site or calling_site(), tuple(frames)


def without_generated(frames: Frames) -> Frames:
    """The frames that a report shows: generated code only if nothing else called it."""
    is_users = [not is_generated(code.co_filename) for code, _ in frames]
    return tuple(frame for at, frame in enumerate(frames) if is_users[at] or not any(is_users[at:]))


def is_users_frame(frame: FrameType) -> bool:
    """Whether a report would name this frame. Generated code only if nothing else called it."""
    file = frame.f_code.co_filename
    if is_internal(file):
        return False
    caller = frame.f_back if is_generated(file) else None
    while caller is not None:
        file = caller.f_code.co_filename
        if not is_internal(file) and not is_generated(file):
            return _is_runner(file)
        caller = caller.f_back
    return True


@cache
def _is_runner(file: str) -> bool:
    return any(part in file for part in _RUNNERS)


@cache
def is_internal(file: str) -> bool:
    """Whether a report never names lines of this file."""
    if file.endswith(
        os.sep + "typing_extensions.py"
    ):  # PyTorch's decorator of deprecated functions
        return True
    if file.startswith(_STANDARD_LIBRARY):
        # Installed packages can be inside the standard library's folder.
        return "site-packages" not in file and "dist-packages" not in file
    return file.startswith(_INTERNAL)
