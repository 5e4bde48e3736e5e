"""What became of a function's graphs, and why it runs without one."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headrace.device import Device
from headrace.errors import CaptureError
from headrace.source_lines import line_of_error

if TYPE_CHECKING:
    from headrace.capture.reports.speed_up_report import SpeedUpReport

log = logging.getLogger("headrace")
#: How a training step runs, from the most to the least that a graph repeats.
Way = Literal["whole step", "parts", "children", "eager"]


@dataclass(frozen=True, slots=True)
class GraphReport:
    """What became of a plan's graphs. `shapes` is how many shapes have a graph now. `replays`
    counts batches that were replayed, `one_by_one` those whose kernels were launched one by one.
    `way` is how steps run now: the "whole step" as a graph, its "parts" (the model's forward and
    backward, and the update), the model's "children" where the model cannot be captured as a whole,
    or "eager". `why` says why the whole step is not captured (any more); None if it is, or if that
    is not known yet. `parts` says the same of the model and the optimizer; None if they have not
    been tried. `decision` says what `graphs="auto"` measured. `rounding` says why the last digits
    differ from those of the plain loop; None if nothing is known to change them. `seconds` is how
    long the captures took. `rechecks` counts steps that were checked against their graphs;
    `differed` is what the last one that differed has shown."""

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
    way: Way = "eager"
    parts: SpeedUpReport | None = None

    def __str__(self) -> str:
        lines = [f"steps run as: {self.way}"]
        if self.decision is not None:
            lines.append(self.decision)
        lines.append(
            f"whole step: {self.replays:,} replays, {self.one_by_one:,} eager, {self.captures} "
            f"captures, {self.memory_bytes / 1e6:,.0f} MB"
        )
        if self.why is not None and self.why != self.decision:
            lines.append(f"  not captured, because {self.why}")
        if self.rounding is not None:
            lines.append(f"  {self.rounding}")
        return "\n".join([*lines, *([] if self.parts is None else [str(self.parts)])])


def warn_not_captured(device: Device, plan_name: str, why: str, *, expected: bool = False) -> None:
    """Log once why a plan's step does not run as a graph. `why` is a clause that follows
    "because". `expected`: nobody has asked for graphs."""
    text = "plan %s: the step is not captured as a graph, because %s"
    if expected:
        log.info(text, plan_name, why)
    else:
        device.warn_once(f"graphs: {why}", text, plan_name, why)


def join_reasons(*reasons: str | None) -> str | None:
    """The reasons that there are, each once; None if there are none."""
    return "; ".join(dict.fromkeys(filter(None, reasons))) or None


def log_rounding(plan_name: str, rounding: str | None) -> None:
    """Log after the first capture why the last digits differ from the plain loop's."""
    if rounding is not None:
        log.info("plan %s: %s", plan_name, rounding)


# A backward that finds the nodes of an earlier step makes their stream wait for the capture. What
# CUDA says of it, and the fake device.
_FROM_KEPT_HISTORY = (
    "previous error during capture",
    "dependency created on uncaptured work",
    "would depend on a capturing stream",
)
_KEPT_HISTORY = (
    "; if something still holds the loss of an earlier step with its history, let the step return "
    "loss.detach()"
)


def describe_failure(problem: CaptureError) -> str:
    """A failed capture in words: what was raised, and on which line of the user's code."""
    cause = problem.__cause__
    if cause is None:
        return str(problem)
    text = str(cause).strip().splitlines()[0] if str(cause).strip() else ""
    site = line_of_error(cause.__traceback__)
    where = "" if site is None else f", at {site}"
    advice = _KEPT_HISTORY if any(one in text for one in _FROM_KEPT_HISTORY) else ""
    return f"the capture failed with {type(cause).__name__}: {text}{where}{advice}"
