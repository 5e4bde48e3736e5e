"""Formats a result for the terminal: a table at most 120 columns wide, then the verdict."""

from __future__ import annotations

from headrace.records import BenchResult, PlanResult
from headrace.text_table import text_table, wrap_line

#: The arithmetic of a plan that names no precision.
DEFAULT_PRECISION = "float32 as PyTorch is set"
_NONE = "–"
#: Verdicts on losses that need a reason, in words.
_VERDICTS = {"within": "within the tolerance", "not compared": "not compared"}


def text_of(result: BenchResult) -> str:
    """The result as text. Rounds, timelines and samples are only in the file."""
    parts = [_head(result), _table(result)]
    parts += [part for part in (_passes(result), _waits(result), _streams(result)) if part]
    parts.append("\n".join(_remarks(result)))
    parts.append("\n".join(wrap_line(line) for line in result.verdict.sentences))
    return "\n\n".join(part for part in parts if part)


def _head(result: BenchResult) -> str:
    work, settings, where = result.work, result.settings, result.environment
    return wrap_line(
        f"{work.description}{_precision(result)}: {settings.repeats} × {settings.steps} steps on "
        f"{where.device_name} ({where.device}), PyTorch {where.torch}"
    )


def _precision(result: BenchResult) -> str:
    """The precision, if all plans have the same."""
    found = {row.fields.get("precision") for row in result.rows if row.fields is not None}
    if result.settings.precision is not None:
        found = {result.settings.precision}
    if len(found) != 1:
        return ""
    (precision,), switches = found, result.environment.float32_switches
    if precision is not None:
        return f", {precision}"
    return "" if switches is None else f", {DEFAULT_PRECISION} ({switches})"


def _table(result: BenchResult) -> str:
    seen = [row for row in result.rows if row.ms_per_step is not None]
    gpu = any(row.gpu for row in seen)
    nvml = any(row.nvml_share is not None for row in seen)
    memory = any(row.peak_memory_bytes for row in seen)
    columns = ["ms/step", "±%", "×", f"{result.work.unit}/s", "waits", "host", "data"]
    columns += ["GPU%", "over%"] * gpu + ["NVML%"] * nvml + ["cores"] + ["peak"] * memory + ["pts"]
    rows = []
    for row in seen:
        cells = [*_speed(row), *_waited(row)]
        if gpu:
            cells.append(_percent(row.gpu.busy_share if row.gpu else None))
            cells.append(_percent(row.gpu.over_busy_share if row.gpu else None))
        if nvml:
            cells.append(_percent(row.nvml_share))
        cells.append(_number(row.cpu_share, 1))
        if memory:
            cells.append(_bytes(row.peak_memory_bytes))
        cells.append(_number(row.score.total if row.score else None, 0))
        rows.append((_name(row), *cells, losses_of(row)))
    return text_table(("", *columns, "losses"), rows, right=columns, dense=True) if rows else ""


def _name(row: PlanResult) -> str:
    """The plan's name and, if its step was not captured or compiled, that; a remark says why."""
    if row.is_captured is False:
        return f"{row.plan}, {'no graph' if row.is_compiled else 'eager'}"
    return f"{row.plan}, uncompiled" if row.is_compiled is False else row.plan


def _speed(row: PlanResult) -> list[str]:
    spread = row.ms_per_step
    assert spread is not None
    half = (spread.high - spread.low) / 2 / spread.median if spread.median else 0.0
    times = f"{spread.median:#.3g}".rstrip(".") if spread.median < 100 else f"{spread.median:.0f}"
    return [times, f"{half * 100:.1f}", _number(row.speedup, 2), _short(row.per_s)]


def _waited(row: PlanResult) -> list[str]:
    return [
        _number(None if row.waits is None else row.waits.per_step, 2),
        _number(row.host_blocked_ms, 2),
        _number(row.data_wait_ms, 2),
    ]


def losses_of(row: PlanResult) -> str:
    """How the losses compare with the reference's, in a word."""
    equal = row.equal
    if equal.verdict == "unequal":
        return f"UNEQUAL at {equal.first_step}"
    if equal.verdict == "within":
        return f"within {equal.largest:.0e}"
    return equal.verdict


def _passes(result: BenchResult) -> str:
    costs = [f"{row.plan} {row.pass_ms:.2g} ms" for row in result.rows if row.pass_ms is not None]
    return wrap_line(f"to begin and end an epoch: {', '.join(costs)}", "  ") if costs else ""


def _waits(result: BenchResult) -> str:
    lines = []
    for row in result.rows:
        if row.waits is not None and row.waits.by_reason:
            waits = [
                f"{reason} {figures.per_step:.2g} × ({figures.ms_per_step:.2g} ms)"
                for reason, figures in row.waits.by_reason.items()
            ]
            lines.append((row.plan, ", ".join(waits[:4])))
    return text_table(("", "host waits per step"), lines) if lines else ""


def _streams(result: BenchResult) -> str:
    lines = []
    for row in result.rows:
        if row.streams:
            used = ", ".join(f"{s.name} {s.busy_share:.0%}" for s in row.streams[:6])
            lines.append((row.plan, f"{_percent(row.overlap_share, 1)}%", used))
    if not lines:
        return ""
    return text_table(("", "two at once", "streams in use"), lines, right=["two at once"])


def _remarks(result: BenchResult) -> list[str]:
    remarks = [f"{row.plan} failed: {row.error}" for row in result.rows if row.error is not None]
    remarks += [f"{row.plan}: {note}" for row in result.rows for note in row.notes]
    remarks += [
        f"{row.plan}: losses {_VERDICTS[row.equal.verdict]} ({row.equal.why})"
        for row in result.rows
        if row.equal.why and row.error is None and row.equal.verdict in _VERDICTS
    ]
    remarks += [f"not measured here: {what}" for what in result.missing]
    if result.interrupted:
        remarks.append("interrupted: these are the results so far")
    return [wrap_line(line, "  ") for line in remarks]


def _number(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:,.{digits}f}"


def _percent(share: float | None, digits: int = 0) -> str:
    return _NONE if share is None else f"{share * 100:.{digits}f}"


def _short(rate: float | None) -> str:
    if rate is None:
        return _NONE
    for limit, scale, unit in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if rate >= limit:
            return f"{rate / scale:#.4g}".rstrip(".") + unit
    return f"{rate:,.0f}"


def _bytes(count: int | None) -> str:
    if not count:
        return _NONE
    return f"{count / (1 << 30):.2f}G" if count >= 1 << 30 else f"{count / (1 << 20):.0f}M"
