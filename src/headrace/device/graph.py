"""Captured work: what a device records once and launches again as one."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from headrace.source_lines import Site


class Graph(abc.ABC):
    """Device work that `Device.capture` recorded. Nothing ran when it was captured.

    It reads and writes the very memory that it was captured with: new inputs are copied into the
    old ones, and its results are overwritten by the next replay.
    """

    @abc.abstractmethod
    def replay(self) -> None:
        """Put all of it on the current stream once more. The host goes on at once."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of it. Its memory is the pool's again, and the device's when all graphs of the
        pool are closed."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Something in a step that a graph could not repeat: a line where the host waits for the
    device, say."""

    what: str
    site: Site | None

    def __str__(self) -> str:
        return self.what if self.site is None else f"{self.what} at {self.site}"
