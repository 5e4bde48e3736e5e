"""The first sentences of a diagnosis: what a step waits for, or why that is not known and what to
do about it."""

from __future__ import annotations

from headrace.diagnosis.session import Observations, Settings
from headrace.diagnosis.steps import FIRST_STEP, StepLine
from headrace.records import DiagnosisResult
from headrace.source_lines import short_path

#: What is below this share of a step is not worth a sentence.
SMALL = 0.005
#: The windows by their name on the command line.
_FLAGS = {"warmup": "warmup", "clean": "steps", "profiled": "profiled", "lines": "lines"}
_WAITS_FOR = {
    "input": "for the data loader",
    "transfer": "for copies between host and device",
    "synchronization": "because the host waited for it and then had to launch anew",
    "launch": "because the host cannot launch kernels fast enough",
    "host": "for Python between the launches",
    "other_ranks": "for other ranks",
    "unattributed": "for a reason that the trace does not show",
}


def verdict_of(result: DiagnosisResult, seen: Observations) -> tuple[str, ...]:
    """What was found or went wrong, and what to do about it."""
    if result.outcome in ("no step", "one step", "too few steps"):
        return _too_few_steps(result, seen)
    if result.outcome == "on the CPU":
        return _on_the_cpu(result, seen)
    if result.outcome == "lines only":
        return _on_the_fake_device(result)
    if result.step_ms is None or result.parts is None:
        return _untraced(result, seen)
    idle_ms = result.step_ms - result.parts.computing
    first = (
        f"A step takes {result.step_ms:.1f} ms; the GPU computes for "
        f"{result.parts.computing:.1f} ms of it ({result.parts.computing / result.step_ms:.0%})"
    )
    worst = max(_WAITS_FOR, key=lambda name: getattr(result.parts, name))
    worst_ms = getattr(result.parts, worst)
    if idle_ms < 0.05 * result.step_ms:
        return f"{first}.", "It is busy: faster kernels would help, better feeding would not."
    return f"{first} and waits {worst_ms:.1f} ms {_WAITS_FOR[worst]}.", _headroom(result, idle_ms)


def _headroom(result: DiagnosisResult, idle_ms: float) -> str:
    assert result.step_ms is not None
    bound = result.step_ms / max(result.step_ms - idle_ms, 1e-6)
    text = f"At most {idle_ms:.1f} ms can be gained ({bound:.2f}×)"
    if not result.predictions:
        return f"{text}."
    best = max(result.predictions, key=lambda one: one.speedup)
    if best.speedup < 1 + SMALL:
        return f"{text}, but no change that diagnose can predict gains anything."
    return f"{text}; {best.change}, a step would take {best.step_ms:.1f} ms ({best.speedup:.2f}×)."


def _on_the_fake_device(result: DiagnosisResult) -> tuple[str, ...]:
    waits = result.waits_per_step or 0.0
    count = result.races or 0
    races = f"{count} stream race{'s' if count > 1 else ''}: `headrace races` shows them."
    if count == 0:
        races = "No stream races were found; times need a GPU."
    if not result.lines:
        return "The host never waits for the device in a step.", races
    found = line_count(result)
    lines = f"{found} line{'s' if found > 1 else ''}"
    return f"The host waits for the device {waits:.1f} times a step, at {lines}.", races


def _on_the_cpu(result: DiagnosisResult, seen: Observations) -> tuple[str, ...]:
    if result.races is not None:
        where = "inside fake_cuda()" if seen.is_block else "with --fake"
        return (
            f"{_subject(seen)} trains on the CPU, so nothing was checked.",
            "If it has an option for its device, choose CUDA: torch.cuda.is_available() is True "
            f"{where}.",
        )
    step = f"A step takes {result.step_ms:.1f} ms." if result.step_ms else ""
    return f"{_subject(seen)} trains on the CPU: there is no GPU to keep busy.", step


# --- code that ended too soon ---------------------------------------------------------------------


def _too_few_steps(result: DiagnosisResult, seen: Observations) -> tuple[str, ...]:
    subject, line = _subject(seen), seen.settings.step_line
    name_a_line = f"name a line that runs once per step: {step_line_option(seen)}"
    if seen.signal or result.exit_code:
        when = f"after {_steps(seen)}, too few to measure"
        if result.outcome == "no step":
            when = f"before {_place(line)} ran" if line is not None else "before its first step"
        see = "" if seen.signal else ": its own output says why"
        return (f"{_ending(result, seen)} {when}{see}.",)
    if result.outcome == "no step" and line is not None:
        return _never_ran(line, seen.lines_that_ran), f"N{name_a_line[1:]}."
    where = seen.backward_line
    if result.outcome == "no step" and where is not None:
        here = f"{short_path(where.file)}:{where.line}"
        return (
            f"{subject} never called an optimizer's step(), but backward() "
            f"{_times(seen.backwards_alone)}.",
            f"To make a step of each, name that line: {step_line_option(seen, here)}.",
        )
    if result.outcome == "no step":
        return (
            f"{subject} never called an optimizer's step() and replayed no graph.",
            f"If it trains in another way, {name_a_line}. Processes that it starts are not "
            "watched.",
        )
    if result.outcome == "one step":
        once = "stepped once" if line is None else f"ran {_place(line)} once"
        return (
            f"{subject} {once}: there is no repeating step to measure.",
            f"Let it train for longer, or {name_a_line}.",
        )
    if not seen.steps:
        return (
            f"{subject} made {seen.calls} optimizer steps and graph replays, and no sequence of "
            "them repeats for long enough: it is not known what a step is.",
            f"Let it train for longer, or {name_a_line}.",
        )
    advice = more_steps(seen, is_fake=result.races is not None)
    if seen.calls_per_step > 1:
        advice += f" If a step is less than that, {name_a_line}."
    return f"{_ending(result, seen)} after {_steps(seen)}, too few to measure.", advice


def _never_ran(line: StepLine, ran: set[int]) -> str:
    """`ran` are the lines of the file that did run."""
    if not ran:
        return f"{_place(line)} never ran, nor did any other line of that file."
    if line.line in ran:
        return f"The body of the loop at {_place(line)} never ran."
    nearest = min(ran, key=lambda one: (abs(one - line.line), -one))
    near = f"{short_path(line.file)}:{nearest}"
    return f"{_place(line)} never ran; the nearest line of that file that ran is {near}."


def _untraced(result: DiagnosisResult, seen: Observations) -> tuple[str, ...]:
    if seen.measured.is_complete or seen.measured.missing or result.step_ms is None:
        return ("The GPU's work could not be traced: only lines and step times are known.",)
    return (
        f"A step takes {result.step_ms:.1f} ms. {_ending(result, seen)} after {_steps(seen)}, "
        "before the GPU's work was traced.",
        more_steps(seen, is_fake=False),
    )


def more_steps(seen: Observations, *, is_fake: bool) -> str:
    """What to do about code that ended too soon."""
    windows = windows_for(seen.steps, seen.settings, is_fake=is_fake)
    if windows is None:
        least = FIRST_STEP + (1 if is_fake else 4)
        return f"Let it train for at least {least} steps."
    options = (", " if seen.is_block else " ").join(
        _option(name, value, seen)
        for name, value in windows.items()
        if value != getattr(seen.settings, name)
    )
    longer = f"Let it train for at least {_all_steps(seen.settings, is_fake)} steps"
    return f"{longer}, or pass {options}." if options else f"{longer}."


def windows_for(steps: int, settings: Settings, *, is_fake: bool) -> dict[str, int] | None:
    """Windows, by their names in `Settings`, for code that trains for so many steps; None if there
    are none so short."""
    warmup = max(FIRST_STEP, min(settings.warmup, steps // 4))
    left = steps - warmup
    if is_fake:
        return {"warmup": warmup, "lines": min(settings.lines, left)} if left >= 1 else None
    if left < 4:
        return None
    lines = max(1, min(settings.lines, left // 7))  # twice if the GPU waits for Python
    profiled = max(1, min(settings.profiled, left // 4))
    clean = max(2, min(settings.clean, left - profiled - 2 * lines))
    return {"warmup": warmup, "clean": clean, "profiled": profiled, "lines": lines}


def _all_steps(settings: Settings, is_fake: bool) -> int:
    warmup = max(FIRST_STEP, settings.warmup)
    if is_fake:
        return warmup + settings.lines
    return warmup + settings.clean + settings.profiled + 2 * settings.lines


def line_count(result: DiagnosisResult) -> int:
    """How many lines waited; a line may do so in several forms."""
    return len({(one.line, one.called_from) for one in result.lines})


# --- words ----------------------------------------------------------------------------------------


def _subject(seen: Observations) -> str:
    return "The block" if seen.is_block else "The script"


def _ending(result: DiagnosisResult, seen: Observations) -> str:
    if seen.signal:
        return f"{seen.signal} ended the script"
    code = f" with exit code {result.exit_code}" if result.exit_code else ""
    return f"{_subject(seen)} ended{code}"


def _steps(seen: Observations) -> str:
    if seen.steps:
        each = f" of {seen.calls_per_step} optimizer steps" if seen.calls_per_step > 1 else ""
        return f"{seen.steps} step{'s' if seen.steps > 1 else ''}{each}"
    return f"{seen.calls} optimizer steps and graph replays"


def _place(line: StepLine) -> str:
    return f"{short_path(line.file)}:{line.line}"


def _option(name: str, value: object, seen: Observations) -> str:
    """An option as the user writes it: of the command, or of `headrace.diagnose()`."""
    return f"{name}={value}" if seen.is_block else f"--{_FLAGS[name]} {value}"


def step_line_option(seen: Observations, line: str = "FILE:LINE") -> str:
    return f'step_line="{line}"' if seen.is_block else f"--step-line {line}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
