"""A model's forward and backward as two graphs, for calls of one kind."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.capture.gradients import GradientBuffers
from headrace.capture.host_draws import HostDraws
from headrace.capture.outputs import Outputs
from headrace.device import Graph


@dataclass(slots=True, eq=False, weakref_slot=True)
class CallKind:
    """Calls that can share a graph, and what those that ran eagerly have shown. `gradients` are the
    outputs that got a gradient, each with its strides, and `autocast` whether their backward ran
    under autocast. `kept_bytes` is the memory that a call
    keeps until its backward, `draws` whether it draws random numbers, and `writes` a buffer that it
    writes and may read."""

    key: Hashable
    uses: int = 0
    gradients: dict[int, tuple[int, ...]] = field(default_factory=dict)
    autocast: bool = False
    kept_bytes: int = 0
    draws: bool = False
    writes: str | None = None

    def note_use(self) -> None:
        self.uses += 1

    def note_run(self, kept_bytes: int, *, draws: bool, writes: str | None) -> None:
        self.kept_bytes = max(self.kept_bytes, kept_bytes)
        self.draws = self.draws or draws
        self.writes = writes

    def note_gradient(self, number: int, strides: tuple[int, ...]) -> None:
        self.gradients[number] = strides

    def note_backward(self, *, autocast: bool) -> None:
        self.autocast = autocast


@dataclass(frozen=True, slots=True, eq=False)
class CapturedBackward:
    """`with_gradient` are the numbers of the outputs whose gradients it takes, `into` the memory
    that it takes them from. `numbers` are the parameters that get a gradient, `differentiated` the
    leaves of the arguments that get one, which are `input_gradients`. `autocast` is whether it runs
    under autocast."""

    graph: Graph
    autocast: bool
    with_gradient: list[int]
    into: list[torch.Tensor]
    numbers: tuple[int, ...]
    differentiated: list[int]
    input_gradients: list[torch.Tensor | None]

    def take_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Give it the gradients of the outputs `with_gradient`."""
        for mine, theirs in zip(self.into, gradients, strict=True):
            if theirs is None:
                mine.zero_()
            else:
                mine.copy_(theirs)


@dataclass(frozen=True, slots=True, eq=False)
class CapturedModel:
    """A forward as a graph, and its backward; None if no output has a gradient. `inputs` are copies
    of the arguments' leaves at `places`, `gradients` the model's, `host_draws` what it draws on the
    host. `uses` must not be freed."""

    kind: CallKind
    forward: Graph
    backward: CapturedBackward | None
    gradients: GradientBuffers
    inputs: list[torch.Tensor]
    places: list[int]
    outputs: Outputs
    host_draws: HostDraws | None
    uses: list[torch.Tensor]

    def replay_forward(self, leaves: list[Any]) -> list[torch.Tensor]:
        """The outputs for these arguments, by number, in memory that nobody else has."""
        if self.inputs:
            with torch.no_grad():
                torch._foreach_copy_(self.inputs, [leaves[at] for at in self.places])
        self.forward.replay()
        return self.outputs.copies()

    def close(self) -> None:
        self.forward.close()
        if self.backward is not None:
            self.backward.graph.close()
