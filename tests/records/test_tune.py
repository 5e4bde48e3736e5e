"""A stored search: it comes back as it was, and its trials are in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ReportError
from headrace.records import TuneResult, read_result
from support.report_samples import tune_sample


@pytest.fixture
def content() -> dict[str, Any]:
    return tune_sample()


def test_a_result_comes_back_from_its_file(content: dict[str, Any], tmp_path: Path) -> None:
    result = TuneResult.from_dict(content)
    result.write(tmp_path / "result.json")
    assert read_result(tmp_path / "result.json") == result


def test_a_bad_field_is_named(content: dict[str, Any]) -> None:
    content["trials"][1]["runs_ms"] = ["fast"]
    message = r"trials\[1\]\.runs_ms\[0\] = 'fast': expected a number"
    with pytest.raises(ReportError, match=message):
        TuneResult.from_dict(content)
    content["trials"] = []
    with pytest.raises(ReportError, match=r"trials = \[\]: expected at least one"):
        TuneResult.from_dict(content)


def test_the_fastest_is_first_and_what_did_not_run_is_left_out(content: dict[str, Any]) -> None:
    result = TuneResult.from_dict(content)
    assert [(trial.id, ms) for trial, ms in result.measured] == [
        *((1, 8.61), (2, 8.64), (0, 9.05), (3, 34.1))
    ]
    assert (result.won, result.start) == (result.trials[1], result.trials[0])
