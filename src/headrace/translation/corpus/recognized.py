"""What was found out about files of pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.translation.corpus.pair_files import Pair, PairFiles

# Called with a message about each malformed record. It may raise, or return to skip the record.
OnMalformed = Callable[[str], None]
Records = Iterator[Pair | None]


@dataclass(frozen=True, slots=True)
class Recognized:
    """Files of pairs. `read` yields the pairs unchanged, and None for each malformed record. As
    text, what is read: "reading my.csv: CSV with a header, columns en and zh"."""

    files: PairFiles
    description: str
    read: Callable[[OnMalformed], Records]

    def __str__(self) -> str:
        return f"reading {self.files}: {self.description}"
