"""A weighted mean that is added up batch by batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.engine.values.arrived import DeferredValues


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """The sum of value × weight and the sum of weights. Adding batches in several calls gives the
    same bits as in one."""

    total: float = 0.0
    weight: float = 0.0

    def plus(self, entries: Iterable[DeferredValues], name: str) -> WeightedSum:
        """This sum with the batches' values called `name` added."""
        total, weight = self.total, self.weight
        for entry in entries:
            if name in entry.values:
                batch_weight = entry.values.get("weight", 1.0)
                # The loss of a batch of weight 0 is often 0/0.
                total += entry.values[name] * batch_weight if batch_weight else 0.0
                weight += batch_weight
        return WeightedSum(total, weight)

    @property
    def mean(self) -> float:
        """The weighted mean; NaN if the weights sum to 0."""
        return self.total / self.weight if self.weight else math.nan


EMPTY_SUM = WeightedSum()
