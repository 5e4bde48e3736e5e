"""The plans to measure, as `--plans` lists them: presets and plan files. A plan listed twice shows
the noise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.device import Device
from headrace.errors import BenchError
from headrace.plan import PRESETS, LoaderPlan, Plan, load_plan


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """A plan to measure, and its name in the result."""

    name: str
    plan: Plan
    loader: LoaderPlan

    def is_same_plan(self, other: PlanEntry) -> bool:
        return (self.plan, self.loader) == (other.plan, other.loader)


def plans_here(device: Device) -> list[str]:
    """The presets that the device supports, but for `auto`, which is one of two others."""
    return [
        name
        for name, plan in PRESETS.items()
        if plan.graphs != "auto"
        and (plan.graphs == "off" or device.captures)
        and (not plan.compile or device.compiles)
    ]


def entries_of(named: Sequence[str], precision: str | None = None) -> list[PlanEntry]:
    """An entry for each name; a name that is listed again becomes `name#2`, `name#3` and so on."""
    if not named:
        raise BenchError("no plan is named: expected at least one")
    entries: list[PlanEntry] = []
    for given in named:
        name, loader = re.sub(r"#\d+$", "", given), LoaderPlan()
        if name.endswith((".yaml", ".yml")):
            stored = load_plan(name)
            plan, loader = stored.plan, stored.loader
            title = Path(name).stem if plan.name == "custom" else plan.name
        else:
            plan = Plan.preset(name)
            title = plan.name
        if precision is not None and precision != plan.precision:
            plan = plan.replace(precision=precision, name=plan.name)
        taken = {entry.name for entry in entries}
        number, unique = 1, title
        while unique in taken:
            number += 1
            unique = f"{title}#{number}"
        entries.append(PlanEntry(unique, replace(plan, name=title), loader))
    return entries


def reference_of(entries: Sequence[PlanEntry]) -> PlanEntry:
    """The plan that the others are compared with: `baseline`, or else the first."""
    return next((entry for entry in entries if entry.name == "baseline"), entries[0])


def noise_pair(entries: Sequence[PlanEntry]) -> tuple[PlanEntry, PlanEntry] | None:
    """The first plan that is listed twice."""
    for at, entry in enumerate(entries):
        for other in entries[at + 1 :]:
            if entry.is_same_plan(other):
                return entry, other
    return None
