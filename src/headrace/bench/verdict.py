"""What the figures say, in words: what the GPU waits for, which plan to take, and why.

The time in which the GPU computes nothing has four possible causes. Each is measured:

data       the host stands and waits for the loader
copies     the GPU copies and does nothing else
syncs      idle time that goes away once the host stops waiting (under `pipeline`)
launches   idle time that stays even then: the host cannot launch kernels fast enough

A plan that makes the model faster moves the limit: under the plan to take, the loader may be what
is waited for. So that plan's own time is looked at, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.bench.scores import chance_share, gain_share, saved_share, scheme_of, scores_of
from headrace.runs.records import JUDGEMENTS, Noise, PlanResult, Verdict, WaitsFor

# Less than this share of a step is not worth a word.
_WORTH_IT = 0.05
# What two measurements of the same may differ by, where it was not measured here.
_USUAL_NOISE = 0.03
_LEAST_NOISE = 0.01
_FEW_TURNS = 3
_LOAD_FASTER = (
    "Give the DataLoader more workers (num_workers) or a larger prefetch_factor, or do less work "
    "for each sample; `headrace tune` tries workers and prefetch factors."
)
# The ledger's reasons for waits that are a copy.
_COPY_WAITS = ("copy", "pageable_copy")


@dataclass(frozen=True, slots=True)
class Causes:
    """Milliseconds a step in which the GPU computes nothing, by what it waits for."""

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
        return max(named, key=lambda one: one[1])


def scored(rows: Sequence[PlanResult], reference: str, noise: Noise | None) -> list[PlanResult]:
    """The rows with their scores, where there is something to compare with."""
    base = _base(rows, reference)
    if base is None:
        return list(rows)
    scores = scores_of(rows, base, noise_share(noise))
    return [replace(row, score=scores.get(row.plan)) for row in rows]


def verdict_of(rows: Sequence[PlanResult], reference: str, noise: Noise | None) -> Verdict:
    """What to make of scored rows."""
    base = _base(rows, reference)
    if base is None:
        return Verdict("unknown", None, ("No plan was measured: there is nothing to say.",))
    waits_for, sentences = _what_it_waits_for(rows, base)
    take, why = _what_to_take(rows, base, noise_share(noise))
    sentences += why
    still_for: WaitsFor = waits_for
    if take is not None and take is not base:
        still_for, more = _what_it_still_waits_for(take)
        sentences += more
    sentences += _peers(rows, base if take is None else take)
    if noise is not None:
        sentences.append(
            f"The same plan entered twice ({noise.plan}) differs by {noise.difference_share:.1%}."
        )
    gains = noise is None and take is not None and take.plan != base.plan
    if gains and base.ms_per_step is not None and len(base.ms_per_step.repeats) < _FEW_TURNS:
        sentences.append(
            f"With fewer than {_FEW_TURNS} turns each (--repeats) nobody can tell a gain from "
            "chance."
        )
    if None in base.losses:
        sentences.append(
            f"{base.plan}'s loss is not finite at step {base.losses.index(None) + 1}: whether the "
            "others' are the same cannot be told."
        )
    for row in rows:
        if row.kind == "plan" and row.equal.verdict == "unequal":
            sentences.append(f"{row.plan} has other losses than {base.plan}: {row.equal.why}.")
    return Verdict(
        waits_for,
        None if take is None else take.plan,
        tuple(sentences),
        "unknown" if take is None else still_for,
    )


def noise_share(noise: Noise | None) -> float:
    """A gain of less than this is none."""
    return _USUAL_NOISE if noise is None else max(_LEAST_NOISE, noise.difference_share)


def causes_of(base: PlanResult, without_syncs: PlanResult | None) -> Causes:
    """`base` is the loop as it was; `without_syncs` one whose host never waits for the device."""
    idle = _idle_ms(base)
    data = min(base.data_wait_ms or 0.0, idle)
    exposed = _exposed_copy_ms(base)
    copies = max(exposed, _blocking_copy_ms(base))
    # Of a copy from memory that is not pinned, part is the host's: the GPU is idle in it.
    rest = max(0.0, idle - data - (copies - exposed))
    if without_syncs is None or without_syncs.gpu is None or without_syncs.ms_per_step is None:
        # A host that hardly ever stood still was busy launching; else the waits are to blame.
        waited = (base.host_blocked_ms or 0.0) >= 0.2 * _median(base)
        return Causes(data, copies, rest if waited else 0.0, 0.0 if waited else rest)
    idle_still = _idle_ms(without_syncs)
    data = min(without_syncs.data_wait_ms or 0.0, idle_still)
    launches = idle_still - data
    return Causes(data, copies, max(0.0, rest - launches), launches)


# --- sentences ------------------------------------------------------------------------------------


def _what_it_waits_for(rows: Sequence[PlanResult], base: PlanResult) -> tuple[WaitsFor, list[str]]:
    step = _median(base)
    if base.gpu is None:
        data_ms = base.data_wait_ms or 0.0
        if data_ms >= _WORTH_IT * step:
            return "data", [
                f"Training waits for data: {data_ms:.3g} of {step:.3g} ms a step under "
                f"{base.plan} go to the loader. {_LOAD_FASTER}"
            ]
        return "unknown", [
            "What a GPU would wait for cannot be seen here: there is none, or no profiler for it."
        ]
    pipeline = next((r for r in rows if r.agrees and scheme_of(r.fields) == "pipeline"), None)
    causes = causes_of(base, None if pipeline is base else pipeline)
    cause, ms = causes.largest()
    if ms < _WORTH_IT * step:
        return "nothing", [
            f"The GPU waits for nothing: under {base.plan} it is busy {base.gpu.busy_share:.0%} of "
            f"the time, {base.gpu.busy_ms_per_step:.3g} of {step:.3g} ms a step."
        ]
    return cause, [_cause_sentence(cause, ms, base, pipeline)]


def _cause_sentence(
    cause: WaitsFor, ms: float, base: PlanResult, pipeline: PlanResult | None
) -> str:
    step, gpu = _median(base), base.gpu
    assert gpu is not None
    share = f"{ms:.3g} ms a step ({ms / step:.0%} of {base.plan}'s)"
    idle = f"under {base.plan} it is busy {gpu.busy_share:.0%} of the time"
    if cause == "data":
        return (
            f"The GPU waits for data: the loader keeps training waiting for {share}; {idle}. "
            f"{_LOAD_FASTER}"
        )
    if cause == "copies":
        return f"The GPU waits for copies: for {share} it copies and computes nothing; {idle}."
    if cause == "syncs":
        return (
            f"The GPU waits for syncs: {share} go by idle because the host waits for each batch "
            f"before it launches the next; {idle}."
        )
    launches = (pipeline or base).gpu
    count = launches.launches_per_step if launches is not None else None
    many = "the kernels of a step" if count is None else f"the {count:,.0f} kernels of a step"
    still = "" if pipeline is None or pipeline is base else ", also when nothing else is waited for"
    return (
        f"The GPU waits for launches: the host needs {share} longer to launch {many} than the "
        f"GPU to run them{still}; {idle}."
    )


def _what_to_take(
    rows: Sequence[PlanResult], base: PlanResult, noise: float
) -> tuple[PlanResult | None, list[str]]:
    able = [row for row in rows if row.kind == "plan" and row.agrees and row.score is not None]
    # One that could not be captured ran as another plan does, and is no better than that.
    able = [row for row in able if row.ran_as_planned] or able
    if not able:
        measured = [row for row in rows if row.kind == "plan" and row.score is not None]
        if not measured or any(row.equal.verdict == "unequal" for row in measured):
            return None, ["No plan can be advised: none has losses that are known to agree."]
        able = measured  # losses were not compared at all
    # Of a plan that was entered twice, the first row stands for both.
    able = [
        row for at, row in enumerate(able) if not any(row.is_same_plan_as(r) for r in able[:at])
    ]
    if able == [base]:
        return base, [
            f"There is nothing to compare {base.plan} with: no other plan was run, or none as it "
            "is meant to."
        ]
    gaining = [row for row in able if gain_share(row, base, noise, rows) > 0]
    if not gaining:
        fastest = min(able, key=_median)
        kept = base if base in able else fastest
        limit = chance_share(fastest, base, noise, rows)
        return kept, [
            f"Nothing is to be gained here: no plan is faster than {base.plan} by more than can be "
            f"told from chance ({limit:.1%} of a step). Take {kept.plan}."
        ]
    take = max(able, key=lambda row: (row.score.total if row.score else 0.0, -_median(row)))
    if take is base:
        fastest = min(gaining, key=_median)
        return take, [
            f"Take {base.plan}: what {fastest.plan}, the fastest, saves "
            f"({saved_share(fastest, base):.0%} of the time) does not make up for what it costs."
        ]
    others = [*_also(take, gaining, base), *_least_change(take, gaining, base)]
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
        f"({_median(take):.3g} against {_median(base):.3g} ms a step), {losses}{memory}; "
        f"{take.score.total:.0f} points of 100."
    )


def _also(take: PlanResult, gaining: Sequence[PlanResult], base: PlanResult) -> list[str]:
    """A faster one that has fewer points deserves a word."""
    fastest = min(gaining, key=_median)
    if fastest is take or _median(take) / _median(fastest) - 1 < _WORTH_IT:
        return []
    assert fastest.score is not None
    why = JUDGEMENTS[scheme_of(fastest.fields)].why
    return [
        f"The fastest is {fastest.plan}: {_median(base) / _median(fastest):.2f} ×, "
        f"{_median(fastest):.3g} ms a step; it has {fastest.score.total:.0f} points ({why})."
    ]


def _least_change(take: PlanResult, gaining: Sequence[PlanResult], base: PlanResult) -> list[str]:
    """Who wants to change as little as can be gets a word, if that gains anything."""

    def ease(row: PlanResult) -> int:
        judged = JUDGEMENTS[scheme_of(row.fields)]
        return judged.effort + judged.complexity + judged.maintainability + judged.risk

    worth = [row for row in gaining if saved_share(row, base) >= _WORTH_IT]
    simplest = max(worth, key=ease, default=take)
    if ease(simplest) <= ease(take):
        return []
    return [
        f"The least change that gains something is {simplest.plan}: "
        f"{_median(base) / _median(simplest):.2f} ×."
    ]


def _what_it_still_waits_for(take: PlanResult) -> tuple[WaitsFor, list[str]]:
    """The limit under the plan to take. Waits for the loader cost nothing while the GPU is busy."""
    step, gpu = _median(take), take.gpu
    data_ms = take.data_wait_ms or 0.0
    lost_ms = data_ms if gpu is None else min(data_ms, _idle_ms(take))
    if lost_ms >= _WORTH_IT * step:
        return "data", [
            f"Under {take.plan} training waits for data: {lost_ms:.3g} of {step:.3g} ms a step go "
            f"to the loader, which is now slower than the model. {_LOAD_FASTER}"
        ]
    if gpu is None or gpu.over_busy_share is None:
        return "unknown", []
    over = gpu.over_busy_share
    if over < _WORTH_IT:
        return "nothing", [
            f"Under {take.plan} a step takes {max(over, 0.0):.0%} longer than the GPU is busy in "
            "it: more can only come from faster kernels."
        ]
    told = f"Under {take.plan} a step still takes {over:.0%} longer than the GPU is busy in it."
    return causes_of(take, None).largest()[0], [told]


def _peers(rows: Sequence[PlanResult], take: PlanResult) -> list[str]:
    told = [
        f"{row.plan} {_median(row):.3g} ms ({_median(row) / _median(take):.2f} × {take.plan}'s)"
        for row in rows
        if row.kind == "peer" and row.ms_per_step is not None
    ]
    return [f"The same work elsewhere: {', '.join(told)}."] if told else []


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
    """Copying while no kernel runs."""
    assert row.gpu is not None
    return max(0.0, row.gpu.busy_share - row.gpu.compute_share) * _median(row)


def _blocking_copy_ms(row: PlanResult) -> float:
    """The host standing still for copies: in line with its steps, or from unpinned memory."""
    reasons = {} if row.waits is None else row.waits.by_reason
    return sum(reasons[reason].ms_per_step for reason in _COPY_WAITS if reason in reasons)
