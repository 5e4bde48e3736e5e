"""The recorded accesses to one storage, looked up by the bytes they touch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.races.layout import Layout
from headrace.races.race import Access, Freed

_MAX_LISTED = 8


@dataclass(slots=True, eq=False)
class Entry:
    """A recorded access. A later conflicting access to the same bytes must be ordered after it."""

    actor: int
    tick: int
    layout: Layout
    access: Access
    #: A use of the memory before it was freed and handed out again.
    of_previous_owner: bool = False
    #: Not a use: the memory was allocated.
    is_allocation: bool = False
    #: For a use before the memory was freed: the tensor that was freed.
    freed: Freed | None = None


class Entries:
    """The entries of a storage, in cells of bytes: a loop over the rows of a large tensor compares
    each row with its neighbors only.

    An entry of up to 2^n bytes is kept in the cells of 2^n bytes that it touches, at most two. Most
    storages never have more than `_MAX_LISTED` entries; those stay in a plain list.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._listed: list[Entry] = []
        self._levels: dict[int, dict[int, list[Entry]]] = {}
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        if entry.layout.low == entry.layout.high:
            return  # no bytes: it touches nothing
        if not self._levels and len(self._listed) < _MAX_LISTED:
            self._listed.append(entry)
            return
        for each in (*self._listed, entry):
            level, cells = _cells(each.layout)
            for cell in cells:
                self._levels.setdefault(level, {}).setdefault(cell, []).append(each)
        self._listed.clear()

    def record(self, new: Entry, clock: Mapping[int, int]) -> list[Entry]:
        """Add an access by an actor with this clock. Returns the earlier ones that it conflicts
        with and is not ordered after."""
        layout, writes = new.layout, new.access.writes
        unordered = []
        for entry in self.near(layout):
            ordered = clock.get(entry.actor, 0) >= entry.tick
            if not ordered and (writes or entry.access.writes) and layout.overlaps(entry.layout):
                unordered.append(entry)
            # Later accesses need only be ordered after this one: drop `entry`.
            if (writes or (ordered and not entry.access.writes)) and layout.covers(entry.layout):
                self.remove(entry)
        self.add(new)
        return unordered

    def remove(self, entry: Entry) -> None:
        if not self._levels:
            self._listed.remove(entry)
            return
        level, cells = _cells(entry.layout)
        by_cell = self._levels[level]
        for cell in cells:
            by_cell[cell].remove(entry)
            if not by_cell[cell]:
                del by_cell[cell]
        if not by_cell:
            del self._levels[level]

    def near(self, layout: Layout) -> list[Entry]:
        """All entries that can share a byte with `layout`, and perhaps some that do not."""
        if layout.low == layout.high:
            return []
        if not self._levels:
            return self._listed.copy()
        found: dict[int, Entry] = {}
        for level, by_cell in self._levels.items():
            cells: Iterable[int] = range(layout.low >> level, ((layout.high - 1) >> level) + 1)
            if len(by_cell) < len(cells):  # type: ignore[arg-type]
                cells = by_cell
            for cell in cells:
                found.update((id(entry), entry) for entry in by_cell.get(cell, ()))
        return list(found.values())

    def all(self) -> list[Entry]:
        found = {
            id(entry): entry
            for by_cell in self._levels.values()
            for entries in by_cell.values()
            for entry in entries
        }
        return [*self._listed, *found.values()]


def _cells(layout: Layout) -> tuple[int, range]:
    level = (layout.high - layout.low - 1).bit_length()
    return level, range(layout.low >> level, ((layout.high - 1) >> level) + 1)
