"""What the race checker reports: two places, two streams, one tensor, and the missing call."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import FrameType

import torch

from headrace.device import Kind
from headrace.source_lines import Site

_PACKAGE = Path(__file__).resolve().parent.parent
# Frames that are never "the place": PyTorch's, the seam's, the checker's, the standard library's.
# The line that called into them is.
_PASSED_OVER = (
    str(Path(torch.__file__).resolve().parent) + os.sep,
    str(_PACKAGE / "testing") + os.sep,
    str(_PACKAGE / "device") + os.sep,
    "<frozen ",
)
_STANDARD_LIBRARY = str(Path(threading.__file__).parent) + os.sep


@dataclass(frozen=True, slots=True)
class Access:
    """One use of a tensor's memory. `forward_site` is set for a backward operation: the line of
    the forward operation it belongs to, on whose stream it runs; `site` is then the `backward()`
    line."""

    site: Site
    where: str
    operation: str
    writes: bool
    on_host: bool = False
    forward_site: Site | None = None
    #: Set for an operation of a graph: its own line. `site` is then the replay's.
    captured_at: Site | None = None

    def __str__(self) -> str:
        does = "writes" if self.writes else "reads"
        place = self.where if self.on_host else f"stream {self.where!r}"
        text = f"{self.operation} {does} it on {place} at {self.site}"
        if self.forward_site is not None:
            text += f" (backward of the operation at {self.forward_site})"
        if self.captured_at is not None:
            text += f" (captured at {self.captured_at})"
        return text


@dataclass(frozen=True, slots=True)
class Launch:
    """One operation of a stream or a host thread: what it touches, and what it takes. A cost of
    None is the device's to say."""

    name: str
    kind: Kind
    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]
    cost_ns: int | None
    site: Site
    forward_site: Site | None

    def accesses(
        self, where: str, on_host: bool, replayed_at: Site | None
    ) -> Iterator[tuple[torch.Tensor, Access]]:
        """Each tensor with its access."""
        for writes, tensors in ((False, self.reads), (True, self.writes)):
            for tensor in tensors:
                yield (
                    tensor,
                    Access(
                        replayed_at or self.site,
                        where,
                        self.name,
                        writes,
                        on_host,
                        self.forward_site,
                        self.site if replayed_at else None,
                    ),
                )

    def on(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Launch:
        """The same operation on other tensors."""
        return replace(self, reads=reads, writes=writes)


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses to the same bytes, at least one a write, that nothing orders.

    `kind` is "write-read", "read-write" or "write-write" in the order of the program, or
    "reuse" when the memory was freed, and handed out again, while `first` could still be running:
    then `second` is the new allocation.
    """

    kind: str
    tensor: str
    first: Access
    second: Access
    missing: str

    def __str__(self) -> str:
        return (
            f"race ({self.kind}) on {self.tensor}\n"
            f"  first:   {self.first}\n"
            f"  second:  {self.second}\n"
            f"  missing: {self.missing}"
        )


@dataclass(frozen=True, slots=True)
class HiddenWait:
    """A place where the host waited for the device without saying so: `.item()`, `print(t)`, a
    copy to memory that is not pinned."""

    site: Site
    operation: str

    def __str__(self) -> str:
        return f"{self.operation} at {self.site}"


def missing_call(kind: str, first: Access, second: Access) -> str:
    """The call whose absence makes the race, in words that can be typed."""
    if kind == "reuse":
        return (
            f"keep the tensor until {second.where!r} has waited for {first.where!r}, or call "
            f"device.record_stream(tensor, {first.where}) before letting it go"
        )
    if first.on_host and second.on_host:
        return f"a lock, queue or join between {first.where} and {second.where}"
    if second.on_host:
        return (
            f"event.record({first.where}) after {first.site}, and "
            f"device.wait(event, reason) on {second.where} before {second.site}"
        )
    if first.on_host:
        return f"a lock, queue or join between {first.where} and the thread that launches there"
    return (
        f"event.record({first.where}) after {first.site}, and "
        f"{second.where}.wait_event(event) before {second.site}"
    )


def report(races: Sequence[Race]) -> str:
    """All races as one text."""
    head = f"{len(races)} race{'s' if len(races) != 1 else ''} found"
    return "\n\n".join([head, *map(str, races)])


def calling_site() -> Site:
    """The innermost line that is the user's, or that of a part of Headrace under test."""
    frame: FrameType | None = sys._getframe(1)
    outermost = frame
    while frame is not None:
        if not _is_passed_over(frame.f_code.co_filename):
            return Site(frame.f_code.co_filename, frame.f_lineno)
        outermost, frame = frame, frame.f_back
    assert outermost is not None
    return Site(outermost.f_code.co_filename, outermost.f_lineno)


@cache
def _is_passed_over(file: str) -> bool:
    if file.startswith(_STANDARD_LIBRARY):
        # Installed packages may lie inside the standard library's folder.
        return "site-packages" not in file and "dist-packages" not in file
    return file.startswith(_PASSED_OVER)
