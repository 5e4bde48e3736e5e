"""What travels through a pass, and the stages it travels through.

    loader → feed → Fetched → step → Launched → recorder → Progress

Data flows one way: what travels is frozen, no stage sets a field on another or calls back. What is
optional (graphs, halving, restoring, sums over ranks) is a wrapper around a stage; `build.py`
chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from headrace.data import Cursor, Fetched
from headrace.engine.deferred import DeferredValues, Scalar


@dataclass(frozen=True, slots=True)
class Launched:
    """What a step has queued for a batch. `values` are still on the device; `weighted` says whether
    the loss function gave the batch a weight. `standing` is where that leaves the step (see
    `Progress`)."""

    fetched: Fetched
    values: Mapping[str, Scalar] | None
    weighted: bool
    updated: bool
    standing: tuple[int, int] = (0, 0)
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a training loop is. `batches` of the epoch were trained on, those before a resume
    included; `updates` counts this loop's optimizer steps. `arrived` holds the values of earlier
    batches that have come back from the device since the last batch. Nothing was waited for, except
    after the last batch: it is held back until all values have arrived.

    `cursor` is where the loader stood after the last batch, `standing` are the step's optimizer
    steps in all and the batches in its open group: other numbers, another state.
    """

    epoch: int
    batches: int
    updates: int
    cursor: Cursor
    standing: tuple[int, int] = (0, 0)
    arrived: tuple[DeferredValues, ...] = ()

    @property
    def batch(self) -> int:
        """The number of the last batch in its epoch."""
        return self.batches - 1

    @property
    def come_back(self) -> tuple[DeferredValues, ...]:
        """The older name of `arrived`."""
        return self.arrived

    def after(self, launched: Launched) -> Progress:
        updates = self.updates + launched.updated
        cursor = launched.fetched.cursor
        return Progress(self.epoch, self.batches + 1, updates, cursor, launched.standing)


#: The older name of `Progress`.
StepInfo = Progress


class Step(Protocol):
    """Launches a batch, on the plan's streams."""

    def __call__(self, fetched: Fetched) -> Launched: ...

    def finish(self) -> Finished | None:
        """Update with the gradients of a last partial group; None if there is none."""
        ...

    def recover(self, counted: tuple[int, int]) -> bool:
        """After an error: gradients that it left half made are forgotten, so that they cannot leak
        into the next group. Returns whether the state is whole, that after the batches that were
        `counted` (a `Progress.standing`)."""
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """A last partial group's update. `values` are what became known of it only now."""

    values: Mapping[str, Scalar]
    standing: tuple[int, int]
