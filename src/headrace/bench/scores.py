"""Scores plans: turns what was measured, and the judgments on each preset, into points."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from headrace.records import JUDGMENTS, WEIGHTS, PlanResult, Score


def scheme_of(fields: dict[str, Any] | None) -> str:
    """The preset that a plan's fields resemble."""
    if fields is None:
        return "baseline"
    if fields.get("compile"):
        return "max"
    if fields.get("graphs", "off") != "off":
        return "graph"
    if fields.get("split_backward"):
        return "streams4"
    by_sync = {"batch": "baseline", "interval": "interval", "event": "event"}
    return by_sync.get(str(fields.get("sync")), "pipeline")


def saved_share(row: PlanResult, base: PlanResult) -> float:
    """The share of a step's time that a plan saves; negative if it takes longer."""
    assert row.ms_per_step is not None
    assert base.ms_per_step is not None
    return 1 - row.ms_per_step.median / base.ms_per_step.median


def chance_share(
    row: PlanResult, base: PlanResult, noise_share: float, rows: Sequence[PlanResult] = ()
) -> float:
    """The share of the time that a plan must save for it not to be chance.

    That is the noise or, if rounds differ more, twice the standard error of the median over rounds.
    If `rows` holds the same plan again, its rounds count, too.
    """
    assert base.ms_per_step is not None
    ratios = []
    for entry in _same_plan(row, rows):
        assert entry.ms_per_step is not None
        # Round by round: what slows the machine down slows down both plans.
        pairs = zip(entry.ms_per_step.repeats, base.ms_per_step.repeats, strict=False)
        ratios += [own / reference for own, reference in pairs if reference > 0]
    if not ratios:
        return noise_share
    middle = statistics.median(ratios)
    deviation = 1.4826 * statistics.median(abs(ratio - middle) for ratio in ratios)
    return max(noise_share, 2 * 1.2533 * deviation / math.sqrt(len(ratios)))


def gain_share(
    row: PlanResult, base: PlanResult, noise_share: float, rows: Sequence[PlanResult] = ()
) -> float:
    """The share of the time that a plan saves, over all its rows; 0 if that may be chance."""
    saved = statistics.mean(saved_share(entry, base) for entry in _same_plan(row, rows))
    return saved if saved > chance_share(row, base, noise_share, rows) else 0.0


def _same_plan(row: PlanResult, rows: Sequence[PlanResult]) -> list[PlanResult]:
    """The row itself, and the other measured rows of the same plan."""
    others = [r for r in rows if r.plan != row.plan and r.ms_per_step and r.is_same_plan_as(row)]
    return [row, *others]


def scores_of(rows: Sequence[PlanResult], base: PlanResult, noise_share: float) -> dict[str, Score]:
    """The scores of all measured plans, by name.

    The plan with the largest gain gets all points for gain, the others in proportion, and a gain
    that may be chance gets none. A plan that needs no more memory than the reference gets all
    points for memory, one that needs twice as much gets half of them.
    """
    measured = [row for row in rows if row.kind == "plan" and row.ms_per_step is not None]
    gains = {row.plan: gain_share(row, base, noise_share, measured) for row in measured}
    largest = max(gains.values(), default=0.0)
    scores = {}
    for row in measured:
        judged = JUDGMENTS[scheme_of(row.fields)]
        points = {
            "gain": gains[row.plan] / largest if largest else 0.0,
            "effort": judged.effort / 10,
            "complexity": judged.complexity / 10,
            "maintainability": judged.maintainability / 10,
            "memory": _memory(row, base),
            "risk": judged.risk / 10,
        }
        weighted = {name: round(WEIGHTS[name] * share, 1) for name, share in points.items()}
        scores[row.plan] = Score(total=round(sum(weighted.values()), 1), **weighted)
    return scores


def _memory(row: PlanResult, base: PlanResult) -> float:
    if not row.peak_memory_bytes or not base.peak_memory_bytes:
        return 1.0  # this device does not count allocations
    return min(1.0, base.peak_memory_bytes / row.peak_memory_bytes)
