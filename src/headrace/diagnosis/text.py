"""A diagnosis as a terminal shows it: verdict, bar, the worst ten lines, and what would help."""

from __future__ import annotations

import textwrap
from pathlib import Path

from headrace.runs.records import DiagnosedLine, DiagnosisResult, LineRecord, PythonLine
from headrace.source_lines import short_path
from headrace.text_table import text_table

_MAX_LINES = 10
_MAX_PYTHON_LINES = 5
_MAX_PLACE = 40
_BAR = 60
_WIDTH = 110
#: The fill of each part in the bar.
_FILLS = {
    "computing": "█",
    "input": "i",
    "transfer": "t",
    "synchronisation": "s",
    "launch": "l",
    "host": "h",
    "other_ranks": "r",
    "unattributed": "?",
}


def text_of(result: DiagnosisResult) -> str:
    """The whole screen."""
    parts = ["\n".join(textwrap.fill(text, _WIDTH) for text in result.verdict if text)]
    if result.parts is not None and result.step_ms:
        parts.append(_bar(result))
    facts = _facts(result)
    if facts:
        parts.append(facts)
    if result.lines:
        parts.append(_lines(result))
    if result.python_lines:
        parts.append(_python_lines(result))
    if result.predictions:
        parts.append(_predictions(result))
    if result.notes or result.missing:
        parts.append("\n".join(_indented(f"- {text}") for text in (*result.notes, *result.missing)))
    return "\n\n".join(parts)


def _bar(result: DiagnosisResult) -> str:
    assert result.parts is not None
    assert result.step_ms is not None
    shares = {name: getattr(result.parts, name) / result.step_ms for name in _FILLS}
    bar, edge, filled = "", 0.0, 0
    for name, share in shares.items():
        edge += share * _BAR
        bar += _FILLS[name] * (round(edge) - filled)
        filled = round(edge)
    shown = [
        f"{_FILLS[name]} {name.replace('_', ' ')} {share * result.step_ms:.1f} ms ({share:.0%})"
        for name, share in shares.items()
        if name == "computing" or share >= 0.005
    ]
    return "\n".join([f"[{bar}]", *textwrap.wrap("   ".join(shown), _WIDTH)])


def _facts(result: DiagnosisResult) -> str:
    """How many launches and passes a step has, and what it took in the other two windows."""
    facts = []
    if result.backwards_per_step is not None and result.backwards_per_step > 1:
        facts.append(f"{result.backwards_per_step:g} backward passes")
    if result.calls_per_step > 1:
        facts.append(f"{result.calls_per_step} optimizer steps or graph replays")
    if result.launches_per_step is not None:
        facts.append(f"{result.launches_per_step:,.0f} launches")
    text = f"A step has {', '.join(facts)}." if facts else ""
    if result.nvml_share is not None:
        text += f" NVML calls the GPU {result.nvml_share:.0%} busy."
    if result.profiled_ms is not None and result.watched_ms is not None:
        text += (
            f" It took {result.profiled_ms:.1f} ms under the profiler and {result.watched_ms:.1f} "
            "ms while its waits were noted."
        )
    return textwrap.fill(text.strip(), _WIDTH)


def _lines(result: DiagnosisResult) -> str:
    has_times = any(one.blocked_ms is not None for one in result.lines)
    columns = ["line", "code", "waits/step"]
    if has_times:
        columns += ["blocked ms", "idle ms", "gain ms"]
    rows = []
    for one in result.lines[:_MAX_LINES]:
        code = one.line.text if one.line is not None and one.line.text else one.title
        row: list[object] = [_where(one), _shortened(code, 40), _number(one.per_step)]
        if has_times:
            row += [_number(value) for value in (one.blocked_ms, one.idle_ms, one.gain_ms)]
        rows.append(row)
    more = len(result.lines) - _MAX_LINES
    shown = [text_table(columns, rows, right=columns[2:]).rstrip()]
    if more > 0:
        shown.append(f"  and {more} more")
    advice = dict.fromkeys(f"{one.title}: {one.advice}" for one in result.lines[:_MAX_LINES])
    return "\n".join([*shown, "", "Instead:", *map(_indented, advice)])


def _python_lines(result: DiagnosisResult) -> str:
    columns = ("line of Python between launches", "code", "ms", "idle ms", "gain ms")
    rows = [
        [
            _where(one),
            _shortened(one.line.text, 40),
            *(_number(value) for value in (one.ms, one.idle_ms, one.gain_ms)),
        ]
        for one in result.python_lines[:_MAX_PYTHON_LINES]
    ]
    advice = (
        "Do it every 50 steps, in the loader's processes, or in a thread while the GPU computes."
    )
    return "\n".join([text_table(columns, rows, right=columns[2:]).rstrip(), "", _indented(advice)])


def _indented(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _predictions(result: DiagnosisResult) -> str:
    rows = [
        (one.change, f"{one.step_ms:.1f}", f"{one.speedup:.2f}×")
        for one in result.predictions
        if one.speedup >= 1.005 or "plan" in one.change
    ]
    return text_table(("what if", "ms/step", "times as fast"), rows, right=("ms/step",)).rstrip()


def _where(one: DiagnosedLine | PythonLine) -> str:
    if one.line is None:
        return "unknown"
    if one.called_from is None:
        return _place(one.line)
    return f"{_place(one.called_from)} → {Path(one.line.file).name}:{one.line.line}"


def _place(line: LineRecord) -> str:
    """The end of a long path says more than its start."""
    text = f"{short_path(line.file)}:{line.line}"
    return text if len(text) <= _MAX_PLACE else f"…{text[1 - _MAX_PLACE :]}"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
