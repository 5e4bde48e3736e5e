"""By how much runs of the same plan differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

#: Medians that differ by less count as equal, even on an idle machine.
MIN_NOISE = 0.01


def deviation_of(runs: Iterable[Sequence[float]]) -> float:
    """The relative standard deviation between runs. Each sequence holds one candidate's runs."""
    variances = [
        statistics.variance(times) / statistics.mean(times) ** 2
        for times in runs
        if len(times) >= 2
    ]
    # A mean would follow a single disturbed run.
    return math.sqrt(statistics.median(variances)) if variances else 0.0


def noise_of(runs: Iterable[Sequence[float]], repeats: int) -> float:
    """By what share two medians of `repeats` runs may differ by chance: two standard deviations of
    the difference."""
    # The standard error of a median is 1.25 times that of a mean.
    return max(MIN_NOISE, 2 * 1.2533 * deviation_of(runs) * math.sqrt(2 / repeats))
