"""A model's forward and backward as two graphs, for calls of one kind."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from headrace.capture.guards.kernel_settings import Values
from headrace.capture.models.outputs import Outputs
from headrace.capture.state.gradients import GradientBuffers
from headrace.capture.watching.host_draws import HostDraws
from headrace.device import Graph

# A forward has at most so many backwards as graphs.
_MAX_BACKWARDS = 4


class CallKey(NamedTuple):
    """What a call's graph depends on. `settings` are PyTorch's in the call, `call` its arguments
    without their values, `differentiated` the leaves of them that get a gradient; `trained` and
    `modes` number which parameters are trained, and which modules are in training mode."""

    settings: Values
    call: Hashable
    differentiated: tuple[int, ...]
    trained: int
    modes: int


class BackwardKey(NamedTuple):
    """What the graph of a backward depends on: the outputs that have a gradient, by number, and
    PyTorch's settings. A parameter that only other outputs depend on gets none."""

    outputs: tuple[int, ...]
    settings: Values


@dataclass(slots=True, eq=False, weakref_slot=True)
class CallKind:
    """Calls that can share a graph, and what those that ran eagerly have shown. `strides` are those
    of the outputs' gradients, `backwards` the backwards that have run, in each the outputs that had
    a gradient. `kept_bytes` is the memory that a call keeps until its backward, `draws` whether it
    draws random numbers, `writes` a buffer that it writes and may read, and `sums` whether the
    gradient of a parameter is a sum."""

    key: CallKey
    uses: int = 0
    strides: dict[int, tuple[int, ...]] = field(default_factory=dict)
    backwards: dict[Hashable, BackwardKey] = field(default_factory=dict)
    kept_bytes: int = 0
    draws: bool = False
    writes: str | None = None
    sums: bool = False

    def note_use(self) -> None:
        self.uses += 1

    def note_run(self, kept_bytes: int, *, draws: bool, writes: str | None) -> None:
        self.kept_bytes = max(self.kept_bytes, kept_bytes)
        self.draws = self.draws or draws
        self.writes = writes

    def note_gradient(
        self, backward: Hashable, settings: Values, number: int, strides: tuple[int, ...]
    ) -> None:
        """In a backward of a call, an output had a gradient."""
        self.strides[number] = strides
        before = self.backwards.get(backward)
        outputs = {number, *(() if before is None else before.outputs)}
        self.backwards[backward] = BackwardKey(tuple(sorted(outputs)), settings)

    def note_missed(self, key: BackwardKey) -> bool:
        """No graph is there for this backward. Returns whether to capture one, with the forward."""
        known = len(self.distinct_backwards())
        if known < _MAX_BACKWARDS:
            self.backwards[key] = key
        return known < _MAX_BACKWARDS

    def note_sums(self, sums: bool) -> None:
        self.sums = sums

    def distinct_backwards(self) -> list[BackwardKey]:
        return list(dict.fromkeys(self.backwards.values()))[:_MAX_BACKWARDS]


@dataclass(frozen=True, slots=True, eq=False)
class CapturedBackward:
    """`into` is the memory that it takes the outputs' gradients from. `numbers` are the parameters
    that get a gradient, and `input_gradients` those of arguments."""

    graph: Graph
    into: list[torch.Tensor]
    numbers: tuple[int, ...]
    input_gradients: list[torch.Tensor | None]

    def take_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """Give it the gradients of its outputs."""
        for mine, theirs in zip(self.into, gradients, strict=True):
            mine.copy_(theirs)


@dataclass(frozen=True, slots=True, eq=False)
class CapturedModel:
    """A forward as a graph, and its backwards. `inputs` are copies of the arguments' leaves at
    `places`, those at `differentiated` get a gradient, `gradients` are the model's, `host_draws`
    what it draws on the host. `uses` must not be freed."""

    kind: CallKind
    forward: Graph
    backwards: dict[BackwardKey, CapturedBackward]
    differentiated: list[int]
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
        for backward in self.backwards.values():
            backward.graph.close()
