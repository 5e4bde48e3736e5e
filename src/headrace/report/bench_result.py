"""A bench result as it was stored: every row and figure, checked field by field."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from headrace.device import Kind, Span, unpack_spans
from headrace.errors import ReportError
from headrace.report.fields import Fields

KINDS: tuple[Kind, ...] = ("kernel", "copy", "wait", "host")


@dataclass(frozen=True, slots=True)
class Pace:
    """Milliseconds a step: median, lowest and highest of the repeats."""

    median: float
    low: float
    high: float
    repeats: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Waits:
    """Host waits a step, and by reason: (how many, milliseconds)."""

    per_step: float | None
    ms_per_step: float | None
    by_reason: dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class GpuUse:
    """From a profiler window: shares of wall time from 0 to 1."""

    busy_share: float | None
    compute_share: float | None
    copy_share: float | None
    idle_share: float | None
    busy_ms_per_step: float | None
    over_busy_share: float | None
    launches_per_step: float | None


@dataclass(frozen=True, slots=True)
class StreamUse:
    name: str
    busy_share: float | None
    kernels_per_step: float | None
    copies_per_step: float | None


@dataclass(frozen=True, slots=True)
class Equality:
    """How the losses compare with the first plan's."""

    verdict: str
    tolerance: float | None
    largest: float | None
    first_step: int | None
    why: str


@dataclass(frozen=True, slots=True)
class StoredTimeline:
    steps: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """What the monitor saw at one moment."""

    at_s: float
    gpu_share: float | None
    gpu_memory_bytes: float | None
    power_w: float | None
    cpu_share: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One plan or peer. What is None could not be seen where it was measured."""

    plan: str
    kind: str
    fields: dict[str, Any]
    error: str | None
    pace: Pace | None
    speedup: float | None
    per_s: float | None
    waits: Waits | None
    host_blocked_ms: float | None
    data_wait_ms: float | None
    gpu: GpuUse | None
    nvml_share: float | None
    power_w: float | None
    cpu_share: float | None
    peak_memory_bytes: float | None
    reserved_memory_bytes: float | None
    streams: tuple[StreamUse, ...]
    overlap_share: float | None
    losses: tuple[float | None, ...]
    reference_losses: tuple[float | None, ...]
    equal: Equality | None
    timeline: StoredTimeline | None
    samples: tuple[Sample, ...]
    score: dict[str, float]
    notes: tuple[str, ...]
    #: Why its step was not compiled, or not captured as a graph, though its plan asks for it.
    not_compiled: str | None
    not_captured: str | None

    @property
    def is_peer(self) -> bool:
        return self.kind == "peer"


@dataclass(frozen=True, slots=True)
class Noise:
    plan: str
    difference_share: float


@dataclass(frozen=True, slots=True)
class Verdict:
    waits_for: str
    take: str | None
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BenchResult:
    work: str
    description: str
    unit: str
    units_per_step: float | None
    work_options: dict[str, Any]
    settings: dict[str, Any]
    environment: dict[str, Any]
    rows: tuple[Row, ...]
    noise: Noise | None
    verdict: Verdict
    missing: tuple[str, ...]
    interrupted: bool

    @property
    def reference(self) -> Row | None:
        """The row that the others are compared with: `baseline`, or the first that was measured."""
        measured = [row for row in self.rows if row.pace is not None]
        named = [row for row in measured if row.plan == "baseline"]
        return next(iter(named or measured), None)

    @property
    def taken(self) -> Row | None:
        """The row of the plan that the verdict recommends."""
        return next((row for row in self.rows if row.plan == self.verdict.take), None)

    @property
    def has_gpu(self) -> bool:
        return not str(self.environment.get("device", "")).startswith("cpu")


def bench_result(content: Fields) -> BenchResult:
    """The result in a file that `headrace bench` wrote."""
    work = content.child("work") or Fields(content.file, "work", {})
    rows = tuple(_row(fields) for fields in content.children("rows"))
    if not rows:
        raise ReportError(f"{content.file}: rows: expected at least one plan, found none")
    for index, row in enumerate(rows):
        if row.plan in {other.plan for other in rows[:index]}:
            raise ReportError(f"{content.file}: rows[{index}].plan: {row.plan!r} is there twice")
    verdict = content.child("verdict") or Fields(content.file, "verdict", {})
    return BenchResult(
        work=work.text("name") or "work",
        description=work.text("description") or "",
        unit=work.text("unit") or "samples",
        units_per_step=work.number("units_per_step"),
        work_options=work.plain("options"),
        settings=content.plain("settings"),
        environment=content.plain("environment"),
        rows=rows,
        noise=_noise(content.child("noise")),
        verdict=Verdict(
            waits_for=verdict.text("waits_for") or "unknown",
            take=verdict.text("take"),
            sentences=tuple(verdict.texts("sentences")),
        ),
        missing=tuple(content.texts("missing")),
        interrupted=content.flag("interrupted"),
    )


def _row(fields: Fields) -> Row:
    waits, equal = fields.child("waits"), fields.child("equal")
    return Row(
        plan=fields.required("plan"),
        kind=fields.text("kind") or "plan",
        fields=fields.plain("fields"),
        error=fields.text("error"),
        pace=_pace(fields.child("ms_per_step")),
        waits=None if waits is None else _waits(waits),
        gpu=_numbers(GpuUse, fields.child("gpu")),
        streams=tuple(_stream(stream) for stream in fields.children("streams")),
        losses=tuple(fields.numbers("losses")),
        reference_losses=tuple(fields.numbers("reference_losses")),
        equal=None if equal is None else _equality(equal),
        timeline=_timeline(fields.child("timeline")),
        samples=tuple(_sample(sample) for sample in fields.children("samples")),
        score=_score(fields.child("score")),
        notes=tuple(fields.texts("notes")),
        not_compiled=_why_not(fields.child("compiled")),
        not_captured=_why_not(fields.child("graphs")) or _captures_none(fields),
        **{
            name: fields.number(name)
            for name in (
                *("speedup", "per_s", "host_blocked_ms", "data_wait_ms", "nvml_share", "power_w"),
                *("cpu_share", "peak_memory_bytes", "reserved_memory_bytes", "overlap_share"),
            )
        },
    )


def _pace(fields: Fields | None) -> Pace | None:
    if fields is None:
        return None
    median = fields.number("median")
    if median is None:
        return None
    if median <= 0:
        raise fields.problem("median", "more than 0 ms")
    low, high = fields.number("low"), fields.number("high")
    repeats = tuple(value for value in fields.numbers("repeats") if value is not None)
    return Pace(median, median if low is None else low, median if high is None else high, repeats)


def _waits(fields: Fields) -> Waits:
    by_reason = {
        reason: (inner.number("per_step") or 0.0, inner.number("ms_per_step") or 0.0)
        for reason, inner in fields.named("by_reason")
    }
    return Waits(fields.number("per_step"), fields.number("ms_per_step"), by_reason)


def _numbers(kind: type[GpuUse], fields: Fields | None) -> GpuUse | None:
    if fields is None:
        return None
    return kind(**{known.name: fields.number(known.name) for known in dataclasses.fields(kind)})


def _stream(fields: Fields) -> StreamUse:
    return StreamUse(
        fields.required("name"),
        fields.number("busy_share"),
        fields.number("kernels_per_step"),
        fields.number("copies_per_step"),
    )


def _equality(fields: Fields) -> Equality:
    return Equality(
        verdict=fields.text("verdict") or "not compared",
        tolerance=fields.number("tolerance"),
        largest=fields.number("largest"),
        first_step=fields.whole("first_step"),
        why=fields.text("why") or "",
    )


def _timeline(fields: Fields | None) -> StoredTimeline | None:
    if fields is None:
        return None
    fields = Fields(fields.file, fields.path, unpack_spans(fields.values))
    spans = tuple(_span(span) for span in fields.children("spans"))
    return StoredTimeline(max(1, fields.whole("steps") or 1), spans) if spans else None


def _span(fields: Fields) -> Span:
    kind = fields.required("kind")
    if kind not in KINDS:
        raise fields.problem("kind", "kernel, copy, wait or host")
    start_ns, end_ns = fields.whole("start_ns"), fields.whole("end_ns")
    if start_ns is None or start_ns < 0:
        raise fields.problem("start_ns", "nanoseconds from 0 on")
    if end_ns is None or end_ns < start_ns:
        raise fields.problem("end_ns", f"at least start_ns, {start_ns:,}")
    return Span(fields.required("lane"), fields.text("name") or kind, kind, start_ns, end_ns)


def _why_not(fields: Fields | None) -> str | None:
    return None if fields is None else fields.text("why")


def _captures_none(fields: Fields) -> str | None:
    """A plan with graphs that has no report of them ran where none are captured."""
    asked = fields.plain("fields").get("graphs", "off") != "off"
    if not asked or fields.text("error") is not None or fields.child("graphs") is not None:
        return None
    return "this device captures no graphs"


def _sample(fields: Fields) -> Sample:
    return Sample(
        fields.number("at_s") or 0.0,
        fields.number("gpu_share"),
        fields.number("gpu_memory_bytes"),
        fields.number("power_w"),
        fields.number("cpu_share"),
    )


def _score(fields: Fields | None) -> dict[str, float]:
    if fields is None:
        return {}
    found = {str(name): fields.number(str(name)) for name in fields.values}
    return {name: value for name, value in found.items() if value is not None}


def _noise(fields: Fields | None) -> Noise | None:
    if fields is None:
        return None
    difference = fields.number("difference_share")
    return None if difference is None else Noise(fields.text("plan") or "", difference)
