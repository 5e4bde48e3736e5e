"""What became of a function's graphs, and why it runs without one."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from headrace.device import Device
from headrace.errors import CaptureError
from headrace.source_lines import line_of_error

log = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True)
class GraphReport:
    """What became of a plan's graphs. `shapes` is how many shapes have a graph now. `replays`
    counts batches that were replayed, `one_by_one` those whose kernels were launched one by one.
    `why` says why nothing is captured (any more); None if graphs are in use. `decision` says what
    `graphs="auto"` measured. `rounding` says why the last digits differ from those of the plain
    loop; None if nothing is known to change them. `seconds` is how long the captures took.
    `rechecks` counts steps that were checked against their graphs; `differed` is what the last
    one that differed has shown."""

    shapes: int
    captures: int
    evictions: int
    replays: int
    one_by_one: int
    memory_bytes: int
    why: str | None
    decision: str | None
    rounding: str | None = None
    seconds: float = 0.0
    rechecks: int = 0
    differed: str | None = None


def warn_not_captured(device: Device, plan_name: str, why: str) -> None:
    """Log once why a plan's step does not run as a graph. `why` is a clause that follows
    "because"."""
    device.warn_once(
        f"graphs: {why}",
        "plan %s: the step's kernels are launched one by one, not as a graph, because %s",
        plan_name,
        why,
    )


def join_reasons(*reasons: str | None) -> str | None:
    """The reasons that there are, each once; None if there are none."""
    return "; ".join(dict.fromkeys(filter(None, reasons))) or None


def log_rounding(plan_name: str, rounding: str | None) -> None:
    """Log after the first capture why the last digits differ from the plain loop's."""
    if rounding is not None:
        log.info("plan %s: %s", plan_name, rounding)


def describe_failure(problem: CaptureError) -> str:
    """A failed capture in words: what was raised, and on which line of the user's code."""
    cause = problem.__cause__
    if cause is None:
        return str(problem)
    text = str(cause).strip().splitlines()[0] if str(cause).strip() else ""
    site = line_of_error(cause.__traceback__)
    where = "" if site is None else f", at {site}"
    return f"the capture failed with {type(cause).__name__}: {text}{where}"
