"""What a run says of its first batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headrace.plan import Plan
from headrace.translation.first_batches import FirstBatchNotes


def said(plan: str, decisions: list[str | None]) -> list[str]:
    """The messages of a run in which `decisions` are found one after the other."""
    messages: list[str] = []
    engine = SimpleNamespace(graphs=SimpleNamespace(decision=decisions[0]))
    parts: Any = SimpleNamespace(
        plan=Plan.preset(plan), engine=engine, device=SimpleNamespace(compiles=False)
    )
    observers: Any = SimpleNamespace(progress=SimpleNamespace(message=messages.append))
    notes = FirstBatchNotes(parts, observers, None, None)
    for decision in decisions:
        engine.graphs = SimpleNamespace(decision=decision)
        for _ in range(20):
            notes.on_batch(0.0, 0)
    return messages


def test_what_auto_has_chosen_is_said_once() -> None:
    assert said("auto", [None, None, "graphs are used", "graphs are used"]) == ["graphs are used"]


def test_a_resumed_run_does_not_say_it_again() -> None:
    assert said("auto", ["graphs are used"] * 2) == []


def test_no_other_plan_says_it() -> None:
    assert said("graph", [None, "graphs are used"]) == []
