"""What a search found: the result to store, a table of all candidates, sentences, and a plan."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from headrace.bench.tune.trial import Outcome, Trial
from headrace.lifecycle import yaml_text
from headrace.plan import LoaderPlan, Plan
from headrace.records import Environment, TrialRecord, TuneResult, Winner, WorkRecord
from headrace.text_table import text_table, wrap_line

_ORDER = ("winner", "same as winner", "slower", "out of memory", "failed")
_NAMED = 3
_NOISY = 0.05


@dataclass(frozen=True)
class FinishedSearch:
    """A search that has ended, and what is written about it: a result file, a table, a plan."""

    work: WorkRecord
    environment: Environment
    settings: dict[str, Any]
    outcome: Outcome

    @property
    def plan(self) -> Plan:
        return self.outcome.winner.candidate.plan

    @property
    def loader(self) -> LoaderPlan:
        return self.outcome.winner.candidate.loader

    @property
    def sentences(self) -> list[str]:
        return sentences_of(self.outcome, self.work.unit)

    @property
    def result(self) -> TuneResult:
        """What result.json holds."""
        outcome = self.outcome
        return TuneResult(
            work=self.work,
            environment=self.environment,
            settings=self.settings,
            trials=tuple(_record_of(trial) for trial in outcome.trials),
            winner=Winner(
                id=outcome.winner.number,
                name=outcome.winner.candidate.name,
                plan=self.plan.to_dict(),
                loader=dataclasses.asdict(self.loader),
            ),
            noise_share=outcome.noise,
            cut_short=outcome.ended_by is not None,
            sentences=tuple(self.sentences),
        )

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values, ready for `json.dumps`."""
        return self.result.to_dict()

    def text(self) -> str:
        """A table of all candidates, the best first, and the conclusions."""
        fastest = self.outcome.winner.ms_per_step or 1.0
        rows = [
            (
                trial.candidate.name,
                "" if trial.ms_per_step is None else f"{trial.ms_per_step:,.2f}",
                "" if trial.ms_per_step is None else f"{trial.ms_per_step / fastest:.2f} ×",
                str(len(trial.ms) or ""),
                "" if not trial.peak_memory_bytes else f"{trial.peak_memory_bytes / 2**30:.2f} GiB",
                trial.status or "",
                trial.why,
            )
            for trial in sorted(self.outcome.trials, key=_place)
        ]
        columns = ("candidate", "ms/step", "time", "runs", "memory", "status", "why")
        sentences = [wrap_line(sentence) for sentence in self.sentences]
        return "\n".join([text_table(columns, rows, right=columns[1:5]), "", *sentences])

    def plan_yaml(self) -> str:
        """The winner as a plan file, for `load_plan`, `headrace train --plan` and `Engine`."""
        winner = self.outcome.winner
        preset, plan = Plan.preset(winner.candidate.base).to_dict(), self.plan.to_dict()
        fields = {k: v for k, v in plan.items() if k != "name" and v != preset[k]}
        loader = {k: v for k, v in dataclasses.asdict(self.loader).items() if v is not None}
        content: dict[str, Any] = {"plan": {"preset": winner.candidate.base, **fields}}
        if loader:
            content["loader"] = loader
        title = f"{self.work.name} on {self.environment.device_name}"
        head = f"# headrace tune, {title}\n" + "".join(f"# {line}\n" for line in self.sentences)
        return head + yaml_text(content)


def _record_of(trial: Trial) -> TrialRecord:
    candidate = trial.candidate
    return TrialRecord(
        id=trial.number,
        name=candidate.name,
        plan=candidate.plan.to_dict(),
        loader=dataclasses.asdict(candidate.loader),
        changed=candidate.changed,
        runs_ms=tuple(trial.ms),
        ms_per_step=trial.ms_per_step,
        units_per_step=trial.units_per_step,
        status=trial.status or "slower",
        why=trial.why,
        peak_memory_bytes=trial.peak_memory_bytes,
    )


def _place(trial: Trial) -> tuple[int, float, int]:
    value = trial.ms_per_step
    return (
        _ORDER.index(trial.status or "slower"),
        float("inf") if value is None else value,
        trial.number,
    )


def sentences_of(outcome: Outcome, unit: str) -> list[str]:
    """Which candidate to take and why."""
    winner, first = outcome.winner, outcome.first
    return [
        _taken(outcome, winner, first, unit),
        *_ties(outcome),
        *_noisy(outcome.noise),
        *_out_of_memory([t for t in outcome.trials if t.status == "out of memory"]),
        *_failed([t for t in outcome.trials if t.status == "failed"]),
        *_early(outcome.ended_by),
    ]


def _taken(outcome: Outcome, winner: Trial, first: Trial, unit: str) -> str:
    name, base = winner.candidate.name, first.candidate.name
    if winner is first:
        if sum(bool(trial.ms) for trial in outcome.trials) == 1:
            return f"Take {name}: nothing else was measured."
        gain = "" if outcome.ended_by else ", so there is nothing to be gained here"
        return (
            f"Take {name}: no other candidate is faster by more than noise "
            f"({outcome.noise:.1%}){gain}."
        )
    assert winner.ms_per_step is not None
    assert first.ms_per_step is not None
    ratio = first.ms_per_step / winner.ms_per_step
    per_s = winner.units_per_step / winner.ms_per_step * 1e3
    return (
        f"Take {name}: {winner.ms_per_step:,.2f} ms per step, {per_s:,.0f} {unit}/s, {ratio:.2f} "
        f"times as fast as {base} ({first.ms_per_step:,.2f} ms per step)."
    )


def _ties(outcome: Outcome) -> list[str]:
    same = [t.candidate.name for t in outcome.trials if t.status == "same as winner"]
    if not same:
        return []
    return [
        f"As fast within noise ({outcome.noise:.1%}): {_some(same)}; "
        f"{outcome.winner.candidate.name} is the simplest."
    ]


def _noisy(noise: float) -> list[str]:
    if noise <= _NOISY:
        return []
    return [
        f"Runs of the same plan differ by {noise:.0%} here, so smaller gains cannot be seen. Use "
        "longer runs (--steps) or an idle machine to see them."
    ]


def _early(ended_by: str | None) -> list[str]:
    if ended_by is None:
        return []
    what = "The time limit" if ended_by == "time limit" else ended_by
    return [f"{what} ended the search early: there may be a faster plan."]


def _out_of_memory(trials: list[Trial]) -> list[str]:
    if not trials:
        return []
    return [f"Out of memory: {_some([trial.candidate.name for trial in trials])}."]


def _failed(trials: list[Trial]) -> list[str]:
    return [f"{trial.candidate.name} failed: {trial.why}." for trial in trials[:_NAMED]]


def _some(names: list[str]) -> str:
    shown = "; ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
