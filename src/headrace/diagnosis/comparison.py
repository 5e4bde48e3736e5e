"""Two stored diagnoses of the same training: what changed, by part of a step and by line."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headrace.diagnosis.script import Limit, parse_conditions
from headrace.errors import ProgramError, ReportError
from headrace.records import (
    DiagnosedLine,
    DiagnosisComparison,
    DiagnosisResult,
    LineChange,
    PartChange,
    PythonLine,
    TimeParts,
)
from headrace.text_table import text_table

_MAX_LINES = 10
#: What may differ between two results and change their times.
_CONDITIONS = ("device_name", "torch", "python", "cpu", "driver")
#: A smaller change of the waits per step is one of how many steps were watched.
_WAITS = 0.05


def compare_files(before: str, after: str) -> DiagnosisComparison:
    return compare(_read(before), _read(after), before, after)


def _read(path: str) -> DiagnosisResult:
    try:
        return DiagnosisResult.read(path)
    except ReportError as problem:
        raise ProgramError(
            f"{problem}. --compare expects two results of headrace diagnose, which --out stores"
        ) from problem


def compare(
    before: DiagnosisResult, after: DiagnosisResult, from_file: str = "", to_file: str = ""
) -> DiagnosisComparison:
    """What changed between two results."""
    slower = noise = None
    if before.step_ms and after.step_ms:
        slower = after.step_ms / before.step_ms - 1
        if before.noise_ms is not None and after.noise_ms is not None:
            noise = math.hypot(before.noise_ms, after.noise_ms) / before.step_ms
    parts: tuple[PartChange, ...] = ()
    if before.parts is not None and after.parts is not None:
        parts = tuple(
            PartChange(name, getattr(before.parts, name), getattr(after.parts, name))
            for name in TimeParts.__slots__
        )
    lines = tuple(_lines(before, after, (noise or 0.0) * (before.step_ms or 0.0)))
    return DiagnosisComparison(
        before=from_file,
        after=to_file,
        verdict=tuple(_verdict(before, after, slower, noise, parts)),
        before_ms=before.step_ms,
        after_ms=after.step_ms,
        slower=slower,
        noise=noise,
        parts=parts,
        lines=lines,
        notes=tuple(_notes(before, after, slower, noise)),
    )


def _verdict(
    before: DiagnosisResult,
    after: DiagnosisResult,
    slower: float | None,
    noise: float | None,
    parts: Sequence[PartChange],
) -> Iterator[str]:
    if slower is None:
        yield "There are no times in both results, so only waits are compared."
        if before.waits_per_step is not None and after.waits_per_step is not None:
            yield (
                f"The host waits {after.waits_per_step:.1f} times a step, before "
                f"{before.waits_per_step:.1f} times."
            )
        return
    times = f"A step takes {after.step_ms:.2f} ms, before {before.step_ms:.2f} ms"
    within = "" if noise is None else f" ±{noise:.1%}"
    if noise is not None and abs(slower) <= noise:
        yield f"{times}: the difference of {abs(slower):.1%} is within the noise (±{noise:.1%})."
        return
    yield f"{times}: {abs(slower):.1%}{within} {'slower' if slower > 0 else 'faster'}."
    if parts:
        most = max(parts, key=lambda part: part.ms if slower > 0 else -part.ms)
        name, more = most.name.replace("_", " "), "more" if slower > 0 else "less"
        yield f"The largest part of it is {name}: {abs(most.ms):.2f} ms {more}."


def _notes(
    before: DiagnosisResult, after: DiagnosisResult, slower: float | None, noise: float | None
) -> Iterator[str]:
    for name in _CONDITIONS:
        was, now = getattr(before.environment, name), getattr(after.environment, name)
        if was and now and was != now:
            what = name.replace("_", " ")
            yield f"{what} was {was}, and is {now}: not only the script has changed"
    if slower is not None and noise is None:
        yield "the noise is not known: there are too few clean steps in one of the results"


Line = tuple[str, str, str]


@dataclass(slots=True)
class _Sum:
    """What the lines with the same code cost together: numbers of lines shift with every edit."""

    line: int = 0
    waits: float | None = None
    idle_ms: float | None = None


def _lines(
    before: DiagnosisResult, after: DiagnosisResult, noise_ms: float
) -> Iterator[LineChange]:
    """The lines that changed, those with the most idle time first."""
    was, now = _by_code(before), _by_code(after)
    found = []
    for key in dict.fromkeys([*now, *was]):
        old, new = was.get(key), now.get(key)
        change = LineChange(
            key[0],
            new.line if new is not None else old.line if old is not None else 0,
            key[1],
            old.waits if old is not None else None,
            new.waits if new is not None else None,
            old.idle_ms if old is not None else None,
            new.idle_ms if new is not None else None,
        )
        waits = abs((change.waits_after or 0.0) - (change.waits_before or 0.0))
        if waits > _WAITS or abs(change.ms) > max(noise_ms, 0.005):
            found.append(change)
    yield from sorted(found, key=lambda one: -abs(one.ms))


def _by_code(result: DiagnosisResult) -> dict[Line, _Sum]:
    sums: defaultdict[Line, _Sum] = defaultdict(_Sum)
    lines: tuple[DiagnosedLine | PythonLine, ...] = (*result.lines, *result.python_lines)
    for one in lines:
        at = one.called_from or one.line
        title = one.title if isinstance(one, DiagnosedLine) else "Python"
        text = at.text if at is not None and at.text else title
        file = at.file if at is not None else "unknown"
        known = sums[file, text, title]
        known.line = at.line if at is not None else 0
        if isinstance(one, DiagnosedLine):
            known.waits = (known.waits or 0.0) + one.per_step
        if one.idle_ms is not None:
            known.idle_ms = (known.idle_ms or 0.0) + one.idle_ms
    return sums


# --- as text, and for CI --------------------------------------------------------------------------


def comparison_text(found: DiagnosisComparison) -> str:
    """The whole screen."""
    texts = ["\n".join(found.verdict)]
    if found.parts:
        rows = [
            (part.name.replace("_", " "), *_figures(part.before_ms, part.after_ms, part.ms))
            for part in found.parts
            if max(part.before_ms, part.after_ms) >= 0.005
        ]
        figures = ("before ms", "after ms", "change")
        texts.append(text_table(("part of a step", *figures), rows, right=figures).rstrip())
    if found.lines:
        columns = (
            "line",
            "code",
            "waits before",
            "waits after",
            "idle before",
            "idle after",
            "change ms",
        )
        shown = [
            (
                f"{one.file}:{one.line}" if one.line else one.file,
                one.code if len(one.code) <= 40 else f"{one.code[:39]}…",
                _number(one.waits_before),
                _number(one.waits_after),
                *_figures(one.idle_before_ms, one.idle_after_ms, one.ms),
            )
            for one in found.lines[:_MAX_LINES]
        ]
        table = text_table(columns, shown, right=columns[2:]).rstrip()
        more = len(found.lines) - _MAX_LINES
        texts.append(table if more <= 0 else f"{table}\n  and {more} more; --json has all")
    elif found.parts:
        texts.append("No line has changed by more than the noise.")
    if found.notes:
        texts.append("\n".join(f"  - {note}" for note in found.notes))
    return "\n\n".join(texts)


def _figures(before: float | None, after: float | None, change: float) -> tuple[str, str, str]:
    return _number(before), _number(after), f"{change:+.2f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def parse_change_limits(text: str) -> list[Limit]:
    """The conditions of `--fail-on` for a comparison."""
    return parse_conditions(text, (), ("slower",), "slower>3%")


def exit_code_of_change(
    found: DiagnosisComparison, limits: Sequence[Limit], tell: Callable[[str], object]
) -> int:
    """3 if a limit is exceeded by more than noise, or not known; else 0. `tell` is called with a
    sentence for each such limit."""
    code = 0
    slower = None if found.slower is None else round(100 * found.slower, 6)  # 0.1 is not exact
    for limit in limits:
        if slower is None:
            tell(f"--fail-on: {limit.name} is not known: there are no times in both results")
            code = 3
        elif limit.is_exceeded_by(slower):
            is_noise = found.is_noise
            ending = (
                f": within the noise (±{found.noise:.1%}), so it does not count" if is_noise else ""
            )
            tell(f"--fail-on: {limit.describe(slower)}{ending}")
            code = code if is_noise else 3
    return code
