"""The result of a benchmark, as it is written to a file and read back: frozen records.

    result = BenchResult.read("result.json")
    print(result.row("graph").speedup, result.verdict.take)

Times are in the units their names say; shares are 0 to 1; None is what could not be seen. A file
that is not such a result is an error that names the field.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from headrace.device import pack_spans, unpack_spans
from headrace.errors import BenchError
from headrace.schema import listed, quoted

KIND, VERSION = "headrace bench", 1
Agreement = Literal["reference", "identical", "within", "unequal", "not compared"]
#: The arithmetic of a plan that names no precision.
AS_SET = "float32 as PyTorch is set"
WaitsFor = Literal["data", "copies", "syncs", "launches", "nothing", "unknown"]


@dataclass(frozen=True, slots=True)
class WorkRecord:
    """What was trained. `units_per_step` counts `unit`: what a batch has of them."""

    name: str
    description: str
    options: dict[str, Any]
    unit: Literal["samples", "tokens"]
    units_per_step: float


@dataclass(frozen=True, slots=True)
class Settings:
    """How it was measured. `precision` None: as each plan says, and a plan that says nothing
    computes in float32 with PyTorch's switches as they are (`Environment.float32_switches`)."""

    plans: tuple[str, ...]
    peers: tuple[str, ...]
    steps: int
    warmup: int
    repeats: int
    seed: int
    precision: str | None
    tolerance: float
    compared_steps: int = 0


@dataclass(frozen=True, slots=True)
class Environment:
    command: str
    date: str
    headrace: str
    torch: str
    python: str
    device: str
    device_name: str
    device_memory_bytes: int | None
    driver: str | None
    cpu: str
    cores: int
    platform: str
    #: Which float32 products PyTorch was set to compute in TF32; None: not recorded, or no choice.
    float32_switches: str | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds a step: the median over repeats, the least, the most, and all in order."""

    median: float
    low: float
    high: float
    repeats: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class WaitFigures:
    per_step: float
    ms_per_step: float


@dataclass(frozen=True, slots=True)
class Waits:
    """The host's waits for the device; those for the loader are in a row's `data_wait_ms`."""

    per_step: float
    ms_per_step: float
    by_reason: dict[str, WaitFigures]


@dataclass(frozen=True, slots=True)
class Gpu:
    """From a profiler's window; shares are of a step's time without the profiler.

    `over_busy_share` is how much longer a step takes than the GPU was busy in it.
    """

    busy_share: float
    compute_share: float
    copy_share: float
    idle_share: float
    busy_ms_per_step: float
    over_busy_share: float | None
    launches_per_step: float | None


@dataclass(frozen=True, slots=True)
class StreamFigures:
    name: str
    busy_share: float
    kernels_per_step: float
    copies_per_step: float


@dataclass(frozen=True, slots=True)
class Equal:
    """Whether the losses are the reference's. `largest` is the largest relative difference,
    `first_step` (from 1) where it first was beyond what is allowed, `why` the reason in words."""

    verdict: Agreement
    tolerance: float | None = None
    largest: float | None = None
    first_step: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class SpanRecord:
    lane: str
    name: str
    kind: Literal["kernel", "copy", "wait", "host"]
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class TimelineRecord:
    """A few steps under the profiler, from 0 on."""

    steps: float
    spans: tuple[SpanRecord, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A moment: the driver's figures, and how many cores this process and its workers used."""

    at_s: float
    gpu_share: float | None = None
    gpu_memory_bytes: int | None = None
    power_w: float | None = None
    cpu_share: float | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Points of 100, and how many each of the six counts for has brought."""

    total: float
    gain: float
    effort: float
    complexity: float
    maintainability: float
    memory: float
    risk: float


@dataclass(frozen=True, slots=True)
class Row:
    """One plan, or one peer. After an error the figures that were not measured are None."""

    plan: str
    kind: Literal["plan", "peer"]
    fields: dict[str, Any] | None = None
    loader: dict[str, Any] | None = None
    error: str | None = None
    ms_per_step: Spread | None = None
    speedup: float | None = None
    per_s: float | None = None
    waits: Waits | None = None
    host_blocked_ms: float | None = None
    data_wait_ms: float | None = None
    gpu: Gpu | None = None
    nvml_share: float | None = None
    power_w: float | None = None
    cpu_share: float | None = None
    peak_memory_bytes: int | None = None
    reserved_memory_bytes: int | None = None
    streams: tuple[StreamFigures, ...] = ()
    overlap_share: float | None = None
    losses: tuple[float | None, ...] = ()
    #: The reference's losses that these were compared with, if not those of its own row.
    reference_losses: tuple[float | None, ...] = ()
    equal: Equal = field(default_factory=lambda: Equal("not compared"))
    graphs: dict[str, Any] | None = None
    #: `CompileReport` of a plan that compiles; None for one that does not.
    compiled: dict[str, Any] | None = None
    timeline: TimelineRecord | None = None
    samples: tuple[Sample, ...] = ()
    score: Score | None = None
    notes: tuple[str, ...] = ()

    def is_twin_of(self, other: Row) -> bool:
        """Whether both are the same plan, entered twice."""
        plans = self.kind == other.kind == "plan" and self.fields is not None
        return plans and (self.fields, self.loader) == (other.fields, other.loader)

    @property
    def ran_as_meant(self) -> bool:
        """Whether its step was captured and compiled, as far as its plan asks for that."""
        return self.is_captured is not False and self.is_compiled is not False

    @property
    def is_captured(self) -> bool | None:
        """Whether its step was captured as a graph; None if its plan does not ask for that."""
        if (self.fields or {}).get("graphs", "off") == "off":
            return None
        return self.graphs is not None and self.graphs.get("why") is None

    @property
    def is_compiled(self) -> bool | None:
        """Whether its step was compiled; None if its plan does not ask for that, or the result
        does not say."""
        return None if self.compiled is None else bool(self.compiled.get("compiled"))

    @property
    def agrees(self) -> bool:
        return self.error is None and self.equal.verdict in ("reference", "identical", "within")


@dataclass(frozen=True, slots=True)
class Noise:
    """The same plan entered twice: by how much its two medians differ."""

    plan: str
    difference_share: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """`waits_for` is what the GPU waits for under the reference; `take` is the plan to take, and
    `take_waits_for` what the GPU still waits for most under that one; "unknown" without figures."""

    waits_for: WaitsFor
    take: str | None
    sentences: tuple[str, ...]
    take_waits_for: WaitsFor = "unknown"


@dataclass(frozen=True, slots=True)
class BenchResult:
    """All of it. `missing` says what cannot be seen on this machine."""

    work: WorkRecord
    settings: Settings
    environment: Environment
    rows: tuple[Row, ...]
    noise: Noise | None
    verdict: Verdict
    missing: tuple[str, ...] = ()
    interrupted: bool = False

    def row(self, plan: str) -> Row:
        for row in self.rows:
            if row.plan == plan:
                return row
        raise BenchError(f"no row {plan!r}; there are {listed(row.plan for row in self.rows)}")

    @property
    def failed(self) -> bool:
        """Whether a plan failed, or has other losses than it should have, or some that are not
        finite."""
        return any(
            row.error is not None
            or (row.kind == "plan" and (row.equal.verdict == "unequal" or None in row.losses))
            for row in self.rows
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: no NaN or infinity, which become None."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        for row in plain["rows"]:
            if row["timeline"] is not None:
                row["timeline"] |= pack_spans(row["timeline"]["spans"])
        return {"kind": KIND, "version": VERSION} | plain

    def to_json(self) -> str:
        """One line."""
        return json.dumps(self.to_dict(), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_dict(cls, content: object, *, where: str = "result") -> BenchResult:
        if not isinstance(content, Mapping) or content.get("kind") != KIND:
            raise BenchError(f"{where}: is not a result of `headrace bench` (kind: {KIND!r})")
        if content.get("version") != VERSION:
            found = quoted(content.get("version"))
            raise BenchError(f"{where}: version = {found}: expected {VERSION}")
        return _record(cls, content, where, "")

    @classmethod
    def read(cls, path: str | Path) -> BenchResult:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as problem:
            raise BenchError(f"{path}: cannot be read ({problem.strerror})") from problem
        except UnicodeDecodeError as problem:
            raise BenchError(f"{path}: is not UTF-8 text ({problem.reason})") from problem
        try:
            content = json.loads(text)
        except json.JSONDecodeError as problem:
            raise BenchError(f"{path}:{problem.lineno}: is not JSON ({problem.msg})") from problem
        except RecursionError as problem:
            raise BenchError(f"{path}: is nested too deeply") from problem
        return cls.from_dict(content, where=str(path))

    def write(self, path: str | Path) -> None:
        """Beside `path`, then renamed: a reader never sees half of it."""
        target = Path(path)
        beside = target.with_name(f"{target.name}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(self.to_json() + "\n", encoding="utf-8")
            beside.replace(target)
        except OSError as problem:
            raise BenchError(f"{path}: cannot be written ({problem.strerror})") from problem


# --- plain values to records ----------------------------------------------------------------------

Made = TypeVar("Made")


def _record(kind: type[Made], content: object, where: str, path: str) -> Made:
    """Of a mapping; keys that are not known are left out, since a later version may add some."""
    if not isinstance(content, Mapping):
        raise _wrong(where, path, content, "a mapping")
    if kind is TimelineRecord:
        content = unpack_spans(content)
    hints = typing.get_type_hints(kind)
    given: dict[str, Any] = {}
    for known in dataclasses.fields(kind):  # type: ignore[arg-type]
        inner = f"{path}.{known.name}" if path else known.name
        if known.name in content:
            given[known.name] = _value(hints[known.name], content[known.name], where, inner)
        elif known.default is dataclasses.MISSING and known.default_factory is dataclasses.MISSING:
            raise BenchError(f"{where}: has no {inner!r}")
    return kind(**given)


def _value(hint: Any, value: object, where: str, path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        return _value(next(a for a in arguments if a is not type(None)), value, where, path)
    if dataclasses.is_dataclass(hint):
        return _record(typing.cast("type[Any]", hint), value, where, path)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong(where, path, value, "a list")
        return tuple(
            _value(arguments[0], one, where, f"{path}[{at}]") for at, one in enumerate(value)
        )
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _wrong(where, path, value, "a mapping")
        return {
            str(key): _value(arguments[1], one, where, f"{path}.{key}")
            for key, one in value.items()
        }
    if origin is Literal:
        if value not in arguments:
            raise _wrong(where, path, value, listed(arguments))
        return value
    return _plain_value(hint, value, where, path)


def _plain_value(hint: Any, value: object, where: str, path: str) -> Any:
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(where, path, value, "a number")
        return float(value)
    if hint is int and (isinstance(value, bool) or not isinstance(value, int)):
        raise _wrong(where, path, value, "a whole number")
    if hint is bool and not isinstance(value, bool):
        raise _wrong(where, path, value, "true or false")
    if hint is str and not isinstance(value, str):
        raise _wrong(where, path, value, "text")
    return value


def _wrong(where: str, path: str, value: object, expected: str) -> BenchError:
    found = quoted(value)
    short = found if len(found) <= 60 else f"{found[:57]}…"
    return BenchError(f"{where}: {path or 'result'} = {short}: expected {expected}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
