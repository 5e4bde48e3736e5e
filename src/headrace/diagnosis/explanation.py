"""From what the windows saw to a result: parts of a step, lines with their gains, and a verdict."""

from __future__ import annotations

import linecache
import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from headrace.device import Kind, Span
from headrace.diagnosis.breakdown import CAUSES, Breakdown, Idle, breakdown, idle_times
from headrace.diagnosis.loaders import LoaderFacts
from headrace.diagnosis.ranks import figures_of
from headrace.diagnosis.session import Measurements, Observations
from headrace.diagnosis.trace import StepTrace, host_segments
from headrace.diagnosis.verdict import SMALL, more_steps, step_line_option, verdict_of
from headrace.diagnosis.waits import Wait
from headrace.diagnosis.what_if import (
    GRAPH,
    INSTANT_LOADER,
    MAX_ERROR,
    NO_PYTHON,
    NO_WAITS,
    PIPELINE,
    RUN,
    Change,
    Replay,
)
from headrace.records import (
    DiagnosedLine,
    DiagnosisResult,
    Environment,
    Excerpt,
    LineRecord,
    Outcome,
    Prediction,
    PythonLine,
    StoredTimeline,
    TimeParts,
)
from headrace.source_lines import short_path

#: What a line is: its place, the user's line that led there, and the form of the wait.
LineKey = tuple[LineRecord | None, LineRecord | None, str]

_WORKERS = 4
_MAX_SPANS = 20_000
#: How many lines get a replay of their own.
_MAX_PREDICTED = 12
#: The share of the idle time that samples of Python must cover.
_MIN_SAMPLED = 0.5
#: Lines of code before and after one in an excerpt.
_AROUND = 3
#: A step that takes so many times the median is told, if there are enough steps for a median. From
#: fewer, the noise is not known either.
_UNEVEN, _EVEN_STEPS = 5.0, 5
#: A line to which the script came so often before its waits were looked for is told, if it did not
#: wait later; and so many of these lines are named.
_COMES_BACK, _MAX_NAMED = 3, 3
#: Nothing is predicted of a step of which a larger share has no known cause.
_UNKNOWN = 0.1
#: From more tensors per batch on, receiving them is worth a note.
_MANY_TENSORS = 8


def explain(
    seen: Observations,
    program: str,
    exit_code: int | None,
    environment: Environment,
    races: int | None = None,
) -> DiagnosisResult:
    """Turn what the windows saw into the result that is shown and stored."""
    measured = seen.measured
    step_ms, trace = measured.step_ms, measured.trace
    parts, replay, lines = None, None, _Lines(measured.waits)
    if trace is not None and step_ms is not None:
        divided = breakdown(trace)
        parts = _parts(divided, step_ms)
        replay = Replay(trace, step_ms, _loading_ms(measured.loader, trace))
        lines.join(trace, divided, replay, step_ms)
    known = lines.diagnosed()
    watched = len(measured.waits)
    result = DiagnosisResult(
        program=program,
        exit_code=exit_code,
        outcome=_outcome(seen, races is not None),
        steps=seen.steps,
        calls_per_step=seen.calls_per_step,
        backwards_per_step=measured.backwards / watched if watched and measured.backwards else None,
        step_ms=step_ms,
        low_ms=min(measured.clean_ns) / 1e6 if measured.clean_ns else None,
        high_ms=max(measured.clean_ns) / 1e6 if measured.clean_ns else None,
        noise_ms=_noise_ms(measured.clean_ns),
        nvml_share=measured.nvml_share,
        profiled_ms=measured.profiled_total_ns / measured.profiled_steps / 1e6
        if measured.profiled_steps
        else None,
        watched_ms=measured.watched_total_ns / watched / 1e6
        if watched and races is None and not seen.is_recorded
        else None,
        parts=parts,
        idle_share=1 - parts.computing / step_ms if parts is not None and step_ms else None,
        launches_per_step=trace.launches_per_step() if trace is not None else None,
        waits_per_step=measured.waits_per_step if watched else None,
        waits_in_trace=_waits_in(trace) if trace is not None else None,
        loader_ms=measured.loader.batch_ms if measured.loader is not None else None,
        lines=known,
        python_lines=tuple(_python_lines(measured, parts, replay, step_ms)),
        replay_error=replay.error if replay is not None else None,
        predictions=_predictions(measured, replay, step_ms, parts),
        races=races,
        notes=tuple(_notes(seen, parts, replay)),
        missing=tuple(_missing(seen, replay, lines, parts)),
        has_cupti=measured.has_cupti,
        timeline=_timeline(trace, lines) if trace is not None and measured.has_cupti else None,
        environment=environment,
    )
    if measured.rank is not None:
        figures = figures_of(measured.rank, result, measured.rank_waits_ms, measured.host_lines)
        result = replace(result, ranks=(figures,))
    return replace(result, verdict=verdict_of(result, seen))


def _noise_ms(clean_ns: Sequence[int]) -> float | None:
    if len(clean_ns) < _EVEN_STEPS:
        return None
    return 2 * statistics.stdev(clean_ns) / math.sqrt(len(clean_ns)) / 1e6


def _outcome(seen: Observations, is_fake: bool) -> Outcome:
    if seen.is_recorded:
        return "complete"
    if seen.calls == 0:
        return "no step"
    if seen.calls == 1:
        return "one step"
    measured = seen.measured
    if seen.on_cpu and (measured.clean_ns or is_fake):
        return "on the CPU"
    if not measured.clean_ns and not measured.waits:
        return "too few steps"
    if is_fake:
        return "lines only"
    return "complete" if measured.is_complete and measured.trace is not None else "partial"


def _parts(divided: Breakdown, step_ms: float) -> TimeParts:
    scaled = divided.scaled_to(step_ms)
    return TimeParts(**{cause.replace(" ", "_"): scaled[cause] for cause in CAUSES})


def _loading_ms(loader: LoaderFacts | None, trace: StepTrace) -> float:
    """What the loader needs for the batches of a step, on its own; 0 if that is not known."""
    if loader is None or loader.batch_ms is None:
        return 0.0
    return loader.batch_ms * len(trace.inputs) / trace.steps


def _waits_in(trace: StepTrace) -> float:
    return sum(map(len, groups_by_step(trace))) / trace.steps


# --- lines ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Known:
    """What is known of one line. `calls` are its waiting calls in the trace."""

    wait: Wait
    count: int = 0
    calls: set[int] = field(default_factory=set)
    blocked_ms: float | None = None
    idle_ms: float | None = None
    gain_ms: float | None = None


class _Lines:
    """The waiting lines, and their waits in the trace."""

    def __init__(self, steps: Sequence[Sequence[Wait]]) -> None:
        self._steps = [[wait for wait in waits if _takes_part(wait)] for waits in steps]
        self.known: dict[LineKey, _Known] = {}
        for wait in (wait for waits in steps for wait in waits):
            self.known.setdefault(key_of(wait), _Known(wait)).count += 1
        self.joined_share: float | None = None

    def join(self, trace: StepTrace, divided: Breakdown, replay: Replay, step_ms: float) -> None:
        """Find each line's waits in the trace: by order, in steps with as many waits."""
        patterns: dict[int, Counter[tuple[LineKey, ...]]] = {}
        for waits in self._steps:
            keys = tuple(key_of(wait) for wait in waits if not _is_copy(wait))
            patterns.setdefault(len(keys), Counter())[keys] += 1
        joined = 0
        for groups in groups_by_step(trace):
            waited = [calls for calls in groups if not _only_copies(trace, calls)]
            if len(waited) not in patterns:
                continue
            joined += 1
            keys = patterns[len(waited)].most_common(1)[0][0]
            for key, calls in zip(keys, waited, strict=True):
                self.known[key].calls |= set(calls)
            self._join_copies([calls for calls in groups if _only_copies(trace, calls)])
        self.joined_share = joined / trace.steps
        if joined == 0:
            return
        scale = step_ms / trace.step_ms / joined / 1e6
        for known in self.known.values():
            if not known.calls:
                continue
            spans = (trace.calls[at] for at in known.calls)
            known.blocked_ms = sum(call.end_ns - call.start_ns for call in spans) * scale
            known.idle_ms = divided.idle_ms(known.calls, step_ms) / self.joined_share
        if replay.holds:
            self._predict(replay, step_ms, self.joined_share)

    def _join_copies(self, groups: list[list[int]]) -> None:
        """Copies from memory that is not pinned: a small one does not block, so the trace may have
        fewer than the lines. Then it is not known which, unless all are at one line."""
        keys = [key_of(wait) for wait in self._steps[-1] if _is_copy(wait)] if self._steps else []
        if len(set(keys)) == 1:
            keys = keys[:1] * len(groups)
        if len(keys) == len(groups):
            for key, calls in zip(keys, groups, strict=True):
                self.known[key].calls |= set(calls)

    def _predict(self, replay: Replay, step_ms: float, share: float) -> None:
        """`share` of the steps have the lines' waits: a replay without them gains only there."""
        joined = [known for known in self.known.values() if known.blocked_ms is not None]
        worst = sorted(joined, key=lambda known: -(known.blocked_ms or 0.0))
        for known in worst[:_MAX_PREDICTED]:
            speedup = replay.speedup(Change(without=frozenset(known.calls)))
            known.gain_ms = min(step_ms, step_ms * (1 - 1 / speedup) / share)

    def diagnosed(self) -> tuple[DiagnosedLine, ...]:
        """The lines with the largest gain first, then the longest idle time, then the count."""
        steps = max(1, len(self._steps))
        found = [
            DiagnosedLine(
                form=known.wait.form.name,
                title=known.wait.form.title,
                advice=known.wait.form.advice,
                line=_shortened(known.wait.line),
                called_from=_shortened(known.wait.called_from),
                per_step=known.count / steps,
                blocked_ms=known.blocked_ms,
                idle_ms=known.idle_ms,
                gain_ms=known.gain_ms,
                excerpt=_excerpt(known.wait.called_from or known.wait.line),
            )
            for known in self.known.values()
        ]
        return tuple(
            sorted(
                found,
                key=lambda one: (-(one.gain_ms or 0), -(one.idle_ms or 0), -one.per_step),
            )
        )


def _shortened(line: LineRecord | None) -> LineRecord | None:
    return None if line is None else replace(line, file=short_path(line.file))


def _excerpt(line: LineRecord | None) -> Excerpt | None:
    """The code around a line; None if there is no source."""
    if line is None:
        return None
    first = max(1, line.line - _AROUND)
    numbers = range(first, line.line + _AROUND + 1)
    code = [linecache.getline(line.file, number).rstrip() for number in numbers]
    there = code[line.line - first].strip()
    if not there or not line.text.startswith(there):  # the file has changed, or is another
        return None
    while not code[-1]:
        code.pop()
    return Excerpt(first, tuple(textwrap.dedent("\n".join(code)).split("\n")))


def _python_lines(
    measured: Measurements, parts: TimeParts | None, replay: Replay | None, step_ms: float | None
) -> Iterator[PythonLine]:
    """The lines of Python between launches. What they would gain together is divided as the idle
    time is."""
    if parts is None or step_ms is None or not _has_python_lines(measured):
        return
    gain_ms = None
    if replay is not None and replay.holds:
        gain_ms = step_ms * (1 - 1 / replay.speedup(NO_PYTHON))
    for one in measured.python_lines[:_MAX_PREDICTED]:
        yield PythonLine(
            line=replace(one.line, file=short_path(one.line.file)),
            called_from=_shortened(one.called_from),
            ms=one.ms,
            # The profiled steps may have waited longer for Python than those that were sampled.
            idle_ms=min(one.ms, parts.host * one.idle_share),
            gain_ms=None if gain_ms is None else min(one.ms, gain_ms * one.idle_share),
            excerpt=_excerpt(one.called_from or one.line),
        )


def _has_python_lines(measured: Measurements) -> bool:
    """Whether the samples cover most of the idle time: else they would name lines by chance."""
    return sum(one.idle_share for one in measured.python_lines) >= _MIN_SAMPLED


def key_of(wait: Wait) -> LineKey:
    return wait.line, wait.called_from, wait.form.name


def _is_copy(wait: Wait) -> bool:
    return wait.operation in ("copy from pageable memory", "copy of a strided view")


def _only_copies(trace: StepTrace, calls: list[int]) -> bool:
    return all(trace.calls[at].kind == "copy" for at in calls)


def _takes_part(wait: Wait) -> bool:
    """Whether the trace shows the wait as one: freeing the cache need not block, and the calls of
    threads that do not train are not in it."""
    return wait.form.name != "empty_cache" and not wait.in_other_thread


def groups_by_step(trace: StepTrace) -> list[list[list[int]]]:
    """The waits of each step in the trace. A wait is a list of calls: a blocking copy consists of
    the copy and the wait after it."""
    steps: list[list[list[int]]] = [[] for _ in range(trace.steps)]
    after_copy = False
    for at, call in enumerate(trace.calls):
        if call.kind in ("wait", "copy"):
            group = steps[trace.step_of(call.start_ns)]
            if after_copy and "StreamSynchronize" in call.name and group:
                group[-1].append(at)
            else:
                group.append([at])
        after_copy = call.kind in ("wait", "copy") and "Memcpy" in call.name
    return steps


def _timeline(trace: StepTrace, lines: _Lines) -> StoredTimeline:
    """Two steps of the trace: the streams, the host's waits, loading and long Python, and why the
    device was idle, with the line if it is known."""
    start_ns, end_ns = trace.start_ns, trace.marks[min(1, len(trace.marks) - 1)]
    names = {at: _title(known.wait) for known in lines.known.values() for at in known.calls}
    spans = [
        Span(f"stream {one.stream}", one.name, _span_kind(one.kind), one.start_ns, one.end_ns)
        for one in trace.work
    ]
    spans += [
        Span("host", names.get(at, call.name), "wait", call.start_ns, call.end_ns)
        for at, call in enumerate(trace.calls)
        if call.kind in ("wait", "copy")
    ]
    spans += [Span("host", "loader", "host", start, end) for start, end in trace.inputs]
    spans += [
        Span("host", "Python", "host", one.start_ns, one.end_ns)
        for one in host_segments(trace)
        if one.cause == "host"
    ]
    spans += [
        Span("GPU idle", _idle_name(one, names), "wait", one.start_ns, one.end_ns)
        for one in takewhile(lambda one: one.start_ns < end_ns, idle_times(trace))
        if one.cause != "computing"
    ]
    shown = [
        replace(
            span,
            start_ns=max(0, span.start_ns - start_ns),
            end_ns=min(span.end_ns, end_ns) - start_ns,
        )
        for span in spans
        if start_ns < span.end_ns and span.start_ns < end_ns
    ]
    return StoredTimeline(min(2, trace.steps), tuple(shown[:_MAX_SPANS]))


def _idle_name(idle: Idle, names: dict[int, str]) -> str:
    call = idle.charged_to.call if idle.charged_to is not None else None
    return idle.cause if call is None else f"{idle.cause}: {names.get(call, 'unknown line')}"


def _span_kind(kind: str) -> Kind:
    return "copy" if kind == "copy" else "kernel"


def _title(wait: Wait) -> str:
    where = wait.called_from or wait.line
    return (
        wait.form.title if where is None else f"{short_path(where.file)}:{where.line} {where.text}"
    )


# --- what if, notes, verdict ----------------------------------------------------------------------


def _predictions(
    measured: Measurements,
    replay: Replay | None,
    step_ms: float | None,
    parts: TimeParts | None,
) -> tuple[Prediction, ...]:
    if replay is None or step_ms is None or not replay.holds or _unknown_share(parts) > _UNKNOWN:
        return ()
    speedups = {
        "without all waits": replay.speedup(NO_WAITS),
        "with the plan pipeline": replay.speedup(PIPELINE),
        "with the plan graph": replay.speedup(GRAPH),
        "with headrace run": replay.speedup(RUN),
        "with a loader that is always ready": replay.speedup(INSTANT_LOADER),
        "without Python between launches": replay.speedup(NO_PYTHON),
    }
    if measured.loader is not None and measured.loader.workers == 0:
        speedups[f"with {_WORKERS} loader processes"] = replay.speedup_with_workers(_WORKERS)
    return tuple(
        Prediction(change, step_ms / speedup, speedup) for change, speedup in speedups.items()
    )


def _unusual_steps(trace: StepTrace, watched: Sequence[Sequence[Wait]]) -> list[str]:
    """Steps with many more waits than the others, at the end of an epoch for example, unless such
    a step was also watched."""
    counts = [len(groups) for groups in groups_by_step(trace)]
    usual = int(statistics.median_low(counts))
    many = usual + max(3, usual // 2)
    more = [count for count in counts if count >= many]
    if not more or any(len(waits) >= many for waits in watched):
        return []
    return [
        f"{len(more)} of {len(counts)} profiled steps waited up to {max(more)} times instead of "
        f"{usual}, perhaps for a checkpoint or an evaluation: the lines of these waits are not "
        "known"
    ]


def _waits_in_threads(measured: Measurements) -> list[str]:
    waits = [wait for waits in measured.waits for wait in waits if wait.in_other_thread]
    places = dict.fromkeys(
        f"{short_path(one.line.file)}:{one.line.line}" for one in waits if one.line
    )
    return [
        f"{place} waits in a thread of its own, which holds training up only if training waits for "
        "that thread"
        for place in places
    ]


def _uneven_steps(seen: Observations) -> list[str]:
    """One step of many may do more than the others, which a mean hides."""
    clean_ns = seen.measured.clean_ns
    if len(clean_ns) < _EVEN_STEPS:
        return []
    usual, longest = statistics.median(clean_ns), max(clean_ns)
    if longest < _UNEVEN * usual:
        return []
    return [
        f"the longest of {len(clean_ns)} steps took {longest / 1e6:.1f} ms, the median "
        f"{usual / 1e6:.1f} ms: a part of the loop runs in some steps only, such as an evaluation "
        "or the start of an epoch"
        + ("" if seen.is_recorded else f"; to measure whole rounds, pass {step_line_option(seen)}")
    ]


def _lines_left_out(seen: Observations) -> list[str]:
    """Lines that the script came back to before its waits were looked for, and not afterwards: a
    rollout before many updates, for example."""
    measured = seen.measured
    lines = [wait.called_from or wait.line for waits in measured.waits for wait in waits]
    listed = {(line.file, line.line) for line in lines if line is not None}
    left_out = [
        (early.waits, f"{short_path(line.file)}:{line.line}")
        for line, early in measured.early_waits.items()
        if early.visits >= _COMES_BACK and (line.file, line.line) not in listed
    ]
    if not measured.waits or not left_out:
        return []
    count = sum(waits for waits, _ in left_out)
    left_out.sort(key=lambda one: -one[0])
    named = ", ".join(place for _, place in left_out[:_MAX_NAMED])
    more = f" and {len(left_out) - _MAX_NAMED} more lines" if len(left_out) > _MAX_NAMED else ""
    return [
        f"{named}{more} waited {count} times before the steps that were looked at, and not in "
        "them: if the loop comes back there, as for a rollout or an evaluation, measure whole "
        f"rounds with {step_line_option(seen)}"
    ]


def _notes(seen: Observations, parts: TimeParts | None, replay: Replay | None) -> list[str]:
    measured = seen.measured
    notes = [*seen.notes, *_waits_in_threads(measured), *_uneven_steps(seen)]
    notes += _lines_left_out(seen)
    if measured.loader is not None:
        notes += _loader_notes(measured.loader, measured.waits, parts)
    if replay is not None and replay.holds and replay.is_limited_by_loader(GRAPH):
        notes.append(
            "with the plan graph, the loader would be the limit: more processes (num_workers), or "
            "fewer tensors per batch, make it faster"
        )
    if seen.period is not None and not seen.period.repeats:
        notes.append(
            "the optimizer steps do not repeat: each call of the most frequent one counts as a "
            f"step; {step_line_option(seen)} names a better place"
        )
    return notes


def _loader_notes(
    loader: LoaderFacts, watched: Sequence[Sequence[Wait]], parts: TimeParts | None
) -> Iterator[str]:
    if not loader.workers and parts is not None and parts.input > SMALL * parts.total:
        yield "the DataLoader has no worker processes: pass num_workers=4 or more"
    if not loader.pins and any(
        wait.form.name in ("to", "pageable copy", "accelerate copy")
        for waits in watched
        for wait in waits
    ):
        yield "the DataLoader does not pin its batches: pass pin_memory=True"
    if loader.workers and loader.batch_tensors > _MANY_TENSORS:
        yield (
            f"a batch has {loader.batch_tensors} tensors. Loader processes send each one on its "
            "own, and receiving one takes the training process about 0.3 ms: stack them, or join "
            "them into one tensor and split it on the device"
        )


def _unknown_share(parts: TimeParts | None) -> float:
    """The share of a step in which nobody knows what the GPU waited for."""
    return parts.unattributed / parts.total if parts is not None and parts.total else 0.0


def _missing(
    seen: Observations, replay: Replay | None, lines: _Lines, parts: TimeParts | None
) -> list[str]:
    measured, trace = seen.measured, seen.measured.trace
    missing = list(measured.missing)
    if trace is not None:
        missing += _unusual_steps(trace, measured.waits)
    if (
        trace is not None
        and not measured.waits
        and not measured.is_complete
        and not measured.missing
    ):
        missing.append(
            "no waits by line: the steps came to an end before they were looked for. "
            f"{more_steps(seen, is_fake=False)}"
        )
    if replay is not None and not replay.holds:
        missing.append(
            f"no predictions: a replay of the trace differs from the trace by {replay.error:.0%}, "
            f"more than {MAX_ERROR:.0%}"
        )
    elif replay is not None and _unknown_share(parts) > _UNKNOWN:
        missing.append(
            f"no predictions: for {_unknown_share(parts):.0%} of a step, the trace does not show "
            "what the GPU waited for"
        )
    if measured.python_lines and not _has_python_lines(measured):
        missing.append(
            "no lines for Python between launches: it is spread over many short stretches"
        )
    is_joined = lines.joined_share is None or lines.joined_share >= 0.5
    if trace is not None and lines.known and not is_joined:
        missing.append(
            f"no times for the lines: the profiler saw {_waits_in(trace):.1f} waits per step, "
            f"but {measured.waits_per_step:.1f} were found by line"
        )
    return missing
