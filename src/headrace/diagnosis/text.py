"""A diagnosis as a terminal shows it: verdict, bar, the worst ten lines, and what would help."""

from __future__ import annotations

import shlex
import textwrap
from pathlib import Path

from headrace.diagnosis.trace_file import is_trace
from headrace.records import DiagnosedLine, DiagnosisResult, LineRecord, PythonLine
from headrace.source_lines import short_path
from headrace.text_table import text_table

_MAX_LINES = 10
_MAX_PYTHON_LINES = 5
_MAX_RANKS = 64
_MAX_PLACE = 40
_MIN_CODE = 40
#: The width of a column of figures, and of the space around a column.
_FIGURE, _MARGIN = 13, 3
_BAR = 60
#: A speed-up from which on `headrace run` is worth a line.
_PAYS = 1.05
_WIDTH = 110
#: The fill of each part in the bar.
_FILLS = {
    "computing": "█",
    "input": "i",
    "transfer": "t",
    "synchronization": "s",
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
    if len(result.ranks) > 1:
        parts.append(_ranks(result))
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
    if (command := _run_command(result)) is not None:
        parts.append(f"To run it sped up, unchanged: {command}")
    return "\n\n".join(parts)


def _run_command(result: DiagnosisResult) -> str | None:
    """The command that runs the script sped up, if that is predicted to pay."""
    pays = any(
        one.change == "with headrace run" and one.speedup >= _PAYS for one in result.predictions
    )
    try:
        words = shlex.split(result.environment.command)
    except ValueError:  # not written by this command
        return None
    if not pays or result.program not in words or is_trace(result.program):
        return None
    at = words.index(result.program)
    module = ["-m"] if words[at - 1] == "-m" else []
    return shlex.join(["headrace", "run", *module, *words[at:]])


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
    if result.loader_ms is not None:
        text += f" On its own, the loader delivers a batch every {result.loader_ms:.1f} ms."
    if result.profiled_ms is not None and result.watched_ms is not None:
        text += (
            f" A step took {result.profiled_ms:.1f} ms under the profiler and "
            f"{result.watched_ms:.1f} ms while its waits were noted."
        )
    return textwrap.fill(text.strip(), _WIDTH)


def _ranks(result: DiagnosisResult) -> str:
    columns = ("rank", "host", "step ms", "computing ms", "waits for others ms")
    rows = [
        [
            "–" if one.rank is None else one.rank,
            one.host,
            *(_number(value) for value in (one.step_ms, one.computing_ms, one.waits_ms)),
        ]
        for one in result.ranks[:_MAX_RANKS]
    ]
    shown = text_table(columns, rows, right=columns[2:]).rstrip()
    more = len(result.ranks) - _MAX_RANKS
    return f"{shown}\n  and {more} more ranks" if more > 0 else shown


def _lines(result: DiagnosisResult) -> str:
    has_times = any(one.blocked_ms is not None for one in result.lines)
    columns = ["line", "code", "waits/step"]
    if has_times:
        columns += ["blocked ms", "idle ms", "gain ms"]
    rows = []
    shown_lines = result.lines[:_MAX_LINES]
    places = [_where(one) for one in shown_lines]
    width = _code_width(places, len(columns) - 2)
    for one, place in zip(shown_lines, places, strict=True):
        code = next((line.text for line in (one.line, one.called_from) if line and line.text), "")
        code = code or one.title
        form = f"{one.title}: " if one.line is not None and places.count(place) > 1 else ""
        token = one.title.split("(")[0] + "("  # `.item(` of `.item()`
        code = form + _shortened(code, max(_MIN_CODE, width - len(form)), token)
        row: list[object] = [place, code, _number(one.per_step)]
        if has_times:
            row += [_number(value) for value in (one.blocked_ms, one.idle_ms, one.gain_ms)]
        rows.append(row)
    more = len(result.lines) - _MAX_LINES
    shown = [text_table(columns, rows, right=columns[2:]).rstrip()]
    if more > 0:
        where = "--html shows all" if result.program else "diagnosis.result.lines has all"
        shown.append(f"  and {more} more; {where}")
    titles: dict[str, list[str]] = {}
    for one in shown_lines:
        found = titles.setdefault(one.advice, [])
        if one.title not in found:
            found.append(one.title)
    advice = [f"{'; '.join(found)}: {text}" for text, found in titles.items()]
    return "\n".join([*shown, "", "What to write instead:", *map(_indented, advice)])


def _python_lines(result: DiagnosisResult) -> str:
    columns = ("line of Python between launches", "code", "ms", "idle ms", "gain ms")
    shown = result.python_lines[:_MAX_PYTHON_LINES]
    width = _code_width([columns[0], *map(_where, shown)], len(columns) - 2)
    rows = [
        [
            _where(one),
            _shortened(one.line.text, width),
            *(_number(value) for value in (one.ms, one.idle_ms, one.gain_ms)),
        ]
        for one in shown
    ]
    advice = (
        "Do it every 50 steps, in the loader's processes, or in a thread while the GPU computes."
    )
    return "\n".join([text_table(columns, rows, right=columns[2:]).rstrip(), "", _indented(advice)])


def _code_width(places: list[str], figures: int) -> int:
    """How many characters of code fit between the places and so many columns of figures."""
    return max(_MIN_CODE, _WIDTH - max(map(len, places)) - figures * _FIGURE - 2 * _MARGIN)


def _indented(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _predictions(result: DiagnosisResult) -> str:
    rows = [
        (one.change, f"{one.step_ms:.1f}", f"{one.speedup:.2f}×")
        for one in result.predictions
        if one.speedup >= 1.005 or "plan" in one.change
    ]
    table = text_table(("what if", "ms/step", "times as fast"), rows, right=("ms/step",)).rstrip()
    plans = _indented("The plans are those of Headrace: `headrace bench` measures them.")
    return f"{table}\n\n{plans}"


def _where(one: DiagnosedLine | PythonLine) -> str:
    if one.line is None:
        return "unknown"
    if one.called_from is None:
        return _place(one.line)
    if one.line.file.startswith("<"):  # generated code, which nobody can look up
        return _place(one.called_from)
    return f"{_place(one.called_from)} → {Path(one.line.file).name}:{one.line.line}"


def _place(line: LineRecord) -> str:
    """The end of a long path says more than its start."""
    text = f"{short_path(line.file)}:{line.line}"
    return text if len(text) <= _MAX_PLACE else f"…{text[1 - _MAX_PLACE :]}"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"


def _shortened(text: str, limit: int, token: str = "") -> str:
    """At most `limit` characters, with `token` among them if the text has it."""
    if len(text) <= limit:
        return text
    end = text.find(token) + len(token) + 1
    if not token or end <= limit - 1:
        return f"{text[: limit - 1]}…"
    start = min(end - limit // 2, len(text) - limit + 1)
    if len(text) - start <= limit - 1:
        return f"…{text[start:]}"
    return f"…{text[start : start + limit - 2]}…"
