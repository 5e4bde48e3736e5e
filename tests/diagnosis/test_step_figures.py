"""When the user is warned of steps."""

from __future__ import annotations

from headrace.diagnosis.step_figures import StepFigures, StepWarnings, WaitingLine


def figures(step_ms: float, data_ms: float = 0.0, wait_ms: float = 0.0) -> StepFigures:
    waits = (WaitingLine("train.py:30", ".item()", wait_ms),)
    return StepFigures(1000, 100, step_ms, step_ms, data_ms, waits)


def test_slower_steps_are_warned_of_once_with_what_has_grown() -> None:
    warnings = StepWarnings()
    told = [
        *warnings.of(figures(10.0)),
        *warnings.of(figures(15.0, wait_ms=4.0)),
        *warnings.of(figures(10.0)),  # it was a moment
        *warnings.of(figures(15.0, wait_ms=4.0)),
        *warnings.of(figures(15.0, wait_ms=4.0)),
        *warnings.of(figures(15.0, wait_ms=4.0)),
    ]
    assert told == [
        "step 1,000: a step takes 15.0 ms, 1.50 times as long as at first; 4.0 ms more are spent "
        "at train.py:30"
    ]


def test_a_loader_that_is_the_limit_is_warned_of_once() -> None:
    warnings = StepWarnings()
    told = [text for _ in range(4) for text in warnings.of(figures(10.0, data_ms=3.0))]
    assert len(told) == 1
    assert "the data loader is the limit: 3.00 ms of a step of 10.00 ms" in told[0]
