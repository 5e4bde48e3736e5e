"""The search space: presets, changes to single fields, and ways to load batches."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.device import Device
from headrace.errors import PlanError
from headrace.plan import PRESETS, LoaderPlan, Plan

_RANK = {name: rank for rank, name in enumerate(PRESETS)}
_MAX_WORKERS = 16
_PLAN_FIELDS = (
    *("graphs", "compile", "streams", "sync_every", "prefetch_depth", "run_ahead_steps"),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan to try, derived from the preset `base`, and how its batches are loaded."""

    base: str
    plan: Plan
    loader: LoaderPlan = field(default_factory=LoaderPlan)

    @property
    def key(self) -> str:
        """Identifies a candidate by how it runs; its name does not matter."""
        return _key(self.plan, self.loader)

    @property
    def changed(self) -> dict[str, Any]:
        """The plan's fields that differ from the preset, and the loader's fields that are set."""
        return dict(_changed(self.base, self.plan, self.loader))

    @property
    def name(self) -> str:
        """The preset and the changes, for tables."""
        words = [f"{name} {_shown(value)}" for name, value in self.changed.items()]
        return ", ".join([self.base, *words]).replace("_", " ")

    @property
    def complexity(self) -> tuple[int, ...]:
        """Sorts simpler candidates first: an earlier preset, fewer changes, smaller values."""
        plan, loader = self.plan, self.loader
        return (
            _RANK[self.base],
            len(self.changed),
            int(plan.compile) + int(plan.graphs != "off"),
            plan.streams,
            plan.prefetch_depth,
            loader.workers or 0,
            loader.prefetch_factor or 0,
            plan.run_ahead_steps,
            plan.sync_every,
            # Prefer the workload's own batch size to one that is as fast.
            loader.batch_size or 0,
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "base": self.base,
            "plan": self.plan.to_dict(),
            "loader": dataclasses.asdict(self.loader),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Candidate:
        return cls(values["base"], Plan.from_dict(values["plan"]), LoaderPlan(**values["loader"]))


@dataclass(frozen=True, slots=True)
class Space:
    """The values to try for each field; an empty tuple leaves the field unchanged. `own_workers`
    and `own_batch_size` are what the workload uses by itself, if that is known."""

    presets: tuple[str, ...]
    precision: str | None = None
    sync_every: tuple[int, ...] = (5, 10, 20, 50)
    streams: tuple[int, ...] = (2, 3, 4)
    prefetch_depth: tuple[int, ...] = (1, 2, 4, 8)
    run_ahead_steps: tuple[int, ...] = (2, 8, 32)
    graphs: tuple[str, ...] = ()
    compile: tuple[bool, ...] = ()
    workers: tuple[int, ...] = ()
    prefetch_factor: tuple[int, ...] = (2, 4)
    batch_sizes: tuple[int, ...] = ()
    own_workers: int | None = None
    own_batch_size: int | None = None

    @classmethod
    def on(cls, device: Device, cores: int, loader_fields: frozenset[str], **options: Any) -> Space:
        """The space for a device and a number of CPU cores. `loader_fields` are those that the
        workload supports. `options` override fields of the space, unless they are None."""
        given = {name: value for name, value in options.items() if value is not None}
        known: dict[str, Any] = {
            "presets": tuple(
                name
                for name, plan in PRESETS.items()
                if (plan.graphs == "off" or device.captures)
                and (not plan.compile or device.compiles)
            ),
            "workers": tuple(n for n in (0, 1, 2, 4, 8, _MAX_WORKERS) if n <= max(1, cores - 1)),
        }
        if not device.asynchronous:  # the host itself computes, so these have no effect
            known |= dict.fromkeys(
                ("sync_every", "streams", "prefetch_depth", "run_ahead_steps"), ()
            )
        known |= given
        plans = [PRESETS[name] for name in known["presets"]]
        if device.captures and any(plan.graphs != "off" for plan in plans):
            known["graphs"] = ("off", "on")
        if device.compiles and any(plan.compile for plan in plans):
            known["compile"] = (False, True)
        if "workers" not in loader_fields:
            known["workers"] = ()
        if "prefetch_factor" not in loader_fields:
            known["prefetch_factor"] = ()
        return cls(**known)

    def first(self) -> Candidate:
        """Where the search starts: `baseline`, or else the first preset."""
        name = "baseline" if "baseline" in self.presets else self.presets[0]
        return self._preset(name, LoaderPlan())

    def baseline_of(self, candidate: Candidate) -> Candidate:
        """The first plan with the candidate's batch size: the reference for its losses."""
        batch_size = candidate.loader.batch_size
        return dataclasses.replace(self.first(), loader=LoaderPlan(batch_size=batch_size))

    def stages(self) -> tuple[str, ...]:
        """The stages of the search, in order: plans, loading, then each field of the plan."""
        loading = [name for name in ("workers", "batch_sizes") if getattr(self, name)]
        return ("plans", *loading, *_PLAN_FIELDS)

    def around(self, stage: str, best: Candidate) -> list[Candidate]:
        """The candidates of a stage: the best so far, and its variations."""
        stages = {"plans": self._plans, "workers": self._workers, "batch_sizes": self._batches}
        tried = stages[stage](best) if stage in stages else self._field(stage, best)
        found = {best.key: best}
        for candidate in tried:
            found.setdefault(candidate.key, candidate)
        return list(found.values())

    def _preset(self, name: str, loader: LoaderPlan) -> Candidate:
        return Candidate(name, _preset(name, self.precision), loader)

    def _plans(self, best: Candidate) -> Iterator[Candidate]:
        for name in self.presets:
            yield self._preset(name, best.loader)

    def _workers(self, best: Candidate) -> Iterator[Candidate]:
        for workers in self.workers:
            if workers == self.own_workers:
                loader = dataclasses.replace(best.loader, workers=None, prefetch_factor=None)
                yield dataclasses.replace(best, loader=loader)
                continue
            for ahead in self.prefetch_factor if workers and self.prefetch_factor else (None,):
                loader = dataclasses.replace(best.loader, workers=workers, prefetch_factor=ahead)
                yield dataclasses.replace(best, loader=loader)

    def _batches(self, best: Candidate) -> Iterator[Candidate]:
        for size in self.batch_sizes:
            own = size == self.own_batch_size
            loader = dataclasses.replace(best.loader, batch_size=None if own else size)
            yield dataclasses.replace(best, loader=loader)

    def _field(self, name: str, best: Candidate) -> Iterator[Candidate]:
        if not _has_effect(name, best.plan):
            return
        for value in getattr(self, name):
            changes = {name: value}
            switched = name == "graphs" and best.plan.sync == "none" and value != best.plan.graphs
            if switched and best.plan.run_ahead_steps == _default_run_ahead(best.plan.graphs):
                # Plans with graphs have a bound of their own.
                changes["run_ahead_steps"] = _default_run_ahead(value)
            try:
                plan = best.plan.replace(**changes)
            except PlanError:
                continue  # the fields contradict each other
            yield self._named(dataclasses.replace(best, plan=plan))

    def _named(self, candidate: Candidate) -> Candidate:
        """The candidate under a preset's name, if it equals that preset."""
        for name in PRESETS:
            preset = self._preset(name, candidate.loader)
            if preset.key == candidate.key:
                return preset
        return candidate


@functools.lru_cache(maxsize=4096)  # called very often
def _key(plan: Plan, loader: LoaderPlan) -> str:
    fields = {name: value for name, value in plan.to_dict().items() if name != "name"}
    return json.dumps([fields, dataclasses.asdict(loader)], sort_keys=True)


@functools.lru_cache(maxsize=4096)
def _changed(base: str, plan: Plan, loader: LoaderPlan) -> dict[str, Any]:
    preset, fields = Plan.preset(base).to_dict(), plan.to_dict()
    fixed = ("name", "precision")  # the search does not change the precision
    found = {k: v for k, v in fields.items() if k not in fixed and v != preset[k]}
    return found | {k: v for k, v in dataclasses.asdict(loader).items() if v is not None}


@functools.cache
def _preset(name: str, precision: str | None) -> Plan:
    plan = Plan.preset(name)
    return plan if precision is None else plan.replace(precision=precision, name=name)


def _default_run_ahead(graphs: str) -> int:
    """The run-ahead bound of the presets with or without graphs."""
    return Plan.preset("pipeline" if graphs == "off" else "graph").run_ahead_steps


def _has_effect(name: str, plan: Plan) -> bool:
    """Whether changing this field changes how the plan runs."""
    if name == "sync_every":
        return plan.sync in ("interval", "event")
    if name == "streams":
        return plan.sync != "none"
    if name == "run_ahead_steps":
        return plan.sync == "none"
    if name in ("prefetch_depth", "graphs"):
        return plan.prefetch_depth > 0
    return True


def _shown(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
