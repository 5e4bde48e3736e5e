"""Which plan to take, and why, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.bench.causes import median_ms
from headrace.bench.scores import chance_share, gain_share, saved_share, scheme_of
from headrace.records import JUDGMENTS, PlanResult

WORTH_MENTIONING = 0.05  # share of a step


def recommendation(
    rows: Sequence[PlanResult], base: PlanResult, noise: float
) -> tuple[PlanResult | None, list[str]]:
    """The plan to take, if any, and the sentences that say why."""
    eligible = [row for row in rows if row.kind == "plan" and row.agrees and row.score is not None]
    # A plan that could not be captured ran like another, simpler plan.
    eligible = [row for row in eligible if row.ran_as_planned] or eligible
    if not eligible:
        measured = [row for row in rows if row.kind == "plan" and row.score is not None]
        if not measured or any(row.equal.verdict == "unequal" for row in measured):
            return None, ["No plan can be recommended: no plan's losses are known to match."]
        eligible = measured  # losses were not compared at all
    # The first row of a plan that was listed twice represents both.
    eligible = [
        row
        for at, row in enumerate(eligible)
        if not any(row.is_same_plan_as(r) for r in eligible[:at])
    ]
    if eligible == [base]:
        return base, [
            f"There is nothing to compare {base.plan} with: no other plan ran, or none ran as "
            "planned."
        ]
    gaining = [row for row in eligible if gain_share(row, base, noise, rows) > 0]
    if not gaining:
        fastest = min(eligible, key=median_ms)
        kept = base if base in eligible else fastest
        limit = chance_share(fastest, base, noise, rows)
        return kept, [
            f"No gain here: no plan is faster than {base.plan} by more than chance "
            f"({limit:.1%} of a step). Take {kept.plan}."
        ]
    take = max(eligible, key=lambda row: (row.score.total if row.score else 0.0, -median_ms(row)))
    if take is base:
        fastest = min(gaining, key=median_ms)
        return take, [
            f"Take {base.plan}: {fastest.plan} is the fastest and saves "
            f"{saved_share(fastest, base):.0%} of the time, but it scores fewer points."
        ]
    others = [
        *_fastest_sentence(take, gaining, base),
        *_smallest_change_sentence(take, gaining, base),
    ]
    return take, [_take_sentence(take, base), *others]


def _take_sentence(take: PlanResult, base: PlanResult) -> str:
    assert take.score is not None
    losses = {
        "identical": "the same losses, bit for bit",
        "within": f"losses within {take.equal.largest or 0:.2g} of {base.plan}'s",
        "reference": "the reference's losses",
    }.get(take.equal.verdict, "losses that were not compared")
    memory = ""
    if take.peak_memory_bytes and base.peak_memory_bytes:
        memory = f", {take.peak_memory_bytes / base.peak_memory_bytes:.2f} × the memory"
    return (
        f"Take {take.plan}: {median_ms(base) / median_ms(take):.2f} × as fast as {base.plan} "
        f"({median_ms(take):.3g} instead of {median_ms(base):.3g} ms per step), {losses}{memory}; "
        f"{take.score.total:.0f} of 100 points."
    )


def _fastest_sentence(
    take: PlanResult, gaining: Sequence[PlanResult], base: PlanResult
) -> list[str]:
    """The fastest plan, if it is not the one to take and clearly faster."""
    fastest = min(gaining, key=median_ms)
    if fastest is take or median_ms(take) / median_ms(fastest) - 1 < WORTH_MENTIONING:
        return []
    assert fastest.score is not None
    why = JUDGMENTS[scheme_of(fastest.fields)].why
    return [
        f"The fastest is {fastest.plan}: {median_ms(base) / median_ms(fastest):.2f} × as fast, "
        f"{median_ms(fastest):.3g} ms per step; it scores {fastest.score.total:.0f} of 100 "
        f"points ({why})."
    ]


def _smallest_change_sentence(
    take: PlanResult, gaining: Sequence[PlanResult], base: PlanResult
) -> list[str]:
    """The simplest plan that gains something, for those who want to change little."""

    def ease(row: PlanResult) -> int:
        judged = JUDGMENTS[scheme_of(row.fields)]
        return judged.effort + judged.complexity + judged.maintainability + judged.risk

    worth = [row for row in gaining if saved_share(row, base) >= WORTH_MENTIONING]
    simplest = max(worth, key=ease, default=take)
    if ease(simplest) <= ease(take):
        return []
    return [
        f"The smallest change that gains something is {simplest.plan}: "
        f"{median_ms(base) / median_ms(simplest):.2f} × as fast."
    ]
