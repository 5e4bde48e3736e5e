"""Traces of `benchmarks/inputs/slow_scripts.py` as an H200 ran them: four steps of each.

The speed-ups are those that were measured between each script and its fixed version.
"""

from __future__ import annotations

import pytest

from headrace.diagnosis.breakdown import CAUSES, breakdown
from headrace.diagnosis.what_if import (
    INSTANT_LOADER,
    NO_PYTHON,
    NO_WAITS,
    PIPELINE,
    Change,
    Replay,
)
from support.diagnosis.trace_files import recorded


@pytest.mark.parametrize(
    ("name", "step_ms", "cause", "change", "speedup"),
    [
        ("item", 8.33, "synchronization", NO_WAITS, 1.069),
        ("clipping", 8.38, "synchronization", NO_WAITS, 1.071),
        ("metrics", 8.66, "synchronization", NO_WAITS, 1.129),
        ("pageable", 11.55, "transfer", PIPELINE, 1.521),
        ("slow_loader", 171.9, "input", INSTANT_LOADER, 17.33),
        ("tokenizing", 13.35, "host", NO_PYTHON, 1.677),
    ],
)
def test_cause_and_gain_are_those_that_were_measured(
    name: str, step_ms: float, cause: str, change: Change, speedup: float
) -> None:
    trace = recorded(name)
    parts = breakdown(trace).scaled_to(step_ms)
    assert sum(parts.values()) == pytest.approx(step_ms)
    assert max((one for one in CAUSES if one != "computing"), key=lambda one: parts[one]) == cause
    assert parts["unattributed"] < 0.05 * step_ms
    replay = Replay(trace, step_ms)
    assert replay.holds
    assert replay.speedup(change) == pytest.approx(speedup, rel=0.1)
