"""A stored search: it comes back as it was, and its trials compare in one unit."""

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
    content["trials"][1]["rungs"][0]["ms_per_step"] = []
    message = r"trials\[1\]\.rungs\[0\]\.ms_per_step = \[\]: expected at least one number"
    with pytest.raises(ReportError, match=message):
        TuneResult.from_dict(content)
    content["trials"] = []
    with pytest.raises(ReportError, match=r"trials = \[\]: expected at least one"):
        TuneResult.from_dict(content)


def test_trials_with_other_batch_sizes_compare_by_unit(content: dict[str, Any]) -> None:
    result = TuneResult.from_dict(content)
    assert (result.pace_unit, result.pace_ms(result.trials[0])) == ("per step", 9.05)
    for trial, size in zip(content["trials"], (10, 20, 10, 10, 10), strict=True):
        trial |= {"units_per_step": size, "ms_per_unit": 9.0 / size}
    result = TuneResult.from_dict(content)
    assert result.pace_unit == "per thousand tokens"
    assert next(trial.id for trial, _ in result.measured) == 1
    assert result.pace_ms(result.trials[1]) == 450.0
