"""The values of a diagnosis's page, `templates/diagnosis.html`."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup, escape

from headrace.records import DiagnosedLine, DiagnosisResult, PythonLine, TimeParts
from headrace.report.charts import Bar, BarChart, Cell, Cells, Segment, figure, table
from headrace.report.diagnosis_tables import (
    has_times,
    line_table,
    place_of,
    prediction_table,
    python_table,
    rank_table,
    shown_line,
)
from headrace.report.environment import environment_view
from headrace.report.figures import brief, moment, ms, share, words
from headrace.report.page import Stat, Summary, render_page
from headrace.report.timelines import timeline_group

#: The fill of each part of a step.
_LOOKS = {
    "computing": "compute",
    "transfer": "copy",
    "synchronization": "wait",
    "host": "host",
    "input": "reason-3",
    "launch": "reason-5",
    "other_ranks": "reason-4",
    "unattributed": "idle",
}


def diagnosis_page(result: DiagnosisResult, source: str) -> str:
    """The page of a diagnosis."""
    timeline = result.timeline
    has_timeline = timeline is not None and bool(timeline.spans)
    environment = result.environment
    device = environment.device_name or environment.device
    shown = ("diagnosis", Path(result.program).name, device, moment(environment.date))
    values = {
        "source": source,
        "kicker": " · ".join(filter(None, shown)),
        "summary": _summary(result),
        "parts": _parts(result),
        "fills": [(look, words(name)) for name, look in _LOOKS.items()],
        "ranks": rank_table(result),
        "lines": [_line(one) for one in result.lines],
        "line_table": line_table(result),
        "has_times": has_times(result),
        "python_lines": [_python_line(one) for one in result.python_lines],
        "python_table": python_table(result),
        "predictions": prediction_table(result),
        "timeline_group": timeline_group([("steps", timeline)])
        if has_timeline and timeline is not None
        else None,
        "is_fake": result.races is not None,
        "was_watched": result.waits_per_step is not None,
        "remarks": [*result.notes, *result.missing],
        "environment": environment_view(environment, _settings(result)),
    }
    return render_page("diagnosis.html", values, has_timelines=has_timeline)


def _summary(result: DiagnosisResult) -> Summary:
    headline = result.verdict[0] if result.verdict else "Nothing could be measured"
    sentences = result.verdict[1:]
    stats = []
    if result.parts is not None and result.parts.total:
        computing = share(result.parts.computing / result.parts.total)
        headline, sentences = f"The GPU computes {computing} of the time", result.verdict
        stats.append(Stat("GPU computing", computing))
    if result.waits_per_step is not None:
        stats.append(Stat("Host waits per step", f"{result.waits_per_step:.1f}"))
    if result.launches_per_step is not None:
        stats.append(Stat("Launches per step", f"{result.launches_per_step:,.0f}"))
    if result.races is not None:
        stats.append(Stat("Stream races", f"{result.races}"))
    if result.step_ms is not None:
        return Summary(headline, ms(result.step_ms), "per step", sentences, stats)
    waits = "–" if result.waits_per_step is None else f"{result.waits_per_step:.1f}"
    return Summary(headline, waits, "waits per step", sentences, stats)


def _parts(result: DiagnosisResult) -> dict[str, object] | None:
    parts = result.parts
    if parts is None or result.step_ms is None:
        return None
    names = TimeParts.__slots__
    whole = Bar(
        label=Cell("a step"),
        segments=[Segment(getattr(parts, name), _LOOKS[name]) for name in names],
        value=ms(parts.total),
        tip="\n".join(f"{words(name)}: {ms(getattr(parts, name))}" for name in names),
    )
    bars = [
        Bar(
            label=Cell(words(name)),
            segments=[Segment(getattr(parts, name), _LOOKS[name])],
            value=ms(getattr(parts, name)),
            note=share(getattr(parts, name) / parts.total if parts.total else 0.0),
            tip=f"{words(name)}: {ms(getattr(parts, name))}",
        )
        for name in names
    ]
    rows: list[Cells] = [
        [words(name), figure(getattr(parts, name)), _share(parts, name)] for name in names
    ]
    return {
        "bars": BarChart("Milliseconds of a step", [whole, *bars], parts.total, "ms"),
        "table": table("Parts of a step", ("part", "ms", "share"), rows),
    }


def _share(parts: TimeParts, name: str) -> Cell:
    value = getattr(parts, name) / parts.total if parts.total else 0.0
    return Cell(share(value), value)


def _line(one: DiagnosedLine) -> dict[str, object]:
    return {
        **_place_and_code(one),
        "title": one.title,
        "advice": _with_code(one.advice),
        "per_step": brief(one.per_step),
        "gain": None if one.gain_ms is None else ms(one.gain_ms),
    }


def _python_line(one: PythonLine) -> dict[str, object]:
    return {
        **_place_and_code(one),
        "per_step": ms(one.ms),
        "gain": None if one.gain_ms is None else ms(one.gain_ms),
    }


def _place_and_code(one: DiagnosedLine | PythonLine) -> dict[str, object]:
    """Where a line is, and the user's code. A line of a library has its text, too."""
    line = shown_line(one)
    is_library = one.called_from is not None and one.called_from is not line
    return {
        "where": place_of(line),
        "function": line.function if line is not None else "",
        "text": line.text if is_library and line is not None else "",
        "called_from": place_of(one.called_from) if is_library else None,
        "code": _code(one),
    }


def _with_code(text: str) -> Markup:
    """A sentence in which code stands between backticks."""
    parts = [escape(part) for part in text.split("`")]
    shown = [
        Markup("<code>{}</code>").format(part) if at % 2 else part for at, part in enumerate(parts)
    ]
    return Markup("").join(shown)


def _code(one: DiagnosedLine | PythonLine) -> list[tuple[int, str, bool]]:
    """The excerpt as (number, text, whether it is the line itself); without one, only the line."""
    line = one.called_from or one.line
    if line is None or not line.text:
        return []
    if one.excerpt is None:
        return [(line.line, line.text, True)]
    numbered = enumerate(one.excerpt.lines, one.excerpt.first)
    return [(number, text, number == line.line) for number, text in numbered]


def _settings(result: DiagnosisResult) -> dict[str, object]:
    measured = {
        "step, clean": result.step_ms,
        "step, profiled": result.profiled_ms,
        "step, lines watched": result.watched_ms,
        "a batch, from the loader on its own": result.loader_ms,
    }
    settings: dict[str, object] = {
        "steps": result.steps,
        "optimizer calls per step": result.calls_per_step,
        "backward passes per step": result.backwards_per_step,
        **{name: ms(value) for name, value in measured.items() if value is not None},
    }
    if result.replay_error is not None:
        settings["replay error"] = share(result.replay_error)
    return settings
