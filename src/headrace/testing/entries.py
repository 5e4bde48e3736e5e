"""The accesses to one storage, found by the bytes that they touch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.testing.layout import Layout
from headrace.testing.races import Access


@dataclass(slots=True, eq=False)
class Entry:
    """An access that later ones must be ordered behind."""

    actor: int
    tick: int
    layout: Layout
    access: Access
    of_previous_owner: bool = False


class Entries:
    """Entries in cells of bytes, so that a loop over the rows of a large tensor looks at each
    row's neighbours only.

    An entry of up to 2^n bytes stands in the cells, 2^n bytes wide, that it lies in: two at most.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._levels: dict[int, dict[int, list[Entry]]] = {}
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        level, cells = _cells(entry.layout)
        for cell in cells:
            self._levels.setdefault(level, {}).setdefault(cell, []).append(entry)

    def remove(self, entry: Entry) -> None:
        level, cells = _cells(entry.layout)
        for cell in cells:
            self._levels[level][cell].remove(entry)
            if not self._levels[level][cell]:
                del self._levels[level][cell]

    def near(self, layout: Layout) -> list[Entry]:
        """The entries that may touch a byte of `layout`; no other does."""
        found: dict[int, Entry] = {}
        if layout.low == layout.high:
            return []
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
        return list(found.values())


def _cells(layout: Layout) -> tuple[int, range]:
    if layout.low == layout.high:
        return 0, range(0)  # no bytes: it touches nothing
    level = (layout.high - layout.low - 1).bit_length()
    return level, range(layout.low >> level, ((layout.high - 1) >> level) + 1)
