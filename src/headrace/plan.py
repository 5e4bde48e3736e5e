"""Plans: how a training loop is run, as data.

A plan says when things are computed, not what; only its `precision`, if it has one, changes the
numbers. The presets are the schemes that people compare (`baseline` … `max`); any field can be
changed with `Plan.preset("pipeline").but(prefetch_depth=3)` or in a `plan.yaml`.

`HEADRACE_PLAN=baseline` in the environment replaces the plan of every engine: does a bug go away
with it?
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headrace.errors import PlanError
from headrace.schema import (
    Checked,
    choice,
    listed,
    mapping,
    nearest,
    quoted,
    read_yaml,
    refuse_unknown,
    shown,
    whole,
)
from headrace.text_table import text_table

_MANY = 1_000_000
#: The environment variable that replaces every engine's plan.
PLAN_VARIABLE = "HEADRACE_PLAN"


@dataclass(frozen=True, slots=True)
class Plan(Checked):
    """How the loop is run. All intervals count batches."""

    name: str = choice("custom", "what it is called in tables and results")
    streams: int = whole(3, 2, 8, "device streams in use, the caller's own included")
    sync: Literal["batch", "interval", "event", "none"] = choice(
        "none", "when the host waits for the device, apart from the run-ahead bound"
    )
    sync_every: int = whole(10, 1, _MANY, "batches between two such waits (interval and event)")
    prefetch_depth: int = whole(
        2, 0, 64, "batches copied to the device ahead of use; 0 copies in line, blocking"
    )
    pin: bool = choice(True, "stage batches in pinned memory, so that copies run beside the host")
    run_ahead_steps: int = whole(8, 1, _MANY, "steps the host may be ahead of the device")
    run_ahead_bytes: int | None = field(
        default=None,
        metadata={
            "low": 1,
            "high": 1 << 50,
            "meaning": "bytes of batches in flight; none: bounded by steps alone",
        },
    )
    split_backward: bool = choice(False, "backward and optimizer on a stream of their own")
    graphs: Literal["off", "on", "auto"] = choice("off", "capture the whole step and replay it")
    graph_shapes: int = whole(16, 1, 4096, "shapes with a graph of their own; least used goes")
    graph_after: int = whole(2, 1, _MANY, "batches of a shape launched one by one before that")
    compile: bool = choice(False, "compile model and loss first")
    precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = choice(
        None, "arithmetic of the model; none: float32, with PyTorch's TF32 switches left alone"
    )
    deferred_every: int = whole(10, 1, _MANY, "batches between two readings of the losses")
    cache_batches: int = whole(0, 0, _MANY, "batches kept on the device from epoch to epoch")

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.split_backward and self.streams < 3:
            raise PlanError(
                f"streams = {self.streams}: expected 3 to 8 with split_backward, which needs "
                "a stream for each of transfer, forward and backward"
            )
        if self.split_backward and self.graphs != "off":
            raise PlanError(
                f"graphs = {self.graphs!r}: expected 'off' with split_backward; "
                "a captured step runs on one stream"
            )
        if self.graphs != "off" and self.prefetch_depth < 1:
            raise PlanError(
                f"prefetch_depth = {self.prefetch_depth}: expected 1 to 64 with "
                f"graphs = {self.graphs!r}, which read their batches from slots"
            )

    @classmethod
    def preset(cls, name: str) -> Plan:
        """The preset of that name; `PRESETS` has them all."""
        if not isinstance(name, str) or name not in PRESETS:
            raise PlanError(
                f"no plan {quoted(name)}{nearest(name, PRESETS)}; known: {listed(PRESETS)}"
            )
        return PRESETS[name]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "plan") -> Plan:
        """A plan from plain values; `preset` names the one that the other keys change."""
        given = dict(mapping(values, where))
        base = given.pop("preset", None)
        if isinstance(given.get("graphs"), bool):
            # YAML reads a bare `on` or `off` as a boolean.
            given["graphs"] = "on" if given["graphs"] else "off"
        refuse_unknown(given, ["preset", *cls.field_names()], where)
        try:
            if base is None:
                return cls(**given)
            return cls.preset(base).but(**given)
        except PlanError as problem:
            raise PlanError(f"{where}: {problem}") from None

    @classmethod
    def of(cls, plan: Plan | str | Path | Mapping[str, Any]) -> Plan:
        """Whatever may stand for a plan: a `Plan`, a preset's name, a dict or a YAML file."""
        if isinstance(plan, Plan):
            return plan
        if isinstance(plan, Mapping):
            return cls.from_dict(plan)
        if isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith((".yaml", ".yml"))):
            return load_plan(plan).plan
        if not isinstance(plan, str):
            raise PlanError(
                f"plan = {quoted(plan)}: expected a Plan, a preset's name, a mapping of fields or "
                "the path of a YAML file"
            )
        return cls.preset(plan)

    def but(self, **changes: Any) -> Plan:
        """This plan with some fields changed. A changed preset is called `name*`."""
        refuse_unknown(changes, self.field_names(), "plan")
        if changes and "name" not in changes:
            changes["name"] = self.name if self.name.endswith("*") else f"{self.name}*"
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `from_dict` takes them."""
        return dataclasses.asdict(self)

    def table(self) -> str:
        """Field, value and meaning, as text."""
        rows = [
            (known.name, shown(getattr(self, known.name)), known.metadata["meaning"])
            for known in dataclasses.fields(self)
            if known.name != "name"
        ]
        return text_table(("field", "value", "meaning"), rows, title=f"plan {self.name}")


@dataclass(frozen=True, slots=True)
class LoaderPlan(Checked):
    """How batches are loaded: what a `plan.yaml` says of the DataLoader."""

    workers: int | None = field(
        default=None,
        metadata={"low": 0, "high": 1024, "meaning": "loading processes; 0 loads in this one"},
    )
    prefetch_factor: int | None = field(
        default=None,
        metadata={"low": 1, "high": 1024, "meaning": "batches each worker loads ahead"},
    )
    batch_size: int | None = field(
        default=None, metadata={"low": 1, "high": 1 << 30, "meaning": "samples a batch"}
    )


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The two parts of a `plan.yaml`. A loader field that is None was not given."""

    plan: Plan
    loader: LoaderPlan


def load_plan(path: str | Path) -> PlanFile:
    """Read a `plan.yaml`: `plan:` (a preset's name, or fields) and, if wanted, `loader:`."""
    content = read_yaml(path, PlanError)
    refuse_unknown(content, ["plan", "loader"], str(path))
    if "plan" not in content:
        raise PlanError(f"{path}: has no `plan:`; expected a preset's name or a mapping of fields")
    plan = content["plan"]
    if isinstance(plan, str):
        plan = {"preset": plan}
    loader = content.get("loader")
    loader = mapping({} if loader is None else loader, f"{path}: loader")
    loader_plan = LoaderPlan.from_values(loader, f"{path}: loader")
    return PlanFile(Plan.from_dict(plan, where=f"{path}: plan"), loader_plan)


def in_force(plan: Plan) -> Plan:
    """The plan that an engine given `plan` runs under: `plan` itself, unless `HEADRACE_PLAN` names
    another. That one gets the precision of `plan`, so that the arithmetic stays the same."""
    named = os.environ.get(PLAN_VARIABLE, "")
    if not named:
        return plan
    try:
        return dataclasses.replace(Plan.of(named), precision=plan.precision)
    except PlanError as problem:
        raise PlanError(
            f"{PLAN_VARIABLE}={named} in the environment: {problem} (or unset the variable)"
        ) from None


def refuse_replaced_plans(command: str) -> None:
    """Raise if `HEADRACE_PLAN` is set: where plans are compared, all would be the same one."""
    named = os.environ.get(PLAN_VARIABLE, "")
    if named:
        raise PlanError(
            f"{PLAN_VARIABLE}={named} in the environment replaces every plan, and {command} "
            f"compares plans: unset {PLAN_VARIABLE} first"
        )


def presets_table() -> str:
    """All presets side by side: a row a field that differs, a column a plan."""
    plans = list(PRESETS.values())
    rows = []
    for name in Plan.field_names():
        values = [shown(getattr(plan, name)) for plan in plans]
        if name != "name" and len(set(values)) > 1:
            rows.append((name, *values))
    return text_table(("field", *PRESETS), rows)


#: The schemes, as data. `baseline` is the loop most people have; the next three are what is
#: usually advised; `pipeline` never waits but to bound its run-ahead; `graph` and `max` also take
#: the launching of kernels off the host.
PRESETS: dict[str, Plan] = {
    plan.name: plan
    for plan in (
        Plan(
            name="baseline",
            streams=2,
            sync="batch",
            sync_every=1,
            prefetch_depth=0,
            pin=False,
            deferred_every=1,
        ),
        Plan(
            name="interval",
            streams=2,
            sync="interval",
            prefetch_depth=1,
            pin=False,
            run_ahead_steps=32,
        ),
        Plan(name="event", streams=2, sync="event", prefetch_depth=1, run_ahead_steps=32),
        Plan(
            name="streams4",
            streams=4,
            sync="event",
            prefetch_depth=2,
            run_ahead_steps=32,
            split_backward=True,
        ),
        Plan(name="pipeline", streams=3),
        # With more steps under way than the driver takes, the host waits inside a launch, awake.
        Plan(name="graph", streams=3, graphs="on", run_ahead_steps=4),
        Plan(name="max", streams=3, graphs="on", run_ahead_steps=4, compile=True),
    )
}
