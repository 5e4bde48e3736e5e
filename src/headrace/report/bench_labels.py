"""Names and words that the charts and tables of a bench result share."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.report.bench_result import BenchResult, Row
from headrace.report.markup import Child, tag


def plan_label(result: BenchResult, row: Row) -> Child:
    """The plan's name, with a word for those that matter, and for what its step lacked."""
    badge = None
    if row.plan == result.verdict.take:
        badge = "take this"
    elif is_reference(result, row):
        badge = "before"
    elif row.is_peer:
        badge = "peer"
    badges = [] if badge is None else [tag("span", badge, class_=f"badge {badge.split()[0]}")]
    badges += [
        tag("span", word, class_="badge", title=why)
        for word, why in (("not compiled", row.not_compiled), ("not captured", row.not_captured))
        if why is not None
    ]
    return [row.plan, *([" ", each] for each in badges)] if badges else row.plan


def is_reference(result: BenchResult, row: Row) -> bool:
    reference = result.reference
    return reference is not None and row.plan == reference.plan


def mark(result: BenchResult, row: Row) -> str | None:
    return "is-taken" if row.plan == result.verdict.take else None


def names_of(rows: Sequence[Row]) -> str:
    names = [row.plan for row in rows]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def unseen(result: BenchResult, what: str) -> str:
    if not result.has_gpu:
        return f"Measured on the CPU, which cannot show {what.split(':')[0]}."
    return f"This result does not say {what}."
