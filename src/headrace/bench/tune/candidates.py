"""The search space: presets, ways to load batches, and how far ahead batches are sent."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace.device import Device
from headrace.plan import PRESETS, LoaderPlan, Plan

_RANK = {name: rank for rank, name in enumerate(PRESETS)}
_MAX_WORKERS = 16


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
        preset, fields = Plan.preset(self.base).to_dict(), self.plan.to_dict()
        fixed = ("name", "precision")  # the search does not change the precision
        found = {k: v for k, v in fields.items() if k not in fixed and v != preset[k]}
        loader = dataclasses.asdict(self.loader)
        return found | {k: v for k, v in loader.items() if v is not None}

    @property
    def name(self) -> str:
        """The preset and the changes, for tables."""
        words = [f"{name} {value}" for name, value in self.changed.items()]
        return ", ".join([self.base, *words]).replace("_", " ")

    @property
    def complexity(self) -> tuple[int, ...]:
        """Sorts simpler candidates first: an earlier preset, fewer changes, smaller values."""
        plan, loader = self.plan, self.loader
        return (
            _RANK[self.base],
            len(self.changed),
            plan.prefetch_depth,
            loader.workers or 0,
            loader.prefetch_factor or 0,
            # Prefer the workload's own batch size to one that is as fast.
            loader.batch_size or 0,
        )


@dataclass(frozen=True, slots=True)
class Space:
    """The values to try for each field; an empty tuple leaves the field unchanged. `own_workers`
    and `own_batch_size` are what the workload uses by itself, if that is known."""

    presets: tuple[str, ...]
    precision: str | None = None
    prefetch_depth: tuple[int, ...] = (1, 2, 4, 8)
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
        if not device.asynchronous:  # the host itself computes: nothing is sent ahead
            known["prefetch_depth"] = ()
        missing = {"workers", "prefetch_factor"} - loader_fields
        return cls(**known | given | dict.fromkeys(missing, ()))

    def first(self) -> Candidate:
        """Where the search starts: `baseline`, or else the first preset."""
        name = "baseline" if "baseline" in self.presets else self.presets[0]
        return self._preset(name, LoaderPlan())

    def baseline_of(self, candidate: Candidate) -> Candidate:
        """The first plan with the candidate's batch size: the reference for its losses."""
        batch_size = candidate.loader.batch_size
        return dataclasses.replace(self.first(), loader=LoaderPlan(batch_size=batch_size))

    def stages(self) -> tuple[str, ...]:
        """The stages of the search, in order: plans, loading, then the plan's prefetch depth."""
        later = ("workers", "batch_sizes", "prefetch_depth")
        return ("plans", *(name for name in later if getattr(self, name)))

    def around(self, stage: str, best: Candidate) -> list[Candidate]:
        """The candidates of a stage: the best so far, and its variations."""
        tried = {
            "plans": self._plans,
            "workers": self._workers,
            "batch_sizes": self._batches,
            "prefetch_depth": self._depths,
        }
        found = {best.key: best}
        for candidate in tried[stage](best):
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

    def _depths(self, best: Candidate) -> Iterator[Candidate]:
        for depth in self.prefetch_depth if best.plan.prefetch_depth else ():
            yield dataclasses.replace(best, plan=best.plan.replace(prefetch_depth=depth))


@functools.lru_cache(maxsize=4096)  # called very often
def _key(plan: Plan, loader: LoaderPlan) -> str:
    fields = {name: value for name, value in plan.to_dict().items() if name != "name"}
    return json.dumps([fields, dataclasses.asdict(loader)], sort_keys=True)


@functools.cache
def _preset(name: str, precision: str | None) -> Plan:
    plan = Plan.preset(name)
    return plan if precision is None else plan.replace(precision=precision, name=name)
