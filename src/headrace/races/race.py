"""What the race checker reports: two lines, two streams, one tensor, and the missing call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from headrace.device import Kind
from headrace.races.frames import Frames
from headrace.races.operators import is_collective
from headrace.source_lines import Site


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
