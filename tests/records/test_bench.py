"""A stored benchmark: what it may lack, and what it must not hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import BenchError, ReportError
from headrace.records import BenchResult, Environment, Verdict
from support.report_samples import bench_sample


@pytest.fixture
def content() -> dict[str, Any]:
    return bench_sample(("baseline", "graph"), steps=1, losses=3)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["rows", 0, "ms_per_step", "median"], "fast", "rows[0].ms_per_step.median = 'fast'"),
        (["rows", 1, "equal", "verdict"], "same", "expected reference, identical, within"),
        (["rows", 0, "streams"], 3, "rows[0].streams = 3: expected a list"),
        (["rows", 0, "gpu", "busy_share"], None, "rows[0].gpu.busy_share is missing"),
        (["rows"], None, "rows = []: expected at least one plan"),
        (["work"], [], "work = []: expected a mapping"),
        (["settings", "steps"], 2.5, "settings.steps = 2.5: expected a whole number"),
        (["rows", 0, "waits", "by_reason"], [1], "waits.by_reason = [1]: expected a mapping"),
        (["interrupted"], 1, "interrupted = 1: expected true or false"),
        (["kind"], "other", "kind = 'other': expected 'headrace bench'"),
        (["version"], 2, "version = 2: expected 1"),
        (["verdict", "take"], 5, "verdict.take = 5: expected text"),
    ],
)
def test_a_bad_field_is_named(
    content: dict[str, Any], path: list[Any], value: object, message: str
) -> None:
    place: Any = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ReportError) as caught:
        BenchResult.from_dict(content, file="x.json")
    assert str(caught.value).startswith("x.json: ")
    assert message in str(caught.value)


def test_a_missing_field_has_its_default_and_a_new_one_is_ignored(content: dict[str, Any]) -> None:
    content["rows"][0]["of_a_later_version"] = 1
    del content["environment"]["torch"], content["rows"][1]["waits"]
    result = BenchResult.from_dict(content)
    assert result.environment.torch == ""
    assert result.row("graph").waits is None
    least = {"kind": "headrace bench", "version": 1, "rows": [{"plan": "mine"}]}
    result = BenchResult.from_dict(least)
    assert (result.environment, result.verdict) == (Environment(), Verdict())
    del content["rows"][1]["plan"]
    with pytest.raises(ReportError, match=r"rows\[1\]\.plan is missing: expected text"):
        BenchResult.from_dict(content)


def test_a_result_comes_back_from_its_file(content: dict[str, Any], tmp_path: Path) -> None:
    result = BenchResult.from_dict(content)
    path = tmp_path / "deep" / "result.json"
    result.write(path)
    assert BenchResult.read(path) == result
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert list(stored)[:2] == ["kind", "version"]
    # Names of lanes and kernels are stored once, not with each span.
    assert set(stored["rows"][0]["timeline"]) == {"steps", "spans", "lanes", "names", "kinds"}


def test_a_row_that_is_not_there(content: dict[str, Any]) -> None:
    with pytest.raises(BenchError, match="no row 'max'; there are baseline, graph"):
        BenchResult.from_dict(content).row("max")


def test_files_that_hold_no_result(tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text('{"kind":\n  "head')
    with pytest.raises(ReportError, match=r"torn\.json:2: is not JSON"):
        BenchResult.read(tmp_path / "torn.json")
    with pytest.raises(ReportError, match=r"none\.json: cannot be read"):
        BenchResult.read(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ReportError, match="is not UTF-8"):
        BenchResult.read(tmp_path / "bytes.json")
    with pytest.raises(ReportError, match="expected a mapping, found a list"):
        BenchResult.from_dict([])
