"""Plans: how a training loop runs, as data.

A plan decides when things happen (copies, waits, streams, graphs), not what is computed: only its
`precision`, if set, changes the numbers. The presets go from `baseline` to `max`. Change a field
with `Plan.preset("pipeline").replace(prefetch_depth=3)` or in a `plan.yaml`.

The environment variable `HEADRACE_PLAN=baseline` replaces the plan of every engine. Use it to find
out whether a bug depends on the plan.
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

_MILLION = 1_000_000
#: The environment variable that replaces every engine's plan.
PLAN_VARIABLE = "HEADRACE_PLAN"


@dataclass(frozen=True, slots=True)
class Plan(Checked):
    """How a training loop runs. All intervals are in batches."""

    name: str = choice("custom", "name in tables and results")
    streams: int = whole(3, 2, 8, "number of device streams, including the caller's own")
    sync: Literal["batch", "interval", "event", "none"] = choice(
        "none",
        "when the host waits: each batch, each interval, for an event, or none (only run-ahead)",
    )
    sync_every: int = whole(
        10, 1, _MILLION, "batches between two of these waits (sync = interval or event)"
    )
    prefetch_depth: int = whole(
        2, 0, 64, "batches copied to the device before they are needed; 0: copy each one and wait"
    )
    pin: bool = choice(
        True, "copy batches through pinned memory, so that the host does not wait for a copy"
    )
    run_ahead_steps: int = whole(
        8, 1, _MILLION, "maximum steps that the host may be ahead of the device"
    )
    run_ahead_bytes: int | None = field(
        default=None,
        metadata={
            "low": 1,
            "high": 1 << 50,
            "meaning": "maximum bytes of batches in flight; none: no limit in bytes",
        },
    )
    split_backward: bool = choice(False, "run backward and optimizer on a separate stream")
    graphs: Literal["off", "on", "auto"] = choice(
        "off",
        "capture the step, or else its parts, as graphs and replay them; auto: only if that is "
        "faster and gives the same bits",
    )
    graph_shapes: int = whole(
        16, 1, 4096, "maximum batch shapes that have a graph; the least used is dropped"
    )
    graph_after: int = whole(
        2, 1, _MILLION, "eager batches of a shape before its graph is captured"
    )
    recheck: int = whole(
        1000, 0, _MILLION, "replays after which a step is checked against its graph; 0: never"
    )
    compile: bool = choice(False, "compile model and loss with torch.compile")
    precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = choice(
        None, "precision of the model; none: float32, with PyTorch's TF32 settings unchanged"
    )
    deferred_every: int = whole(
        10, 1, _MILLION, "batches between two copies of the losses to the host"
    )
    cache_batches: int = whole(
        0, 0, _MILLION, "batches kept on the device from one epoch to the next"
    )

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.split_backward and self.streams < 3:
            raise PlanError(
                f"streams = {self.streams}: expected 3 to 8 with split_backward, which needs "
                "one stream each for transfer, forward and backward"
            )
        if self.split_backward and self.graphs != "off":
            raise PlanError(
                f"graphs = {self.graphs!r}: expected 'off' with split_backward; "
                "a captured step runs on one stream"
            )
        if self.graphs != "off" and self.prefetch_depth < 1:
            raise PlanError(
                f"prefetch_depth = {self.prefetch_depth}: expected 1 to 64 with "
                f"graphs = {self.graphs!r}: a graph reads prefetched batches"
            )

    @classmethod
    def preset(cls, name: str) -> Plan:
        """The preset called `name`; `PRESETS` lists all of them."""
        if not isinstance(name, str) or name not in PRESETS:
            raise PlanError(
                f"no plan {quoted(name)}{nearest(name, PRESETS)}; known: {listed(PRESETS)}"
            )
        return PRESETS[name]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "plan") -> Plan:
        """Make a plan from plain values. The key `preset` names the preset to start from; the other
        keys replace its fields. `where` begins the error messages."""
        given = dict(mapping(values, where))
        base = given.pop("preset", None)
        if isinstance(given.get("graphs"), bool):
            # YAML reads a bare `on` or `off` as a boolean.
            given["graphs"] = "on" if given["graphs"] else "off"
        refuse_unknown(given, ["preset", *cls.field_names()], where)
        try:
            if base is None:
                return cls(**given)
            return cls.preset(base).replace(**given)
        except PlanError as problem:
            raise PlanError(f"{where}: {problem}") from None

    @classmethod
    def of(cls, plan: Plan | str | Path | Mapping[str, Any]) -> Plan:
        """Make a plan from a `Plan`, a preset's name, a dict of fields or a YAML file's path."""
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

    def replace(self, **changes: Any) -> Plan:
        """A copy with some fields replaced. Its name gets a `*`, unless `name` is given."""
        refuse_unknown(changes, self.field_names(), "plan")
        if changes and "name" not in changes:
            changes["name"] = self.name if self.name.endswith("*") else f"{self.name}*"
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, which `from_dict` reads."""
        return dataclasses.asdict(self)

    def table(self) -> str:
        """The fields with value and meaning, as a text table."""
        rows = [
            (known.name, shown(getattr(self, known.name)), known.metadata["meaning"])
            for known in dataclasses.fields(self)
            if known.name != "name"
        ]
        return text_table(("field", "value", "meaning"), rows, title=f"plan {self.name}")


@dataclass(frozen=True, slots=True)
class LoaderPlan(Checked):
    """The `loader:` part of a `plan.yaml`: options for the DataLoader."""

    workers: int | None = field(
        default=None,
        metadata={
            "low": 0,
            "high": 1024,
            "meaning": "DataLoader worker processes; 0: load in this process",
        },
    )
    prefetch_factor: int | None = field(
        default=None,
        metadata={"low": 1, "high": 1024, "meaning": "batches that each worker loads in advance"},
    )
    batch_size: int | None = field(
        default=None, metadata={"low": 1, "high": 1 << 30, "meaning": "samples per batch"}
    )


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The two parts of a `plan.yaml`. A loader field that the file does not set is None."""

    plan: Plan
    loader: LoaderPlan


def load_plan(path: str | Path) -> PlanFile:
    """Read a `plan.yaml`: `plan:` (a preset's name, or fields) and, optionally, `loader:`."""
    content = read_yaml(path, PlanError)
    for part, kind in (("plan", Plan), ("loader", LoaderPlan)):
        if misplaced := [name for name in kind.field_names() if name in content]:
            raise PlanError(
                f"{path}: {misplaced[0]!r} is at the top level; expected it under `{part}:`"
            )
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


def effective_plan(plan: Plan) -> Plan:
    """The plan to run instead of `plan`: the one that `HEADRACE_PLAN` names, with the precision of
    `plan`, so that the numbers stay the same. `plan` itself if the variable is not set."""
    named = os.environ.get(PLAN_VARIABLE, "")
    if not named:
        return plan
    try:
        return dataclasses.replace(Plan.of(named), precision=plan.precision)
    except PlanError as problem:
        raise PlanError(
            f"{PLAN_VARIABLE}={named} in the environment: {problem} (or unset the variable)"
        ) from None


def graphs_are_asked_for() -> bool:
    """Whether `HEADRACE_PLAN` names a preset that keeps its graphs without measuring."""
    return os.environ.get(PLAN_VARIABLE) in ("graph", "max")


def refuse_plan_variable(command: str) -> None:
    """Raise `PlanError` if `HEADRACE_PLAN` is set: `command` compares plans, and the variable would
    make all of them the same."""
    named = os.environ.get(PLAN_VARIABLE, "")
    if named:
        raise PlanError(
            f"{PLAN_VARIABLE}={named} in the environment replaces every plan, and {command} "
            f"compares plans: unset {PLAN_VARIABLE} first"
        )


def presets_table() -> str:
    """All presets side by side: one column per preset, one row per field in which they differ."""
    plans = list(PRESETS.values())
    rows = []
    for name in Plan.field_names():
        values = [shown(getattr(plan, name)) for plan in plans]
        if name != "name" and len(set(values)) > 1:
            rows.append((name, *values))
    return text_table(("field", *PRESETS), rows)


#: The presets. `baseline` is the loop most people write; `interval`, `event` and `streams4` are
#: what is usually recommended; `pipeline` waits only to limit its run-ahead; `graph` and `max` also
#: launch the whole step at once; `auto` is `pipeline` or `graph`, whichever is faster.
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
        # 4, not 8: when the driver's launch queue is full, a launch spins on the CPU until it fits.
        Plan(name="graph", streams=3, graphs="on", run_ahead_steps=4),
        Plan(name="max", streams=3, graphs="on", run_ahead_steps=4, compile=True),
        Plan(name="auto", streams=3, graphs="auto", run_ahead_steps=4),
    )
}
