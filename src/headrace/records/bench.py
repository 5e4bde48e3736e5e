"""The result of a benchmark: how fast the same workload ran under each plan, and what to use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from headrace.device import Span, pack_spans, unpack_spans
from headrace.errors import BenchError
from headrace.machine import StreamBusy
from headrace.records.environment import Environment, WorkRecord
from headrace.records.result_file import ResultFile
from headrace.records.scores import Score
from headrace.schema import Invalid, listed

#: How a plan's losses compare with the reference's.
Agreement = Literal["reference", "identical", "within", "unequal", "not compared"]
#: What keeps the GPU from computing.
WaitsFor = Literal["data", "copies", "syncs", "launches", "nothing", "unknown"]


@dataclass(frozen=True, slots=True)
class BenchWork(WorkRecord):
    """What was trained; a step trains on `units_per_step` samples or tokens."""

    units_per_step: float = 0.0


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """How it was measured. With `precision` None each plan has its own, and a plan that names none
    computes in float32 with PyTorch's switches as they were (`Environment.float32_switches`)."""

    plans: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    steps: int | None = None
    warmup: int | None = None
    repeats: int | None = None
    seed: int | None = None
    precision: str | None = None
    tolerance: float | None = None
    compared_steps: int | None = None


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds per step: median, lowest and highest over the rounds, and every round's."""

    median: float
    low: float
    high: float
    repeats: tuple[float, ...] = ()

    def invalid(self) -> Invalid | None:
        return Invalid("median", self.median, "more than 0 ms") if self.median <= 0 else None


@dataclass(frozen=True, slots=True)
class WaitFigures:
    """How often the host waits for one reason in a step, and how long in all."""

    per_step: float
    ms_per_step: float


@dataclass(frozen=True, slots=True)
class HostWaits:
    """The host's waits for the device. Waits for the loader are in `PlanResult.data_wait_ms`."""

    per_step: float
    ms_per_step: float
    by_reason: dict[str, WaitFigures] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What the profiler saw, as shares of the time that a step takes without the profiler.

    `over_busy_share` is how much longer a step takes than the GPU is busy in it.
    """

    busy_share: float
    compute_share: float
    copy_share: float
    idle_share: float
    busy_ms_per_step: float
    over_busy_share: float | None = None
    launches_per_step: float | None = None


@dataclass(frozen=True, slots=True)
class Equality:
    """Whether a plan's losses are the reference's.

    `largest` is the largest relative difference, `first_step` (from 1) the first step whose
    difference is above the tolerance, `why` the reason in words.
    """

    verdict: Agreement = "not compared"
    tolerance: float | None = None
    largest: float | None = None
    first_step: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class StoredTimeline:
    """A few steps under the profiler; the first begins at 0 ns."""

    steps: float = 1.0
    spans: tuple[Span, ...] = ()

    @classmethod
    def unpacked(cls, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """The stored mapping with a mapping for each span; files hold them as `pack_spans` does."""
        return unpack_spans(stored)

    def invalid(self) -> Invalid | None:
        for index, span in enumerate(self.spans):
            if span.start_ns < 0:
                return Invalid(f"spans[{index}].start_ns", span.start_ns, "nanoseconds from 0 on")
            if span.end_ns < span.start_ns:
                expected = f"at least start_ns, {span.start_ns:,}"
                return Invalid(f"spans[{index}].end_ns", span.end_ns, expected)
        return None


@dataclass(frozen=True, slots=True)
class StoredSample:
    """The driver's figures at one moment, and how many cores the process and its workers used."""

    at_s: float = 0.0
    gpu_share: float | None = None
    gpu_memory_bytes: int | None = None
    power_w: float | None = None
    cpu_share: float | None = None


@dataclass(frozen=True, slots=True)
class PlanResult:
    """How one plan, or one peer, ran. After an `error`, what was not measured is None.

    `fields` and `loader` are the plan's, None for a peer. `graphs` and `compiled` are the engine's
    reports on capturing and compiling the step; None if the plan asks for neither.
    """

    plan: str
    kind: Literal["plan", "peer"] = "plan"
    fields: dict[str, Any] | None = None
    loader: dict[str, Any] | None = None
    error: str | None = None
    ms_per_step: StepTimes | None = None
    #: What a pass (an epoch) takes besides its steps: to begin it, and to end it.
    pass_ms: float | None = None
    speedup: float | None = None
    per_s: float | None = None
    waits: HostWaits | None = None
    host_blocked_ms: float | None = None
    data_wait_ms: float | None = None
    gpu: GpuUse | None = None
    nvml_share: float | None = None
    power_w: float | None = None
    cpu_share: float | None = None
    peak_memory_bytes: int | None = None
    reserved_memory_bytes: int | None = None
    streams: tuple[StreamBusy, ...] = ()
    overlap_share: float | None = None
    losses: tuple[float | None, ...] = ()
    #: The reference's losses that these were compared with; empty if they are its own row's.
    reference_losses: tuple[float | None, ...] = ()
    equal: Equality = field(default_factory=Equality)
    graphs: dict[str, Any] | None = None
    compiled: dict[str, Any] | None = None
    timeline: StoredTimeline | None = None
    samples: tuple[StoredSample, ...] = ()
    score: Score | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_peer(self) -> bool:
        return self.kind == "peer"

    def is_same_plan_as(self, other: PlanResult) -> bool:
        """Whether both are the same plan, entered twice."""
        plans = self.kind == other.kind == "plan" and self.fields is not None
        return plans and (self.fields, self.loader) == (other.fields, other.loader)

    @property
    def ran_as_planned(self) -> bool:
        """Whether its step was captured and compiled, if its plan asks for that."""
        return self.is_captured is not False and self.is_compiled is not False

    @property
    def is_captured(self) -> bool | None:
        """Whether its step was captured as a graph; None if its plan does not ask for that."""
        if not self._asks_for_graphs:
            return None
        return self.graphs is not None and self.graphs.get("why") is None

    @property
    def is_compiled(self) -> bool | None:
        """Whether its step was compiled; None if its plan does not ask for that, or the result
        does not say."""
        return None if self.compiled is None else bool(self.compiled.get("compiled"))

    @property
    def not_captured(self) -> str | None:
        """Why its step was not captured, though its plan asks for that."""
        if self.graphs is not None:
            why = self.graphs.get("why")
            return None if why is None else str(why)
        if not self._asks_for_graphs or self.error is not None:
            return None
        return "this device captures no graphs"

    @property
    def not_compiled(self) -> str | None:
        """Why its step was not compiled, though its plan asks for that."""
        why = None if self.compiled is None else self.compiled.get("why")
        return None if why is None else str(why)

    @property
    def agrees(self) -> bool:
        """Whether it ran, and its losses are the reference's or within the tolerance."""
        return self.error is None and self.equal.verdict in ("reference", "identical", "within")

    @property
    def _asks_for_graphs(self) -> bool:
        return self.fields is not None and bool(self.fields.get("graphs", "off") != "off")


@dataclass(frozen=True, slots=True)
class Noise:
    """By how much the two medians of a plan that was entered twice differ."""

    plan: str
    difference_share: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the figures mean. `waits_for` is what the GPU waits for under the reference, `take` the
    plan to use, and `take_waits_for` what the GPU still waits for under that plan."""

    waits_for: WaitsFor = "unknown"
    take: str | None = None
    sentences: tuple[str, ...] = ()
    take_waits_for: WaitsFor = "unknown"


@dataclass(frozen=True, slots=True)
class BenchResult(ResultFile):
    """A whole benchmark. `missing` says what could not be measured on this machine."""

    kind: ClassVar[str] = "headrace bench"

    work: BenchWork = field(default_factory=BenchWork)
    settings: BenchSettings = field(default_factory=BenchSettings)
    environment: Environment = field(default_factory=Environment)
    rows: tuple[PlanResult, ...] = ()
    noise: Noise | None = None
    verdict: Verdict = field(default_factory=Verdict)
    missing: tuple[str, ...] = ()
    interrupted: bool = False

    def invalid(self) -> Invalid | None:
        if not self.rows:
            return Invalid("rows", [], "at least one plan")
        seen: set[str] = set()
        for index, row in enumerate(self.rows):
            if row.plan in seen:
                return Invalid(f"rows[{index}].plan", row.plan, "a name that no other row has")
            seen.add(row.plan)
        return None

    def row(self, plan: str) -> PlanResult:
        """The result of one plan or peer, by name."""
        for row in self.rows:
            if row.plan == plan:
                return row
        raise BenchError(f"no row {plan!r}; there are {listed(row.plan for row in self.rows)}")

    @property
    def reference(self) -> PlanResult | None:
        """What the others are compared with: `baseline`, or the first that was measured."""
        measured = [row for row in self.rows if row.ms_per_step is not None]
        named = [row for row in measured if row.plan == "baseline"]
        return next(iter(named or measured), None)

    @property
    def taken(self) -> PlanResult | None:
        """The plan that the verdict recommends."""
        return next((row for row in self.rows if row.plan == self.verdict.take), None)

    @property
    def timelines(self) -> list[tuple[str, StoredTimeline]]:
        """Each plan's timeline, with its name; plans without one are left out."""
        return [
            (row.plan, row.timeline)
            for row in self.rows
            if row.timeline is not None and row.timeline.spans
        ]

    @property
    def has_gpu(self) -> bool:
        return not self.environment.device.startswith("cpu")

    @property
    def failed(self) -> bool:
        """Whether something failed, or a plan's losses differ or are not finite."""
        return any(
            row.error is not None
            or (row.kind == "plan" and (row.equal.verdict == "unequal" or None in row.losses))
            for row in self.rows
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with packed timelines."""
        values = ResultFile.to_dict(self)
        for row in values["rows"]:
            if row["timeline"] is not None:
                row["timeline"] |= pack_spans(row["timeline"]["spans"])
        return values
