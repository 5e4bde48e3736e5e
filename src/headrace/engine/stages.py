"""The stages of a pass, and the values that travel between them.

    loader → feed → Fetched → step → Launched → recorder → Progress

Data flows one way. The values are frozen; no stage sets a field of another or calls it back.
Options (graphs, halving, restoring, sums over ranks) are wrappers around a stage, chosen in
`build.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from headrace.data import Cursor, Fetched
from headrace.engine.values.arrived import DeferredValues, Scalar


class Standing(NamedTuple):
    """How far the optimizer is: all its updates, including those of a restored state, and the
    batches in the open accumulation group."""

    updates: int = 0
    in_group: int = 0


class Launched(NamedTuple):
    """What a step has launched for a batch.

    `values` are still on the device. `weighted`: the loss function returned a weight. `updated`:
    this batch ended a group, and the optimizer has updated the weights. `replayed`: the batch ran
    as a graph. `outputs` are the tensors that the loss function wants to show.
    """

    fetched: Fetched
    values: Mapping[str, Scalar] | None
    weighted: bool
    updated: bool
    standing: Standing = Standing()
    replayed: bool = False
    outputs: Any = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a training loop is. `engine.steps()` yields one after each batch.

    `batches`: how many batches of this epoch have been trained on, including those before a resume.
    `updates`: the optimizer updates of this loop. `arrived`: the values that have arrived on the
    host since the last `Progress`. They belong to earlier batches, because the loop does not wait
    for values; only the last `Progress` comes when all of them have arrived.

    The other two are for stored states. `cursor`: the loader's position after the last batch.
    `standing`: how far the optimizer was then.
    """

    epoch: int
    batches: int
    updates: int
    cursor: Cursor
    standing: Standing = Standing()  # noqa: RUF009 - frozen
    arrived: tuple[DeferredValues, ...] = ()

    @property
    def batch(self) -> int:
        """The index of the last batch in its epoch, from 0."""
        return self.batches - 1

    def after(self, launched: Launched) -> Progress:
        """The progress one batch later, with no values arrived yet."""
        updates = self.updates + launched.updated
        cursor = launched.fetched.cursor
        return Progress(self.epoch, self.batches + 1, updates, cursor, launched.standing)


class Step(Protocol):
    """Launches the work of one batch on the plan's streams, and waits for nothing."""

    def __call__(self, fetched: Fetched) -> Launched: ...

    def finish(self) -> Finished | None:
        """Make the update of a last partial group; None if no group is open."""
        ...

    def recover(self, counted: Standing) -> bool:
        """After an error: drop incomplete gradients, so that they cannot leak into the next group.
        `counted` is the standing after the last batch that counts as trained on. Returns whether
        the state is still exactly that one, so that it may be stored."""
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """The update of a last partial group. `values` are those that only the update has produced."""

    values: Mapping[str, Scalar]
    standing: Standing
