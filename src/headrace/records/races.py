"""The result of `headrace races`: each race with its two accesses and the missing call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from headrace.records.result_file import ResultFile


@dataclass(frozen=True, slots=True)
class LineRecord:
    """A line of the program: its place, the function around it, and its text."""

    file: str = ""
    line: int = 0
    function: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class AccessRecord:
    """One of the two accesses. `where` is the stream, or the host thread if `on_host`. `lines` are
    the calls that led to it, the innermost first."""

    operation: str = ""
    writes: bool = False
    where: str = ""
    on_host: bool = False
    lines: tuple[LineRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class RaceRecord:
    """The races between the same two lines. `kind` is write-read, read-write, write-write or reuse;
    for reuse, `freed` is the tensor that was freed, and `tensor` the one that got its memory."""

    kind: str = ""
    tensor: str = ""
    freed: str | None = None
    first: AccessRecord = field(default_factory=AccessRecord)
    second: AccessRecord = field(default_factory=AccessRecord)
    missing: str = ""
    times: int = 1


@dataclass(frozen=True, slots=True)
class RacesResult(ResultFile):
    """What a program's run found. `exit_code` is the program's own, `accepted` the number of races
    that a comment accepts."""

    kind: ClassVar[str] = "headrace races"

    program: str = ""
    exit_code: int = 0
    races: tuple[RaceRecord, ...] = ()
    accepted: int = 0
