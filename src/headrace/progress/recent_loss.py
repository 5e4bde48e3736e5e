"""The loss of the last batches."""

from __future__ import annotations

from collections import deque

_BATCHES = 50


class RecentLoss:
    """The mean loss of the last 50 batches, each weighted by its tokens."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=_BATCHES)

    def add(self, loss: float, weight: float) -> None:
        if weight:  # the loss of a batch without tokens is 0/0
            self._values.append((loss, weight))

    @property
    def mean(self) -> float | None:
        """None if there was no batch yet."""
        total = sum(weight for _, weight in self._values)
        return sum(loss * weight for loss, weight in self._values) / total if total else None
