"""An engine's position in its epochs, as a state stores it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Position:
    """An engine's position in its epochs.

    `batch` counts the epoch's batches *trained on*, `own_batch` those of them that this rank's
    loader gave (None: all). `share_ended` says that this rank's loader has no more. `loader` is the
    loader's own state after them. `deferred` are the values not yet handed out. `epoch_loss` is,
    for those that were, the sum of loss × weight and the sum of weights.

    Random states: `random` is now, `random_at_start` when the epoch began, and `generators` are the
    loader's own generators then. `drawn_ahead` are those before each batch that was fetched and not
    trained on, `drawn_last` is that before the last batch trained on.
    """

    epoch: int
    random: dict[str, Any]
    batch: int = 0
    own_batch: int | None = None
    share_ended: bool = False
    loader: Any = None
    deferred: list[dict[str, Any]] = field(default_factory=list)
    epoch_loss: list[float] = field(default_factory=lambda: [0.0, 0.0])
    random_at_start: dict[str, Any] | None = None
    generators: list[dict[str, Any]] | None = None
    drawn_ahead: list[dict[str, Any]] = field(default_factory=list)
    drawn_last: dict[str, Any] | None = None
