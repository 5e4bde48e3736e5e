"""The parts of a script: its models and optimizers, and what became of each."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.capture import PartReport, SpeedUp
from headrace.records import LineRecord
from headrace.run.step_clock import Counts
from headrace.source_lines import Site, short_path

Kind = Literal["model", "optimizer"]


@dataclass(slots=True)
class Part:
    """A model or an optimizer of the script, named `name`, and the line that first used it.
    `handle` is what `speed_up` returned; None if the part was not given to it, as `why` says."""

    kind: Kind
    name: str
    site: Site
    handle: SpeedUp | None = None
    why: str | None = None
    _told: dict[str, tuple[bool, str | None]] = field(default_factory=dict)

    def sped_up(self, handle: SpeedUp) -> None:
        """It was given to `speed_up`, which returned `handle`."""
        self.handle = handle

    def left_alone(self, why: str) -> None:
        """It could not be given to `speed_up`."""
        self.why = why

    @property
    def place(self) -> str:
        return f"{short_path(self.site.file)}:{self.site.line}"

    def pieces(self) -> Iterator[tuple[str, Any]]:
        """What may be captured, each with its name: of a model that has been divided, its children
        too."""
        if self.handle is None:
            return
        own = ""
        for piece in self.handle.parts():
            own = own or piece.name
            yield self.name + piece.name.removeprefix(own), piece

    def news(self) -> Iterator[str]:
        """Sentences about what has become of the part since the last call."""
        if self.handle is None:
            yield from self._news(self.name, False, self.why)
        for name, piece in self.pieces():
            yield from self._news(name, piece.captures > 0, piece.why)

    def _news(self, name: str, is_captured: bool, why: str | None) -> Iterator[str]:
        state = is_captured, why
        if self._told.get(name, (False, None)) == state:
            return
        self._told[name] = state
        if why is not None:
            yield f"{name} ({self.place}) runs as it is, because {why}"
        else:
            yield f"{name} ({self.place}) is replayed as a graph from now on"

    def reports(self) -> list[tuple[str, PartReport]]:
        """What became of each piece, by name."""
        if self.handle is None:
            return [(self.name, PartReport(self.name, 0, 0, {}, 0, self.why))]
        names = [name for name, _ in self.pieces()]
        return list(zip(names, self.handle.report().parts, strict=True))


def counts_of(parts: Sequence[Part]) -> Counts:
    """How many calls of all parts were replayed, and how many were on the way to that."""
    pieces = [piece for part in parts for _, piece in part.pieces()]
    return Counts(sum(one.replays for one in pieces), sum(one.unsettled for one in pieces))


def line_record(site: Site) -> LineRecord:
    """A line with its text, for a result."""
    text = linecache.getline(site.file, site.line).strip()
    return LineRecord(short_path(site.file), site.line, "", text)
