"""The checker against a brute-force oracle, on random programs. `benchmarks/race_oracle.py` runs
many more."""

from __future__ import annotations

import pytest

from support.process_groups import fake_process_group
from support.race_oracle import patched_once, random_program


@pytest.fixture(scope="module", autouse=True)
def _process_group():  # type: ignore[no-untyped-def]
    with fake_process_group(), patched_once():
        yield


def test_the_checker_reports_what_the_oracle_finds() -> None:
    racy = 0
    for seed in range(250):
        program = random_program(seed, collectives=True)
        assert program.differences() == [], f"seed {seed}\n{program}"
        racy += program.is_racy
    assert 50 < racy < 240
