"""What the race checker reports: two lines, two streams, one tensor, and the missing call."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from headrace import main_program
from headrace.device import Kind
from headrace.races.operators import is_collective
from headrace.source_lines import HEADRACE, TORCH, Site, is_generated

_TORCH = str(TORCH) + os.sep
# Frames that a report never names: those of PyTorch, `device/`, `fake/`, this package and the
# standard library. It names the line that called them.
_INTERNAL = (
    _TORCH,
    str(HEADRACE / "fake") + os.sep,
    str(HEADRACE / "races") + os.sep,
    str(HEADRACE / "device") + os.sep,
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


@dataclass(frozen=True, slots=True)
class Access:
    """One use of a tensor's memory.

    For a backward operation, `site` is the line of `backward()`, and `forward_site` the line of the
    forward operation, on whose stream it runs.
    """

    site: Site
    where: str
    operation: str
    writes: bool
    on_host: bool = False
    forward_site: Site | None = None
    #: For an operation of a graph: the line that was captured. `site` is then the replay's line.
    captured_at: Site | None = None
    #: The user's calls that led here, the innermost first.
    frames: Frames = field(default=(), compare=False, repr=False)
    #: Its number in the device's history.
    moment: int | None = field(default=None, compare=False, repr=False)

    def called(self, other: Access) -> bool:
        """Whether the call that made this access also called the line of the other, as `backward()`
        calls hooks."""
        if self.captured_at is not None or other.captured_at is not None:
            return False
        deeper = (other.frames[depth:] for depth in range(1, len(other.frames)))
        return any(frames == self.frames[: len(frames)] for frames in deeper)

    def __str__(self) -> str:
        does = "writes" if self.writes else "reads"
        place = self.where if self.on_host else f"stream {self.where!r}"
        text = f"{self.operation} {does} it on {place} at {self.site}"
        if self.forward_site is not None:
            text += f" (backward of the operation at {self.forward_site})"
        if self.captured_at is not None:
            text += f" (captured at {self.captured_at})"
        return text


class Freed(NamedTuple):
    """A tensor whose memory was freed, and the calls that had allocated it."""

    tensor: str
    allocated_by: Frames


@dataclass(frozen=True, slots=True)
class Launch:
    """One operation on a stream or a host thread: the tensors it uses, and its cost (None: the
    device's `costs` decide)."""

    name: str
    kind: Kind
    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]
    cost_ns: int | None
    site: Site
    forward_site: Site | None
    frames: Frames = ()

    def accesses(
        self, where: str, on_host: bool, replayed_at: Site | None, moment: int | None = None
    ) -> Iterator[tuple[torch.Tensor, Access]]:
        """Each tensor with its access."""
        for writes, tensors in ((False, self.reads), (True, self.writes)):
            if tensors:
                access = Access(
                    replayed_at or self.site,
                    where,
                    self.name,
                    writes,
                    on_host,
                    self.forward_site,
                    self.site if replayed_at else None,
                    self.frames,
                    moment,
                )
                for tensor in tensors:
                    yield tensor, access

    def on(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Launch:
        """The same operation on other tensors."""
        return replace(self, reads=reads, writes=writes)


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses to the same bytes, at least one of them a write, without an order between them.

    `kind` is "write-read", "read-write" or "write-write", in program order. It is "reuse" if the
    memory was freed and handed out again while `first` could still be running; `second` is then the
    new allocation. It is "freed" if `second` replays a graph whose input, captured by `first`, was
    freed in between.
    """

    kind: str
    tensor: str
    first: Access
    second: Access
    missing: str
    #: For "reuse": the tensor that was freed. `tensor` is the one that got its memory.
    freed: Freed | None = None

    @property
    def key(self) -> tuple[object, ...]:
        return race_key(self.kind, self.first, self.second)

    def __str__(self) -> str:
        return (
            f"race ({self.kind}) on {self.tensor}\n"
            f"  first:   {self.first}\n"
            f"  second:  {self.second}\n"
            f"  missing: {self.missing}"
        )


@dataclass(frozen=True, slots=True)
class HiddenWait:
    """A line where the host waited for the device although the code does not say so: `.item()`,
    `print(t)`, a copy to memory that is not pinned."""

    site: Site
    operation: str

    def __str__(self) -> str:
        return f"{self.operation} at {self.site}"


def race_key(kind: str, first: Access, second: Access) -> tuple[object, ...]:
    """What makes two races the same: a loop repeats them at every step."""
    return kind, first.site, first.where, second.site, second.where


def missing_call(kind: str, first: Access, second: Access, freed: Freed | None, known: bool) -> str:
    """The call that would remove the race, as code where possible."""
    if kind == "reuse":
        return (
            f"keep the tensor until {second.where!r} has waited for {first.where!r}, or call "
            f"device.record_stream(tensor, {first.where}) before letting it go"
        )
    if kind == "freed":
        return f"keep the tensor that was captured at {first.site} until the last replay"
    if is_collective(first.operation):
        # The wait orders the stream that is current then, and no other.
        on = "" if second.on_host else f" while stream {second.where!r} is current,"
        return f"work.wait() of the collective at {first.site},{on} before {second.site}"
    if first.on_host and second.on_host:
        return f"a lock, queue or join between {first.where} and {second.where}"
    if second.on_host:
        return (
            f"event.record({first.where}) after {first.site}, and "
            f"device.wait(event, reason) on {second.where} before {second.site}"
        )
    if first.on_host:
        return f"a lock, queue or join between {first.where} and the thread that launches there"
    if first.where == second.where:
        return f"a lock, queue or join between the threads that put work on {first.where!r}"
    # A collective runs after what is on the stream that is current at the call.
    waiting = "device.current_stream()" if is_collective(second.operation) else second.where
    return (
        f"event.record({first.where}) after {first.site}, and "
        f"{waiting}.wait_event(event) before {second.site}"
    )


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
