"""The checker against a brute-force oracle, on random programs.
`benchmarks/proofs/race_oracle.py` runs many more."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.fake import dispatch_mode, streams
from headrace.races import checker, layout
from support.processes.process_groups import fake_process_group
from support.races.race_oracle import patched_once, random_program


@pytest.fixture(scope="module", autouse=True)
def _process_group():  # type: ignore[no-untyped-def]
    with fake_process_group(), patched_once():
        yield


def test_the_checker_reports_what_the_oracle_finds() -> None:
    racy = 0
    for seed in range(150):
        program = random_program(seed, collectives=True)
        assert program.differences() == [], f"seed {seed}\n{program}"
        racy += program.is_racy
    assert 30 < racy < 145


BROKEN: dict[str, tuple[type, str, Any]] = {
    "the same stream is always in order": (
        checker.StreamView,
        "clock_at",
        lambda view, count: view.clock,
    ),
    "freed memory is nobody's": (checker.Checker, "_free", lambda *_: None),
    "a wait orders nothing": (streams.FakeStream, "joins", lambda *_: None),
    "the making of a tensor orders nothing": (checker.Checker, "made", lambda *_: None),
    "views cover their span": (layout.Layout, "overlaps", lambda *_: True),
    "row numbers name all rows": (dispatch_mode, "touched_parts", lambda _, touched: touched),
    "every pinned copy is direct": (dispatch_mode, "_is_bytewise", lambda *_: True),
    "collectives are not seen": (dispatch_mode.operators, "is_collective", lambda _: False),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_the_oracle_finds_a_broken_checker(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BROKEN[broken])
    programs = (random_program(seed, collectives=True) for seed in range(3000))
    assert any(program.differences() for program in programs)
