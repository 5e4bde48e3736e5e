"""Graphs: device work that is recorded once and then launched as one."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from headrace.source_lines import Site


class Graph(abc.ABC):
    """Device work that `Device.capture` recorded. Capturing does not run it.

    A replay reads and writes the same memory as the capture: copy new inputs into the captured
    ones first. The next replay overwrites the results.
    """

    @abc.abstractmethod
    def replay(self) -> None:
        """Launch it on the current stream. The host does not wait."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free the graph. The pool can reuse its memory at once; the device gets it back when all
        graphs of the pool are closed."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Something in a step that a graph could not repeat, such as a host wait, and its line."""

    what: str
    site: Site | None

    def __str__(self) -> str:
        return self.what if self.site is None else f"{self.what} at {self.site}"
