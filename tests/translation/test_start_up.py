"""The parts of a run's start-up, as the terminal and the metrics have them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.engine import CompileReport
from headrace.translation.start_up import StartUp

COMPILED = CompileReport(compiled=True, compilations=2, seconds=40.04, from_cache=1)


@pytest.mark.parametrize(
    ("compiled", "captures", "text"),
    [
        (None, None, "start-up 3.5 s: data 1.5 s, build 2.0 s"),
        (CompileReport(compiled=False, why="no"), 0, "start-up 3.5 s: data 1.5 s, build 2.0 s"),
        (COMPILED, 1, "start-up 44.0 s: data 1.5 s, build 2.0 s, compile 40.0 s, capture 0.5 s"),
        (
            CompileReport(compiled=True, compilations=2, seconds=3.0, from_cache=2),
            None,
            "start-up 6.5 s: data 1.5 s, build 2.0 s, compile 3.0 s; compiled nothing, the code "
            "was in the cache",
        ),
    ],
)
def test_only_parts_that_there_were(
    compiled: CompileReport | None, captures: int | None, text: str
) -> None:
    graphs = None if captures is None else SimpleNamespace(captures=captures, seconds=0.5)
    engine: Any = SimpleNamespace(compiled=compiled, graphs=graphs)
    found = StartUp(1.5, 2.0).with_first_batches(engine)
    assert str(found) == text
    assert list(found.values) == [
        f"{name}_s" for name in re.findall(r"(\w+) [\d.]+ s\b(?!:)", text)
    ]
