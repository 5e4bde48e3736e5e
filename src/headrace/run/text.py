"""The end of a run as a terminal shows it: a table of the parts, and the step before and after."""

from __future__ import annotations

import textwrap
from pathlib import Path

from headrace.records import RunPart, RunResult
from headrace.text_table import counted, text_table

_COLUMNS = ("part", "line", "replays", "eager", "memory", "equal")


def table_of(result: RunResult) -> str:
    """The closing table, or one sentence if there was nothing to speed up."""
    if not result.parts:
        return _nothing(result)
    has_checks = any(part.check is not None for part in result.parts)
    columns = _COLUMNS if has_checks else _COLUMNS[:-1]
    # A copy of an optimizer that steps once is a part, too.
    used = [part for part in result.parts if part.replays or part.eager or part.why is not None]
    rows = [_row(part)[: len(columns)] for part in used]
    lines = [text_table(columns, rows, right=("replays", "eager", "memory"))]
    for part in result.parts:
        if part.rounding:
            name = "" if part.rounding.startswith(part.name) else f"{part.name}: "
            lines += textwrap.wrap(name + part.rounding, 110, subsequent_indent="  ")
    lines += [*result.decisions, _step(result)]
    if result.races:
        lines.append(f"{counted(result.races, 'stream race')}: `headrace races` shows them")
    return "\n".join(lines)


def _nothing(result: RunResult) -> str:
    name = Path(result.program).name
    if result.steps:
        return f"headrace run: {name} trained, and nothing in it can be sped up"
    if result.cpu_steps:
        return f"headrace run: {name} trained on the CPU, where there is nothing to speed up"
    return (
        f"headrace run: {name} ran as with python: it trained no model on a GPU. Without one, "
        "--fake shows what can be captured"
    )


def _row(part: RunPart) -> tuple[str, ...]:
    return (
        part.name,
        f"{part.line.file}:{part.line.line}" if part.line.file else "",
        f"{part.replays:,}",
        f"{sum(part.eager.values()):,}",
        f"{part.memory_bytes / 1e6:,.0f} MB" if part.captures else "",
        _check(part),
    )


def _check(part: RunPart) -> str:
    check = part.check
    if part.kind == "data":
        return ""
    if check is None or not check.replays:
        return "not captured" if not part.replays else "not checked"
    if not check.worst:
        return "bit for bit"
    return f"within {check.worst:.1g}" if check.is_equal else f"no: {check.where}"


def _step(result: RunResult) -> str:
    if result.races is not None:
        return f"{counted(result.steps, 'step')} on the fake device; times and memory need a GPU"
    before, after = result.before_ms, result.after_ms
    peak = f"; at most {result.peak_bytes / 1e9:.2f} GB were allocated" if result.peak_bytes else ""
    if before is None or after is None or not after:
        return f"{counted(result.steps, 'step')}, too few to time them before and after{peak}"
    return f"a step took {before:.2f} ms before, {after:.2f} ms after ({before / after:.2f}×){peak}"
