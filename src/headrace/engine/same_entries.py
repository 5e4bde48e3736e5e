"""Whether the entries of many dicts are still the same objects, asked before each batch."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

Entry = tuple[dict[Any, Any], Any]


class SameEntries:
    """Entries of dicts, each a dict and a key, and the objects that they held when this was made.
    `sized` are dicts that may not get or lose an entry. A step may have thousands of entries, so no
    Python code runs for each of them."""

    def __init__(self, entries: Iterable[Entry], sized: Iterable[dict[Any, Any]]) -> None:
        pairs = list(entries)
        self._dicts, self._keys = [one for one, _ in pairs], [key for _, key in pairs]
        self._values = list(map(dict.get, self._dicts, self._keys))
        self._sized = list(sized)
        self._sizes = list(map(len, self._sized))

    def hold(self) -> bool:
        """Whether all entries hold the same objects, and the sized dicts have as many entries."""
        if list(map(len, self._sized)) != self._sizes:
            return False
        return all(map(operator.is_, map(dict.get, self._dicts, self._keys), self._values))
