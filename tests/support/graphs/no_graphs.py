"""A device whose graphs do nothing: what is left of a replay is what it costs the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.device import Graph
from headrace.device.cpu import CpuDevice


class NoGraph(Graph):
    def replay(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class NoGraphs(CpuDevice):
    """The CPU, where a capture runs the work once."""

    captures = True

    def graph_pool(self) -> object:
        return object()

    def capture(self, work: Callable[[], Any], pool: object) -> tuple[Graph, Any]:
        return NoGraph(), work()
