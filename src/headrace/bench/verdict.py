"""Draws conclusions from the figures: what the GPU waits for, which plan to take, and why.

The time in which the GPU computes nothing has four possible causes, and each is measured:

data       the host waits for the loader
copies     the GPU only copies
syncs      idle time that disappears when the host stops waiting for the device (`pipeline`)
launches   idle time that remains even then: the host cannot launch kernels fast enough

A faster plan moves the bottleneck: under the recommended plan, the loader may be what limits the
step. So the verdict looks at that plan's own waits, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.bench.scores import chance_share, gain_share, saved_share, scheme_of, scores_of
from headrace.records import JUDGMENTS, Noise, PlanResult, Verdict, WaitsFor

_WORTH_MENTIONING = 0.05  # share of a step
_ASSUMED_NOISE = 0.03  # where no plan was entered twice
_MIN_NOISE = 0.01
_ENOUGH_ROUNDS = 3
_LOAD_FASTER = (
    "Give the DataLoader more workers (num_workers) or a larger prefetch_factor, or do less work "
    "per sample; `headrace tune` tries workers and prefetch factors."
)
# Reasons in the ledger that mean a copy.
_COPY_WAITS = ("copy", "pageable_copy")


@dataclass(frozen=True, slots=True)
class Causes:
    """Milliseconds per step in which the GPU computes nothing, by what it waits for."""

    data: float
    copies: float
    syncs: float
    launches: float

    def largest(self) -> tuple[WaitsFor, float]:
        named: list[tuple[WaitsFor, float]] = [
            ("data", self.data),
            ("copies", self.copies),
            ("syncs", self.syncs),
            ("launches", self.launches),
        ]
        return max(named, key=lambda cause: cause[1])


def scored(rows: Sequence[PlanResult], reference: str, noise: Noise | None) -> list[PlanResult]:
    """The rows with their scores; without a reference that was measured, there are none."""
    base = _base(rows, reference)
    if base is None:
        return list(rows)
    scores = scores_of(rows, base, noise_share(noise))
    return [replace(row, score=scores.get(row.plan)) for row in rows]


def verdict_of(rows: Sequence[PlanResult], reference: str, noise: Noise | None) -> Verdict:
    """The verdict on scored rows."""
    base = _base(rows, reference)
    if base is None:
        return Verdict("unknown", None, ("No plan was measured.",))
    waits_for, sentences = _bottleneck(rows, base)
    take, why = _recommendation(rows, base, noise_share(noise))
    sentences += why
    take_waits_for: WaitsFor = waits_for
    if take is not None and take is not base:
        take_waits_for, more = _remaining_bottleneck(take)
        sentences += more
    sentences += _peers_sentence(rows, base if take is None else take)
    if noise is not None:
        sentences.append(
            f"Noise: {noise.plan}, measured twice, differs by {noise.difference_share:.1%}."
        )
    gains = noise is None and take is not None and take.plan != base.plan
    if gains and base.ms_per_step is not None and len(base.ms_per_step.repeats) < _ENOUGH_ROUNDS:
        sentences.append(
            f"Fewer than {_ENOUGH_ROUNDS} rounds (--repeats) cannot tell a gain from chance."
        )
    if None in base.losses:
        sentences.append(
            f"{base.plan}'s loss is not finite at step {base.losses.index(None) + 1}, so the other "
            "plans' losses cannot be compared with it."
        )
    for row in rows:
        if row.kind == "plan" and row.equal.verdict == "unequal":
            sentences.append(f"{row.plan}'s losses differ from {base.plan}'s: {row.equal.why}.")
    return Verdict(
        waits_for,
        None if take is None else take.plan,
        tuple(sentences),
        "unknown" if take is None else take_waits_for,
    )


def noise_share(noise: Noise | None) -> float:
    """The share of a step below which a gain does not count."""
    return _ASSUMED_NOISE if noise is None else max(_MIN_NOISE, noise.difference_share)


def causes_of(base: PlanResult, without_syncs: PlanResult | None) -> Causes:
    """Why the GPU is idle under `base`. `without_syncs` is a plan whose host never waits for the
    device; without it, syncs and launches cannot be told apart exactly."""
    idle = _idle_ms(base)
    data = min(base.data_wait_ms or 0.0, idle)
    exposed = _exposed_copy_ms(base)
    copies = max(exposed, _blocking_copy_ms(base))
    # During part of a pageable copy the host works and the GPU is idle.
    rest = max(0.0, idle - data - (copies - exposed))
    if without_syncs is None or without_syncs.gpu is None or without_syncs.ms_per_step is None:
        # A host that hardly ever waits is busy launching; otherwise its waits are the cause.
        waited = (base.host_blocked_ms or 0.0) >= 0.2 * _median(base)
        return Causes(data, copies, rest if waited else 0.0, 0.0 if waited else rest)
    idle_still = _idle_ms(without_syncs)
    data = min(without_syncs.data_wait_ms or 0.0, idle_still)
    launches = idle_still - data
    return Causes(data, copies, max(0.0, rest - launches), launches)


# --- sentences ------------------------------------------------------------------------------------


def _bottleneck(rows: Sequence[PlanResult], base: PlanResult) -> tuple[WaitsFor, list[str]]:
    """What the GPU waits for under `base`, and the sentences that say so."""
    step = _median(base)
    if base.gpu is None:
        data_ms = base.data_wait_ms or 0.0
        if data_ms >= _WORTH_MENTIONING * step:
            return "data", [
                f"Training waits for data: under {base.plan} it waits {data_ms:.3g} of {step:.3g} "
                f"ms per step for the loader. {_LOAD_FASTER}"
            ]
        return "unknown", [
            "What the GPU waits for was not measured: there is no GPU here, or no profiler for it."
        ]
    pipeline = next((r for r in rows if r.agrees and scheme_of(r.fields) == "pipeline"), None)
    causes = causes_of(base, None if pipeline is base else pipeline)
    cause, ms = causes.largest()
    if ms < _WORTH_MENTIONING * step:
        return "nothing", [
            f"The GPU waits for nothing: under {base.plan} it is busy {base.gpu.busy_share:.0%} of "
            f"the time, {base.gpu.busy_ms_per_step:.3g} of {step:.3g} ms per step."
        ]
    return cause, [_cause_sentence(cause, ms, base, pipeline)]


def _cause_sentence(
    cause: WaitsFor, ms: float, base: PlanResult, pipeline: PlanResult | None
) -> str:
    step, gpu = _median(base), base.gpu
    assert gpu is not None
    share = f"{ms:.3g} ms per step ({ms / step:.0%} of the step)"
    idle = f"under {base.plan} the GPU is busy {gpu.busy_share:.0%} of the time"
    if cause == "data":
        return (
            f"The GPU waits for data: the loader delays training by {share}; {idle}. {_LOAD_FASTER}"
        )
    if cause == "copies":
        return f"The GPU waits for copies: for {share} it copies and computes nothing; {idle}."
    if cause == "syncs":
        return (
            f"The GPU waits for syncs: it is idle for {share} because the host waits for each "
            f"batch before it launches the next; {idle}."
        )
    launches = (pipeline or base).gpu
    count = launches.launches_per_step if launches is not None else None
    many = "the kernels of a step" if count is None else f"the {count:,.0f} kernels of a step"
    still = (
        ""
        if pipeline is None or pipeline is base
        else ", even when the host waits for nothing else"
    )
    return (
        f"The GPU waits for launches: launching {many} takes {ms:.3g} ms longer than running them "
        f"({ms / step:.0%} of the step){still}; {idle}."
    )


def _recommendation(
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
        fastest = min(eligible, key=_median)
        kept = base if base in eligible else fastest
        limit = chance_share(fastest, base, noise, rows)
        return kept, [
            f"No gain here: no plan is faster than {base.plan} by more than chance "
            f"({limit:.1%} of a step). Take {kept.plan}."
        ]
    take = max(eligible, key=lambda row: (row.score.total if row.score else 0.0, -_median(row)))
    if take is base:
        fastest = min(gaining, key=_median)
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
        f"Take {take.plan}: {_median(base) / _median(take):.2f} × as fast as {base.plan} "
        f"({_median(take):.3g} instead of {_median(base):.3g} ms per step), {losses}{memory}; "
        f"{take.score.total:.0f} of 100 points."
    )


def _fastest_sentence(
    take: PlanResult, gaining: Sequence[PlanResult], base: PlanResult
) -> list[str]:
    """The fastest plan, if it is not the one to take and clearly faster."""
    fastest = min(gaining, key=_median)
    if fastest is take or _median(take) / _median(fastest) - 1 < _WORTH_MENTIONING:
        return []
    assert fastest.score is not None
    why = JUDGMENTS[scheme_of(fastest.fields)].why
    return [
        f"The fastest is {fastest.plan}: {_median(base) / _median(fastest):.2f} × as fast, "
        f"{_median(fastest):.3g} ms per step; it scores {fastest.score.total:.0f} of 100 "
        f"points ({why})."
    ]


def _smallest_change_sentence(
    take: PlanResult, gaining: Sequence[PlanResult], base: PlanResult
) -> list[str]:
    """The simplest plan that gains something, for those who want to change little."""

    def ease(row: PlanResult) -> int:
        judged = JUDGMENTS[scheme_of(row.fields)]
        return judged.effort + judged.complexity + judged.maintainability + judged.risk

    worth = [row for row in gaining if saved_share(row, base) >= _WORTH_MENTIONING]
    simplest = max(worth, key=ease, default=take)
    if ease(simplest) <= ease(take):
        return []
    return [
        f"The smallest change that gains something is {simplest.plan}: "
        f"{_median(base) / _median(simplest):.2f} × as fast."
    ]


def _remaining_bottleneck(take: PlanResult) -> tuple[WaitsFor, list[str]]:
    """What limits the recommended plan. Waiting for data costs nothing while the GPU is busy."""
    step, gpu = _median(take), take.gpu
    data_ms = take.data_wait_ms or 0.0
    lost_ms = data_ms if gpu is None else min(data_ms, _idle_ms(take))
    if lost_ms >= _WORTH_MENTIONING * step:
        return "data", [
            f"Under {take.plan} training waits for data: {lost_ms:.3g} of {step:.3g} ms per step, "
            f"because the loader is now slower than the model. {_LOAD_FASTER}"
        ]
    if gpu is None or gpu.over_busy_share is None:
        return "unknown", []
    over = gpu.over_busy_share
    if over < _WORTH_MENTIONING:
        return "nothing", [
            f"Under {take.plan} the GPU is idle {max(over, 0.0) / (1 + max(over, 0.0)):.0%} of a "
            "step: only faster kernels could shorten it."
        ]
    sentence = f"Under {take.plan} the GPU is still idle {over / (1 + over):.0%} of a step."
    return causes_of(take, None).largest()[0], [sentence]


def _peers_sentence(rows: Sequence[PlanResult], take: PlanResult) -> list[str]:
    times = [
        f"{row.plan} {_median(row):.3g} ms ({_median(row) / _median(take):.2f} × {take.plan}'s)"
        for row in rows
        if row.kind == "peer" and row.ms_per_step is not None
    ]
    return [f"The same workload in other libraries: {', '.join(times)}."] if times else []


# --- figures --------------------------------------------------------------------------------------


def _base(rows: Sequence[PlanResult], reference: str) -> PlanResult | None:
    measured = [row for row in rows if row.kind == "plan" and row.ms_per_step is not None]
    return next((row for row in measured if row.plan == reference), next(iter(measured), None))


def _median(row: PlanResult) -> float:
    assert row.ms_per_step is not None
    return row.ms_per_step.median


def _idle_ms(row: PlanResult) -> float:
    assert row.gpu is not None
    return max(0.0, _median(row) - row.gpu.busy_ms_per_step)


def _exposed_copy_ms(row: PlanResult) -> float:
    """The time in which the GPU copies and runs no kernel."""
    assert row.gpu is not None
    return max(0.0, row.gpu.busy_share - row.gpu.compute_share) * _median(row)


def _blocking_copy_ms(row: PlanResult) -> float:
    """The time in which the host waits for copies: between its steps, or from pageable memory."""
    reasons = {} if row.waits is None else row.waits.by_reason
    return sum(reasons[reason].ms_per_step for reason in _COPY_WAITS if reason in reasons)
