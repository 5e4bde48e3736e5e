"""The search space: presets, numbers of loader workers, and how far ahead batches are sent."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace.bench.plan_list import plans_here
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
        workers = self.loader.workers or 0
        return (_RANK[self.base], len(self.changed), self.plan.prefetch_depth, workers)


@dataclass(frozen=True, slots=True)
class Space:
    """The values to try for each field; an empty tuple leaves the field unchanged. `own_workers`
    is what the workload uses by itself, if that is known."""

    presets: tuple[str, ...]
    precision: str | None = None
    prefetch_depth: tuple[int, ...] = (1, 2, 4, 8)
    workers: tuple[int, ...] = ()
    own_workers: int | None = None

    @classmethod
    def on(cls, device: Device, cores: int, *, loads: bool, **options: Any) -> Space:
        """The space for a device and a number of CPU cores. `loads` says whether the workload's
        number of workers can be set. `options` override fields of the space, unless they are None.
        """
        few = tuple(n for n in (0, 1, 2, 4, 8, _MAX_WORKERS) if n <= max(1, cores - 1))
        known: dict[str, Any] = {
            "presets": tuple(plans_here(device)),
            "workers": few if loads else (),
        }
        if not device.asynchronous:  # the host itself computes: nothing is sent ahead
            known["prefetch_depth"] = ()
        return cls(**known | {name: value for name, value in options.items() if value is not None})

    def first(self) -> Candidate:
        """Where the search starts: `baseline`, or else the first preset."""
        return self._preset("baseline" if "baseline" in self.presets else self.presets[0])

    def stages(self) -> tuple[str, ...]:
        """The stages of the search, in order: plans, workers, then the plan's prefetch depth."""
        later = ("workers", "prefetch_depth")
        return ("plans", *(name for name in later if getattr(self, name)))

    def around(self, stage: str, best: Candidate) -> Iterator[Candidate]:
        """The candidates of a stage: variations of the best so far."""
        if stage == "plans":
            for name in self.presets:
                yield dataclasses.replace(self._preset(name), loader=best.loader)
        elif stage == "workers":
            for workers in self.workers:
                own = workers == self.own_workers
                loader = dataclasses.replace(best.loader, workers=None if own else workers)
                yield dataclasses.replace(best, loader=loader)
        else:
            for depth in self.prefetch_depth if best.plan.prefetch_depth else ():
                yield dataclasses.replace(best, plan=best.plan.replace(prefetch_depth=depth))

    def _preset(self, name: str) -> Candidate:
        plan = Plan.preset(name)
        if self.precision is not None:
            plan = plan.replace(precision=self.precision, name=name)
        return Candidate(name, plan)


@functools.lru_cache(maxsize=4096)  # called very often
def _key(plan: Plan, loader: LoaderPlan) -> str:
    fields = {name: value for name, value in plan.to_dict().items() if name != "name"}
    return json.dumps([fields, dataclasses.asdict(loader)], sort_keys=True)
