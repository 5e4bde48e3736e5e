"""Means by weight, added up batch by batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.engine.deferred import DeferredValues


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """Values × weights, and weights, added up batch by batch: in parts it is the same sum."""

    total: float = 0.0
    weight: float = 0.0

    def plus(self, entries: Iterable[DeferredValues], name: str) -> WeightedSum:
        """With what the batches gave under `name`, too."""
        total, weight = self.total, self.weight
        for entry in entries:
            if name in entry.values:
                share = entry.values.get("weight", 1.0)
                # A batch of weight 0 has nothing in it: its loss is often 0/0.
                total += entry.values[name] * share if share else 0.0
                weight += share
        return WeightedSum(total, weight)

    @property
    def mean(self) -> float:
        """NaN over nothing."""
        return self.total / self.weight if self.weight else math.nan


NOTHING = WeightedSum()
