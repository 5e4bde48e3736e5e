"""How a bench page names a plan and marks it."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.records import BenchResult, PlanResult
from headrace.report.charts import Badge, Cell
from headrace.report.figures import joined


def busy_ms(row: PlanResult) -> float | None:
    return None if row.gpu is None else row.gpu.busy_ms_per_step


def plan_label(result: BenchResult, row: PlanResult) -> Cell:
    """The plan's name, with badges: recommended, reference or peer; not compiled, not captured."""
    badges = []
    if row.plan == result.verdict.take:
        badges.append(Badge("take this", "take"))
    elif is_reference(result, row):
        badges.append(Badge("before"))
    elif row.is_peer:
        badges.append(Badge("peer"))
    if row.not_compiled is not None:
        badges.append(Badge("not compiled", title=row.not_compiled))
    if row.not_captured is not None:
        badges.append(Badge("not captured", title=row.not_captured))
    return Cell(row.plan, badges=badges)


def is_reference(result: BenchResult, row: PlanResult) -> bool:
    reference = result.reference
    return reference is not None and row.plan == reference.plan


def bar_look(result: BenchResult, row: PlanResult) -> str:
    return "is-taken" if row.plan == result.verdict.take else ""


def plans_in(rows: Sequence[PlanResult]) -> str:
    return joined([row.plan for row in rows])
