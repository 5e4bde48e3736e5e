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
from dataclasses import replace

from headrace.bench.causes import causes_of, idle_ms, median_ms
from headrace.bench.recommendation import WORTH_MENTIONING, recommendation
from headrace.bench.scores import scheme_of, scores_of
from headrace.records import Noise, PlanResult, Verdict, WaitsFor

_ASSUMED_NOISE = 0.03  # where no plan was entered twice
_MIN_NOISE = 0.01
_ENOUGH_ROUNDS = 3
_LOAD_FASTER = (
    "Give the DataLoader more workers (num_workers) or a larger prefetch_factor, or do less work "
    "per sample; `headrace tune` tries workers and prefetch factors."
)


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
    take, why = recommendation(rows, base, noise_share(noise))
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


# --- sentences ------------------------------------------------------------------------------------


def _bottleneck(rows: Sequence[PlanResult], base: PlanResult) -> tuple[WaitsFor, list[str]]:
    """What the GPU waits for under `base`, and the sentences that say so."""
    step = median_ms(base)
    if base.gpu is None:
        data_ms = base.data_wait_ms or 0.0
        if data_ms >= WORTH_MENTIONING * step:
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
    if ms < WORTH_MENTIONING * step:
        return "nothing", [
            f"The GPU waits for nothing: under {base.plan} it is busy {base.gpu.busy_share:.0%} of "
            f"the time, {base.gpu.busy_ms_per_step:.3g} of {step:.3g} ms per step."
        ]
    return cause, [_cause_sentence(cause, ms, base, pipeline)]


def _cause_sentence(
    cause: WaitsFor, ms: float, base: PlanResult, pipeline: PlanResult | None
) -> str:
    step, gpu = median_ms(base), base.gpu
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


def _remaining_bottleneck(take: PlanResult) -> tuple[WaitsFor, list[str]]:
    """What limits the recommended plan. Waiting for data costs nothing while the GPU is busy."""
    step, gpu = median_ms(take), take.gpu
    data_ms = take.data_wait_ms or 0.0
    lost_ms = data_ms if gpu is None else min(data_ms, idle_ms(take))
    if lost_ms >= WORTH_MENTIONING * step:
        return "data", [
            f"Under {take.plan} training waits for data: {lost_ms:.3g} of {step:.3g} ms per step, "
            f"because the loader is now slower than the model. {_LOAD_FASTER}"
        ]
    if gpu is None or gpu.over_busy_share is None:
        return "unknown", []
    over = gpu.over_busy_share
    if over < WORTH_MENTIONING:
        return "nothing", [
            f"Under {take.plan} the GPU is idle {max(over, 0.0) / (1 + max(over, 0.0)):.0%} of a "
            "step: only faster kernels could shorten it."
        ]
    sentence = f"Under {take.plan} the GPU is still idle {over / (1 + over):.0%} of a step."
    return causes_of(take, None).largest()[0], [sentence]


def _peers_sentence(rows: Sequence[PlanResult], take: PlanResult) -> list[str]:
    times = [
        f"{row.plan} {median_ms(row):.3g} ms "
        f"({median_ms(row) / median_ms(take):.2f} × {take.plan}'s)"
        for row in rows
        if row.kind == "peer" and row.ms_per_step is not None
    ]
    return [f"The same workload in other libraries: {', '.join(times)}."] if times else []


# --- figures --------------------------------------------------------------------------------------


def _base(rows: Sequence[PlanResult], reference: str) -> PlanResult | None:
    measured = [row for row in rows if row.kind == "plan" and row.ms_per_step is not None]
    return next((row for row in measured if row.plan == reference), next(iter(measured), None))
