"""One eager run under a trace, and what it met that no graph could repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.capture.watching.trace import OperationTrace, Storage
from headrace.capture.watching.tracer import StepTracer
from headrace.device import Obstacle, torch_draw


@dataclass(slots=True)
class TracedRun:
    """One run under a trace. `known` is memory that it may read, since other checks notice if it
    is replaced."""

    tracer: StepTracer
    known: set[Storage]
    obstacles: Sequence[Obstacle] = field(default_factory=list)

    @property
    def trace(self) -> OperationTrace:
        return self.tracer.trace

    def end(self, obstacles: Sequence[Obstacle], known: set[Storage]) -> None:
        """The run has met these obstacles, and may read this memory, too."""
        self.obstacles = obstacles
        self.known |= known

    def allow_host_draws(self) -> None:
        """Random numbers that were drawn on the host are no obstacle, if a replay can repeat them.
        Call it right after the run."""
        draws = self.trace.host_draws
        draws.end()
        if draws.are_all:
            self.obstacles = [one for one in self.obstacles if one.what != torch_draw().what]

    def allow_host_constants(self) -> None:
        """Copies from the host are no obstacle, if a capture can read what they copied. Call it
        right after the run."""
        if self.trace.host_constants is not None:
            self.obstacles = self.trace.host_constants.excuse(self.obstacles)

    def met(self) -> str:
        """The first obstacles, in words."""
        return "; ".join(dict.fromkeys(map(str, self.obstacles[:3])))
