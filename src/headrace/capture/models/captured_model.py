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

# After so many changes of a backward's settings, its graph stays.
_MAX_CHANGES = 3


class CallKey(NamedTuple):
    """What a call's graph depends on. `settings` are PyTorch's in the call, `call` its arguments
    without their values, `differentiated` the leaves of them that get a gradient; `trained` and
    `modes` number which parameters are trained, and which modules are in training mode."""

    settings: Values
    call: Hashable
    differentiated: tuple[int, ...]
    trained: int
    modes: int


@dataclass(slots=True, eq=False, weakref_slot=True)
class CallKind:
    """Calls that can share a graph, and what those that ran eagerly have shown. `gradients` are the
    outputs that got a gradient, each with its strides, `settings` those of PyTorch's in their
    backward, and `changes` how often they have changed. `kept_bytes` is the memory that a call
    keeps until its backward, `draws` whether it draws random numbers, and `writes` a buffer that it
    writes and may read."""

    key: CallKey
    uses: int = 0
    gradients: dict[int, tuple[int, ...]] = field(default_factory=dict)
    settings: Values | None = None
    changes: int = 0
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

    def note_settings(self, settings: Values) -> None:
        self.settings = settings

    def note_missed(self, numbers: list[int], settings: Values) -> bool:
        """A graph's backward could not serve: these outputs had gradients, too, or it ran under
        other settings. Returns whether to capture it anew: not if settings change again and
        again."""
        for number in numbers:
            self.gradients.setdefault(number, ())
        if settings != self.settings:
            self.settings, self.changes = settings, self.changes + 1
        return bool(numbers) or self.changes <= _MAX_CHANGES


@dataclass(frozen=True, slots=True, eq=False)
class CapturedBackward:
    """`with_gradient` are the numbers of the outputs whose gradients it takes, `into` the memory
    that it takes them from. `numbers` are the parameters that get a gradient, `differentiated` the
    leaves of the arguments that get one, which are `input_gradients`. It runs under these
    `settings` of PyTorch's."""

    graph: Graph
    settings: Values
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
