"""The parts of a script: its models and optimizers, and what became of each."""

from __future__ import annotations

import gc
import linecache
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from headrace.capture import Counts, PartReport, PartTally, SpeedUpHandle
from headrace.records import LineRecord
from headrace.source_lines import Site, short_path

Kind = Literal["model", "optimizer"]


#: A part counts for so many once it has graphs, or can have none. So many are looked for at once.
_MUCH = 16


@dataclass(slots=True)
class Part:
    """A model or an optimizer of the script, named `name`, and the line that first used it. `why`
    says why it was not given to `speed_up`. What `speed_up` has returned lives as long as the
    model or the optimizer; what became of them can be told after that, too."""

    kind: Kind
    name: str
    site: Site
    why: str | None = None
    _handle: Callable[[], SpeedUpHandle | None] = lambda: None
    _tallies: list[PartTally] = field(default_factory=list)
    _told: dict[str, tuple[bool, str | None]] = field(default_factory=dict)

    def sped_up(self, handle: SpeedUpHandle) -> None:
        """It was given to `speed_up`, which returned `handle`."""
        self._handle = weakref.ref(handle)

    @property
    def is_there(self) -> bool:
        """Whether anything may still become of it."""
        return self._handle() is not None

    @property
    def weight(self) -> int:
        """How much the part keeps, roughly."""
        settled = any(piece.captures or piece.why is not None for _, piece in self.pieces())
        return _MUCH if settled else 1

    def left_alone(self, why: str) -> None:
        """It could not be given to `speed_up`."""
        self.why = why

    def use_graphs(self, used: bool) -> None:
        """Whether later calls may be replayed and captured."""
        handle = self._handle()
        if handle is not None:
            handle.use_graphs(used)

    def give_up(self) -> None:
        """Graphs gain nothing: it runs as it is from now on."""
        handle = self._handle()
        if handle is not None:
            handle.give_up()
            self._tallies = handle.parts()

    @property
    def place(self) -> str:
        return f"{short_path(self.site.file)}:{self.site.line}"

    def pieces(self) -> Iterator[tuple[str, PartTally]]:
        """What may be captured, each with its name: of a model that has been divided, its children
        too."""
        handle = self._handle()
        if handle is not None:
            self._tallies = handle.parts()
        own = ""
        for piece in self._tallies:
            own = own or piece.name
            yield self.name + piece.name.removeprefix(own), piece

    def news(self) -> Iterator[str]:
        """Sentences about what has become of the part since the last call."""
        if self.why is not None:
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
        if self.why is not None:
            return [(self.name, PartReport(self.name, 0, 0, {}, 0, self.why))]
        return [(name, piece.report()) for name, piece in self.pieces()]


class ScriptParts:
    """The parts of a script, in the order in which it has used them. It holds none of the script's
    own objects: a part that has gone leaves what became of it."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self._there: list[Part] = []
        self._weight_kept = 0

    def add(self, part: Part) -> None:
        self.all.append(part)
        self._there.append(part)

    def news(self) -> Iterator[str]:
        """Sentences about what has become of the parts since the last call."""
        there = self._there
        self._there = [part for part in there if part.is_there]
        for part in there:
            yield from part.news()

    def counts(self) -> Counts:
        """How many calls of the parts that are there were replayed, and how many were on the way to
        that."""
        return PartTally.counts(piece for part in self._there for _, piece in part.pieces())

    def free_dropped(self) -> None:
        """Free what the script has dropped, if much may be: a part and its graphs hold each other,
        so that only a collection frees them, and Python begins none for memory of the device."""
        if self._weight() < self._weight_kept + _MUCH:
            return
        gc.collect()
        self._weight_kept = self._weight()

    def _weight(self) -> int:
        return sum(part.weight for part in self._there if part.is_there)


def line_record(site: Site) -> LineRecord:
    """A line with its text, for a result."""
    text = linecache.getline(site.file, site.line).strip()
    return LineRecord(short_path(site.file), site.line, "", text)
